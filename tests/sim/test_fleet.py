# SPDX-License-Identifier: Apache-2.0
"""Several engines with their real heads against each other, in every weather, from many seeds.

A failing case names its seed: ``pytest 'tests/sim/test_fleet.py::test_...[17]'`` repeats it
exactly.
"""

import pytest

from tests.sim.fleet import Fleet, Shape
from tests.sim.jobs import End
from tests.sim.network import Weather

SEEDS = range(24)
REQUESTS = 20
CALM = Weather(calm_at=20.0, mishaps=False)
STORMS = {
    "mishaps": Weather(calm_at=20.0),
    "lossy": Weather(calm_at=20.0, lost=0.1, repeated=0.1, late=0.1),
    "slow": Weather(calm_at=20.0, slow_writes=0.2, failed_writes=0.1, late=0.1),
    "cuts": Weather(calm_at=30.0, lost=0.02, cuts=0.2, slow_writes=0.1),
    "deaths": Weather(calm_at=30.0, encode_deaths=0.05, slow_writes=0.2, late=0.05, lost=0.02),
    "all": Weather(
        calm_at=30.0,
        lost=0.05,
        repeated=0.1,
        late=0.1,
        slow_writes=0.1,
        failed_writes=0.05,
        cuts=0.1,
        encode_deaths=0.05,
        prefill_deaths=0.03,
    ),
}


def play(seed: int, weather: Weather) -> Fleet:
    fleet = Fleet(seed, weather, REQUESTS)
    fleet.run(seconds_of_calm=90.0)
    fleet.assert_at_rest()
    assert sum(fleet.ends().values()) == REQUESTS
    return fleet


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("storm", STORMS)
def test_every_request_ends_once_in_time_and_engines_come_to_rest(storm: str, seed: int) -> None:
    play(seed, STORMS[storm])


@pytest.mark.parametrize("seed", SEEDS)
def test_in_calm_weather_every_request_is_loaded(seed: int) -> None:
    fleet = play(seed, CALM)
    assert fleet.ends() == {End.LOADED: REQUESTS}, [job.failure for job in fleet.jobs()]


@pytest.mark.parametrize("seed", range(5))
def test_encode_ranks_that_serve_nobody_rest_with_those_that_do(seed: int) -> None:
    fleet = Fleet(seed, CALM, REQUESTS, Shape((3, 2), (1, 2), 1 << 15))
    fleet.run(seconds_of_calm=4.0)
    fleet.assert_encode_at_rest()


def test_the_same_seed_plays_the_same_fleet() -> None:
    fleets = [play(7, STORMS["all"]) for _ in range(2)]
    assert len({(fleet.timeline.steps, fleet.ends()[End.LOADED]) for fleet in fleets}) == 1


@pytest.mark.parametrize("storm", STORMS)
def test_storms_let_requests_through(storm: str) -> None:
    loaded = sum(play(seed, STORMS[storm]).ends()[End.LOADED] for seed in range(8))
    assert loaded > REQUESTS
