# SPDX-License-Identifier: Apache-2.0
"""What the simulation once found, as small worlds of its own or by the seeds that found it."""

from functools import partial

import pytest

from tests.sim.fleet import Fleet
from tests.sim.jobs import End
from tests.sim.runner import play_seed
from tests.sim.weather import Shape, Weather

CALM = Weather(mishaps=False)
PAIR = Shape((1,), (1,), 1 << 15)
HERE = "encode-0"

ONCE_FOUND: tuple[tuple[str | None, int, str], ...] = (
    (None, 101, "silence was noticed a heartbeat late where floats round down"),
    ("cuts", 50, "silence was noticed a heartbeat late where floats round down"),
    ("cuts", 56, "silence was noticed a heartbeat late where floats round down"),
    ("loops", 2415, "a fence counted time in which its process was stopped"),
    ("loops", 386, "a fence counted time in which its process was stopped"),
)
"""Storm, seed, and what was wrong."""


@pytest.mark.parametrize(("storm", "seed", "what"), ONCE_FOUND)
def test_what_a_seed_once_found_is_right_now(storm: str | None, seed: int, what: str) -> None:
    finding = play_seed(seed, storm).finding
    assert finding is None, "\n".join([what, *finding.trace])


@pytest.mark.parametrize("every_s", [0.3, 0.9])
def test_a_writer_is_missed_however_many_rooms_it_is_granted_meanwhile(every_s: float) -> None:
    fleet = Fleet(0, CALM, 0, PAIR)
    (writer,) = fleet.encodes[HERE].ranks
    fleet.plan_item("first", 3.0, HERE, 0)
    fleet.timeline.at(6.0, lambda: writer.freeze(midway=False))
    for number in range(int(12.0 / every_s)):
        fleet.plan_item(f"item-{number}", 6.5 + number * every_s, HERE, 0)
    fleet.timeline.at(19.0, writer.thaw)
    fleet.run()
    fleet.hold_rest()
    ends = {job.request: job.end for job in fleet.jobs()}
    assert ends["first"] is End.LOADED
    assert ends["item-0"] is End.FAILED


def test_a_writer_is_missed_on_time_whatever_floats_do() -> None:
    for number in range(20):
        fleet = Fleet(number, CALM, 0, PAIR)
        (writer,) = fleet.encodes[HERE].ranks
        fleet.plan_item("first", 3.0, HERE, 0)
        fleet.timeline.at(6.0, partial(writer.freeze, midway=False))
        fleet.plan_item("second", 6.1 + number / 7.3, HERE, 0)
        fleet.timeline.run(16.0)
