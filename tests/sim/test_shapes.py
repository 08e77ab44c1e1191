# SPDX-License-Identifier: Apache-2.0
"""Encode engines and prefill engines of every size against each other.

A failing case names its shape and its seed: running it alone repeats it exactly.
"""

import pytest

from epd_connector.core import send_pressure
from epd_connector.core.encode_head import EncodeHead
from epd_connector.core.send_copies import CopyDesk
from epd_connector.errors import Code
from epd_connector.memory.slab import ALIGNMENT
from epd_connector.rows import served_ranks
from tests.sim.encode import EncodeProcess
from tests.sim.fleet import MAX_ROWS, Fleet
from tests.sim.jobs import End, Job
from tests.sim.memory import ROW_NBYTES
from tests.sim.weather import Shape, Weather

REQUESTS = 10
SLAB = 1 << 15
SIZES = [1, 2, 3, 4]
MORE_THAN_PREFILL = [(e, p) for e in SIZES for p in SIZES if e > p]
CALM = Weather(calm_at=20.0, mishaps=False)
SLOW_S = 1.0
"""Seconds that a slow write takes: it is not given up for that."""
HERE = "encode-0"


def pair(encode: int, prefill: int, weather: Weather, seed: int = 0, requests: int = 0) -> Fleet:
    """One encode engine and one prefill engine."""
    return Fleet(seed, weather, requests, Shape((encode,), (prefill,), SLAB))


def calm_pair(encode: int, prefill: int, write_s: float = 0.0) -> Fleet:
    """A pair without requests of its own, whose writes take ``write_s`` seconds or more."""
    fleet = pair(encode, prefill, CALM)
    fleet.fabric.least_s = write_s
    return fleet


def ranks_of(fleet: Fleet, *, serving: bool) -> list[EncodeProcess]:
    """Encode ranks that serve somebody, or those that serve nobody."""
    (encode,), (prefill,) = fleet.shape.encode, fleet.shape.prefill
    ranks = fleet.encodes[HERE].ranks
    return [r for n, r in enumerate(ranks) if bool(served_ranks(n, encode, prefill)) == serving]


def job(fleet: Fleet, name: str) -> Job:
    (found,) = (job for job in fleet.jobs() if job.request == name)
    return found


@pytest.mark.parametrize("prefill", SIZES)
@pytest.mark.parametrize("encode", SIZES)
def test_in_calm_weather_every_request_is_loaded(encode: int, prefill: int) -> None:
    for seed in range(3):
        fleet = pair(encode, prefill, CALM, seed, REQUESTS)
        fleet.run(seconds_of_calm=60.0)
        fleet.hold_rest()
        assert fleet.ends() == {End.LOADED: REQUESTS}


# --- encode ranks that serve nobody ---------------------------------------------------------


@pytest.mark.parametrize(("encode", "prefill"), MORE_THAN_PREFILL)
def test_they_let_go_while_others_are_still_writing(encode: int, prefill: int) -> None:
    fleet = calm_pair(encode, prefill, SLOW_S)
    fleet.plan_item("one", 3.0, HERE, 0)
    fleet.timeline.run(3.4)
    for process in ranks_of(fleet, serving=False):
        process.hold_rest()
        assert process.machine.counters.rooms_failed == 0
    for process in ranks_of(fleet, serving=True):
        assert process.machine.balance().landed > 0
    fleet.run(seconds_of_calm=60.0)
    fleet.hold_rest()
    assert job(fleet, "one").end is End.LOADED


@pytest.mark.parametrize(("encode", "prefill"), MORE_THAN_PREFILL)
def test_they_stage_nothing_of_a_room_that_was_opened_before_its_rows_came(
    encode: int, prefill: int
) -> None:
    fleet = calm_pair(encode, prefill)
    fleet.plan_item("one", 3.0, HERE, 0, encoded_after_s=1.0)
    fleet.timeline.run(10.0)
    assert job(fleet, "one").end is End.LOADED
    assert [r.machine.counters.bytes_staged for r in ranks_of(fleet, serving=False)] == [0] * (
        encode - prefill
    )
    assert all(r.machine.counters.bytes_staged for r in ranks_of(fleet, serving=True))


