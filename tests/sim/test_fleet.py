# SPDX-License-Identifier: Apache-2.0
"""Worlds of consecutive seeds in all weathers, and what they must be good for.

A failing seed is shown with ``python -m tests.sim --seed SEED --only``.
"""

import subprocess
import sys
from collections import Counter

import pytest

from tests.sim.fleet import Fleet
from tests.sim.jobs import End
from tests.sim.runner import draw_fleet, play, play_fleet
from tests.sim.weather import Shape, Weather

STEPS = 40_000
FIRST_SEED = 1
REQUESTS = 20
ROOMY = 1 << 15
CALM = Weather(mishaps=False)
HAPPENS = (
    "items_whole",
    "items_sharded",
    "items_shared",
    "items_reloaded",
    "bytes_staged",
    "bytes_lent",
    "items_encoded_locally",
    "rooms_cancelled",
    "rooms_skipped",
    "grants_refused",
    "grants_repeated",
    "frames_stale",
    "writes_failed",
    "writes_late",
    "stagings_deferred",
    "leases_deferred",
    "peers_lost",
)
"""What machines count, and must have counted in a handful of worlds."""


def play_on(seed: int, weather: Weather, shape: Shape | None = None) -> Fleet:
    fleet = Fleet(seed, weather, REQUESTS, shape)
    fleet.run()
    fleet.hold_rest()
    return fleet


def test_no_rule_is_broken() -> None:
    played = play(STEPS, FIRST_SEED)
    assert played.finding is None, "\n".join(played.finding.trace)
    # A million steps are a thousand worlds.
    assert played.steps / played.seeds < 1000


@pytest.mark.parametrize("seed", range(10))
def test_in_calm_weather_every_request_is_loaded(seed: int) -> None:
    shape = Shape((1 + seed % 3, 2), (1 + seed % 4, 2), ROOMY, direct=bool(seed % 2))
    fleet = play_on(seed, CALM, shape)
    assert fleet.ends() == {End.LOADED: REQUESTS}, [job.failure for job in fleet.jobs()]


@pytest.mark.parametrize("seed", range(5))
def test_in_calm_weather_small_slabs_only_make_requests_wait(seed: int) -> None:
    fleet = play_on(seed, CALM, Shape((2,), (2,), 2048, send_nbytes=1024, cache_items=1, items=4))
    assert fleet.ends() == {End.LOADED: REQUESTS}, [job.failure for job in fleet.jobs()]


def test_the_same_seed_plays_the_same_world() -> None:
    fleets = [draw_fleet(7, kept=None) for _ in range(2)]
    for fleet in fleets:
        assert play_fleet(7, fleet).finding is None
    assert fleets[0].trace.lines() == fleets[1].trace.lines()


def test_worlds_are_neither_calm_nor_hopeless() -> None:
    ends: Counter[End | None] = Counter()
    counted: Counter[str] = Counter()
    for seed in range(50):
        fleet = draw_fleet(seed)
        fleet.run()
        ends += fleet.ends()
        for process in fleet.processes.values():
            counted.update(process.counts())
    assert ends[End.LOADED] > sum(ends.values()) / 4
    assert min(ends[end] for end in End) > 0
    assert [name for name in HAPPENS if not counted[name]] == []


def test_encode_ranks_that_serve_nobody_rest_with_those_that_do() -> None:
    for seed in range(5):
        fleet = Fleet(seed, CALM, REQUESTS, Shape((3, 2), (1, 2), ROOMY))
        fleet.run(seconds_of_calm=4.0)
        fleet.hold_encode_rest()


def test_from_the_command_line() -> None:
    command = [sys.executable, "-m", "tests.sim", "--steps", "300", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("sim: PASS steps=")
    assert last.endswith("violations=0")
