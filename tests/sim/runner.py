# SPDX-License-Identifier: Apache-2.0
"""Plays worlds of consecutive seeds, and says which rule was broken, where, and what led there."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.fleet import Fleet
from tests.sim.invariants import Invariant, Violation
from tests.sim.trace import KEPT
from tests.sim.weather import STORMS, draw_shape, draw_weather

MOST_REQUESTS = 18


@dataclass(frozen=True, slots=True)
class Finding:
    """``seed`` broke ``invariant``; ``trace``: what led there, for a person to read."""

    seed: int
    steps: int
    invariant: type[Invariant]
    detail: str
    trace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Played:
    """One world, or several: how many steps and seeds, and what was found, if anything."""

    steps: int
    seeds: int
    finding: Finding | None


def draw_fleet(seed: int, kept: int | None = KEPT, storm: str | None = None) -> Fleet:
    """The world of ``seed``, in a weather of its own or in one of ``STORMS``."""
    rng = random.Random(seed)
    weather = draw_weather(rng) if storm is None else STORMS[storm]
    shape = draw_shape(rng)
    return Fleet(rng, weather, rng.randint(2, MOST_REQUESTS), shape, kept)


def play_fleet(seed: int, fleet: Fleet) -> Played:
    """Plays ``fleet``, the world of ``seed``, to its end or to the first rule that is broken."""
    finding = None
    try:
        fleet.run()
        fleet.hold_rest()
    except Violation as violation:
        trace = (f"{fleet.weather.words()}; {fleet.shape}", *fleet.trace.lines())
        finding = Finding(seed, fleet.timeline.steps, violation.invariant, violation.detail, trace)
    except Exception as error:
        error.add_note(f"in the world of seed {seed}, at {fleet.now:.4f} s")
        raise
    return Played(fleet.timeline.steps, 1, finding)


def play_seed(seed: int, storm: str | None = None) -> Played:
    return play_fleet(seed, draw_fleet(seed, storm=storm))


def play(
    steps: int,
    seed: int,
    storm: str | None = None,
    told: Callable[[int, int], None] = lambda steps, seeds: None,
) -> Played:
    """Worlds of ``seed``, ``seed + 1``, ... until ``steps`` are done; stops at a violation.

    ``told`` is called after each world with the steps and seeds so far.
    """
    done = seeds = 0
    while done < steps:
        played = play_seed(seed + seeds, storm)
        done, seeds = done + played.steps, seeds + 1
        if played.finding is not None:
            return Played(done, seeds, played.finding)
        told(done, seeds)
    return Played(done, seeds, None)
