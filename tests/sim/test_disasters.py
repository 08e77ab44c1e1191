# SPDX-License-Identifier: Apache-2.0
"""One disaster at a time, in calm weather: what it ends, how soon, and the next request works."""

from collections.abc import Callable

import pytest

from epd_connector.errors import Code
from tests.sim.fleet import Fleet
from tests.sim.heads import RECEIVE_TIMEOUT_S
from tests.sim.jobs import End, Job
from tests.sim.memory import FENCE_S
from tests.sim.weather import Shape, Weather

CALM = Weather(calm_at=40.0, mishaps=False)
HERE = "encode-0"
PEER_TIMEOUT_S = 5.0
SOON_S = 1.0
BEGUN, STRUCK = 3.0, 3.5
"""A request comes, and something strikes while its rows are being written."""

Strike = Callable[[Fleet], None]


def struck(strike: Strike, *, direct: bool = False, prefill: int = 2) -> Fleet:
    """A world of two encode and some prefill ranks, whose writes take a second and more."""
    fleet = Fleet(0, CALM, 0, Shape((2,), (prefill,), 1 << 15, direct=direct))
    fleet.fabric.least_s = 1.0
    fleet.plan_item("first", BEGUN, HERE, 0)
    fleet.timeline.at(STRUCK, lambda: strike(fleet))
    return fleet


def ended(fleet: Fleet, request: str) -> Job:
    (job,) = (job for job in fleet.jobs() if job.request == request)
    return job


def works_again(fleet: Fleet, since: float) -> None:
    fleet.plan_item("next", since, HERE, 0)
    fleet.run()
    fleet.hold_rest()
    assert ended(fleet, "next").end is End.LOADED


def quarantined(fleet: Fleet) -> int:
    return fleet.schedulers[0].head.machine.balance().quarantined


def encode_engine_ends(fleet: Fleet) -> None:
    fleet.encodes[HERE].kill()


def encode_host_vanishes(fleet: Fleet) -> None:
    fleet.encodes[HERE].host.up = False
    fleet.encodes[HERE].kill()


@pytest.mark.parametrize("direct", [False, True])
def test_rooms_of_a_killed_engine_fail_at_once_and_their_regions_come_back(direct: bool) -> None:
    fleet = struck(encode_engine_ends, direct=direct)
    fleet.timeline.run(STRUCK + SOON_S)
    failure = ended(fleet, "first").failure
    assert failure is not None
    assert failure.code is Code.PEER_DEAD
    assert quarantined(fleet) > 0
    fleet.timeline.run(STRUCK + SOON_S + FENCE_S)
    assert quarantined(fleet) == 0


@pytest.mark.parametrize("place", ["encode-0", "elsewhere"])
def test_after_a_restart_the_next_request_works(place: str) -> None:
    fleet = struck(encode_engine_ends)
    fleet.timeline.run(STRUCK + 0.1)
    fleet.start_encode(0, place)
    works_again(fleet, STRUCK + 0.1 + 2 * SOON_S)


def test_a_host_that_vanished_keeps_its_regions_until_somebody_says_that_it_is_dead() -> None:
    fleet = struck(encode_host_vanishes)
    fleet.timeline.run(STRUCK + PEER_TIMEOUT_S + SOON_S)
    failure = ended(fleet, "first").failure
    assert failure is not None
    assert failure.code is Code.PEER_DEAD
    fleet.timeline.run(CALM.calm_at)
    assert quarantined(fleet) > 0
    fleet.schedulers[0].head.host_gone("encode-0")
    fleet.timeline.run(CALM.calm_at + FENCE_S + SOON_S)
    assert quarantined(fleet) == 0
    fleet.start_encode(0, "elsewhere")
    works_again(fleet, CALM.calm_at + FENCE_S + 3 * SOON_S)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("midway", [False, True])
def test_an_encode_rank_that_is_stopped_keeps_its_region_until_it_goes_on(
    direct: bool, midway: bool
) -> None:
    stopped_s = 2 * RECEIVE_TIMEOUT_S

    def strike(fleet: Fleet) -> None:
        for process in fleet.encodes[HERE].ranks:
            process.freeze(midway=midway)
            fleet.timeline.after(stopped_s, process.thaw)

    fleet = struck(strike, direct=direct)
    fleet.timeline.run(STRUCK + stopped_s - SOON_S)
    assert ended(fleet, "first").end is (
        End.LOADED if midway and not quarantined(fleet) else End.FAILED
    )
    fleet.timeline.run(STRUCK + stopped_s + SOON_S)
    assert quarantined(fleet) == 0
    works_again(fleet, STRUCK + stopped_s + 2 * SOON_S)


@pytest.mark.parametrize("direct", [False, True])
def test_a_prefill_rank_that_is_stopped_fails_its_room_when_it_goes_on(direct: bool) -> None:
    stopped_s = 2 * RECEIVE_TIMEOUT_S

    def strike(fleet: Fleet) -> None:
        process = fleet.schedulers[0].head.engine.ranks[1]
        process.freeze(midway=False)
        fleet.timeline.after(stopped_s, process.thaw)

    fleet = struck(strike, direct=direct)
    fleet.timeline.run(STRUCK + stopped_s - SOON_S)
    assert ended(fleet, "first").end is End.FAILED
    works_again(fleet, STRUCK + stopped_s + 2 * SOON_S)


@pytest.mark.parametrize("prefill", [1, 2, 4])
def test_a_prefill_engine_ends_and_encode_ranks_let_go_within_the_peer_timeout(
    prefill: int,
) -> None:
    def strike(fleet: Fleet) -> None:
        fleet.schedulers[0].kill()
        fleet.gone.append(fleet.schedulers.pop(0))

    fleet = struck(strike, prefill=prefill)
    fleet.timeline.run(STRUCK + PEER_TIMEOUT_S + SOON_S)
    fleet.hold_encode_rest()
    fleet.start_prefill(0, "prefill-0")
    works_again(fleet, STRUCK + PEER_TIMEOUT_S + 2 * SOON_S)


def test_one_prefill_rank_ends_and_its_part_of_every_room_fails() -> None:
    def strike(fleet: Fleet) -> None:
        head = fleet.schedulers[0].head
        head.engine.ranks[1].kill()
        head.rank_ended(1)

    fleet = struck(strike)
    fleet.timeline.run(STRUCK + SOON_S)
    failure = ended(fleet, "first").failure
    assert failure is not None
    assert "of this engine is gone" in failure.reason