@pytest.mark.parametrize(("encode", "prefill"), MORE_THAN_PREFILL)
def test_where_the_first_word_is_lost_they_hear_when_the_room_has_landed(
    encode: int, prefill: int
) -> None:
    fleet = calm_pair(encode, prefill, SLOW_S)
    host, scheduler = fleet.encodes[HERE], fleet.schedulers[0]
    fleet.plan_item("first", 3.0, HERE, 0)
    cut = fleet.network.cut
    fleet.timeline.at(14.0, lambda: cut(host.head.incarnation, scheduler.head.incarnation, 0.4))
    fleet.plan_item("second", 14.0, HERE, 0)
    fleet.timeline.run(14.4)
    for process in ranks_of(fleet, serving=False):
        assert process.machine.balance().landed > 0
    fleet.timeline.run(23.0)
    assert job(fleet, "second").end is End.LOADED
    fleet.hold_encode_rest()
    assert sum(p.machine.counters.rooms_failed for p in fleet.encode_ranks()) == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("encode", "prefill"), [(3, (1, 2)), (4, (3, 1)), (2, (2, 2)), (1, (2, 3))]
)
def test_two_prefill_engines_that_are_told_of_one_room_come_to_an_end(
    encode: int, prefill: tuple[int, int], seed: int
) -> None:
    fleet = Fleet(seed, CALM, 0, Shape((encode,), prefill, SLAB))
    fleet.plan_item("one", 3.0, HERE, 0, 1)
    fleet.run(seconds_of_calm=60.0)
    fleet.hold_rest()
    ends = [job.end for job in fleet.jobs() if job.request == "one"]
    assert len(ends) == 2
    assert set(ends) <= {End.LOADED, End.FAILED}


# --- the failure of one rank ----------------------------------------------------------------


@pytest.mark.parametrize("write_s", [0.0, SLOW_S])
@pytest.mark.parametrize(("encode", "prefill"), [(2, 2), (2, 4), (3, 3), (4, 2)])
def test_a_write_that_breaks_on_one_rank_fails_the_room_on_all_and_the_next_one_works(
    encode: int, prefill: int, write_s: float
) -> None:
    fleet = calm_pair(encode, prefill, write_s)
    broken = ranks_of(fleet, serving=True)[1].incarnation
    fleet.fabric.broken.add(broken)
    fleet.plan_item("one", 3.0, HERE, 0)
    fleet.timeline.run(12.0)
    failure = job(fleet, "one").failure
    assert failure is not None
    assert failure.code is Code.WRITE_FAILED
    fleet.schedulers[0].head.hold_rest()
    fleet.hold_encode_rest()
    fleet.fabric.broken.clear()
    fleet.plan_item("two", 19.0, HERE, 0)
    fleet.run(seconds_of_calm=60.0)
    fleet.hold_rest()
    assert job(fleet, "two").end is End.LOADED


def test_a_prefill_rank_that_cannot_reach_its_server_fails_the_room_on_the_other_encode_rank() -> (
    None
):
    fleet = calm_pair(2, 2)
    encode, prefill = fleet.encodes[HERE].ranks, fleet.schedulers[0].head.engine.ranks
    cut = fleet.network.cut
    fleet.timeline.at(3.0, lambda: cut(encode[1].incarnation, prefill[1].incarnation, 8.0))
    fleet.plan_item("one", 3.0, HERE, 0, encoded_after_s=15.0)
    fleet.timeline.run(4.0)
    assert [len(process.machine.rooms()) for process in encode] == [1, 1]
    fleet.timeline.run(9.0)
    failure = job(fleet, "one").failure
    assert failure is not None
    assert failure.code is Code.PEER_DEAD
    fleet.hold_encode_rest()
    fleet.run(seconds_of_calm=60.0)
    fleet.hold_rest()


# --- slabs for four items, and many requests at once -----------------------------------------


CROWD = [f"r{number}" for number in range(40)]
BROKEN: dict[str, tuple[object, str, object]] = {
    "granted rows wait in line": (CopyDesk, "grant", lambda desk, copy: None),
    "nothing is kept for them": (
        CopyDesk,
        "_lease",
        lambda desk, copy: desk.slab.lease(copy.nbytes),
    ),
    "their requests are held back": (send_pressure, "_lacks_rows", lambda room: False),
    "nobody is held back": (EncodeHead, "holds_back", lambda head, rooms, now: False),
}


def crowded(seed: int, encode: int, prefill: tuple[int, ...]) -> Fleet:
    item = -(-MAX_ROWS * ROW_NBYTES // ALIGNMENT) * ALIGNMENT
    shape = Shape((encode,), prefill, 4 * item, 4 * item, ahead_rows=16 * MAX_ROWS)
    fleet = Fleet(seed, CALM, 0, shape)
    fleet.crowd(HERE, CROWD)
    fleet.run(seconds_of_calm=60.0)
    return fleet


@pytest.mark.parametrize("prefill", [(1,), (2, 1)])
@pytest.mark.parametrize("encode", [1, 2])
def test_crowds_lose_nothing_to_small_slabs(encode: int, prefill: tuple[int, ...]) -> None:
    """Whatever the order in which rows and grants come, of which each fills a slab."""
    held_back = 0
    for seed in range(5):
        fleet = crowded(seed, encode, prefill)
        fleet.hold_rest()
        assert fleet.ends() == {End.LOADED: len(CROWD)}, seed
        held_back += fleet.encodes[HERE].held_back
    assert held_back > 0


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_crowds_would_lose_requests_otherwise(
    broken: tuple[object, str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*broken)
    assert crowded(0, 1, (1,)).ends() != {End.LOADED: len(CROWD)}
