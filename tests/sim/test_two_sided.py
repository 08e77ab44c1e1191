# SPDX-License-Identifier: Apache-2.0
"""Encode ranks and prefill ranks against each other, in every weather, from many seeds.

A failing case names its seed: ``pytest 'tests/sim/test_two_sided.py::test_...[17]'``
repeats it exactly.
"""

import pytest

from tests.sim.network import Weather
from tests.sim.world import World

SEEDS = range(40)
STORMS = {
    "calm": Weather(calm_at=20.0, mishaps=False),
    "lossy": Weather(calm_at=20.0, lost=0.1, repeated=0.1, late=0.1),
    "slow": Weather(calm_at=20.0, slow_writes=0.2, failed_writes=0.1, late=0.1),
    "cuts": Weather(calm_at=30.0, lost=0.02, cuts=0.5, slow_writes=0.1),
    "deaths": Weather(calm_at=30.0, encode_deaths=0.1, slow_writes=0.2, late=0.05, lost=0.02),
    "all": Weather(
        calm_at=30.0,
        lost=0.05,
        repeated=0.1,
        late=0.1,
        slow_writes=0.1,
        failed_writes=0.05,
        cuts=0.2,
        encode_deaths=0.05,
        prefill_deaths=0.05,
    ),
}


def play(seed: int, weather: Weather, rooms: int = 30) -> World:
    world = World(seed, weather, rooms)
    world.run()
    world.assert_at_rest()
    return world


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("storm", STORMS)
def test_everything_comes_to_rest_and_no_byte_goes_astray(storm: str, seed: int) -> None:
    play(seed, STORMS[storm])


@pytest.mark.parametrize("seed", range(20))
def test_in_calm_weather_every_item_lands(seed: int) -> None:
    assert play(seed, STORMS["calm"]).landed == 30


def test_the_same_seed_plays_the_same_world() -> None:
    worlds = [play(7, STORMS["all"]) for _ in range(2)]
    assert len({(world.timeline.steps, world.landed) for world in worlds}) == 1


def test_storms_let_items_through() -> None:
    for weather in STORMS.values():
        assert sum(play(seed, weather).landed for seed in range(5)) > 15
