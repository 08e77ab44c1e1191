# SPDX-License-Identifier: Apache-2.0
"""Plays worlds of consecutive seeds, and says which rule was broken, where, and what led there."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.sim.fleet import Fleet
from tests.sim.invariants import Invariant, Violation
from tests.sim.trace import KEPT
from tests.sim.weather import draw_shape, draw_weather

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


def draw_fleet(seed: int, kept: int | None = KEPT) -> Fleet:
    """The world of ``seed``."""
    rng = random.Random(seed)
    weather = draw_weather(rng)
    shape = draw_shape(rng)
    return Fleet(rng, weather, rng.randint(2, MOST_REQUESTS), shape, kept)


def play_seed(seed: int, kept: int | None = KEPT, fleet: Fleet | None = None) -> Played:
    """Plays the world of ``seed``, or ``fleet``, to its end or to the first rule it breaks."""
    fleet = fleet or draw_fleet(seed, kept)
    finding = None
    try:
        fleet.run()
        fleet.hold_rest()
    except Violation as violation:
        trace = (f"{fleet.weather.words()}; {fleet.shape}", *fleet.trace.lines())
        finding = Finding(seed, fleet.timeline.steps, violation.invariant, violation.detail, trace)
    return Played(fleet.timeline.steps, 1, finding)


def play(
    steps: int, seed: int, told: Callable[[int, int], None] = lambda steps, seeds: None
) -> Played:
    """Worlds of ``seed``, ``seed + 1``, ... until ``steps`` are done; stops at a violation.

    ``told`` is called after each world with the steps and seeds so far.
    """
    done = seeds = 0
    while done < steps:
        played = play_seed(seed + seeds)
        done, seeds = done + played.steps, seeds + 1
        if played.finding is not None:
            return Played(done, seeds, played.finding)
        told(done, seeds)
    return Played(done, seeds, None)
