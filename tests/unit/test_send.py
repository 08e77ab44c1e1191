# SPDX-License-Identifier: Apache-2.0
"""The encode rank's rules: order, time, ends, and frames that do not fit."""

import itertools
from dataclasses import replace

import msgspec
import pytest

from epd_connector.core.effects import Effect, ForgetSession, Reply, Stage, Write
from epd_connector.core.send import EncodeRank
from epd_connector.core.send_events import Ended, FromPeer, Stop, Wrote
from epd_connector.core.send_state import RoomState
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    Cancelled,
    Identify,
    Landed,
    Ping,
    Pong,
    Refused,
    Stale,
    Welcome,
)
from tests.unit.send_bench import (
    BROKEN,
    ME,
    ROW_NBYTES,
    ROWS,
    SETTINGS,
    Bench,
    answers,
    dropped,
    full_grant,
    of,
    reason,
    replies,
)

ENDED = Failure(Code.ENCODE_FAILED, "the request is over")


# --- order ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(["claim", "encode", "grant"])))
def test_the_order_of_arrival_is_free(order: tuple[str, ...]) -> None:
    bench = Bench()
    bench.hello()
    effects: list[Effect] = []
    for step in order:
        effects += getattr(bench, step)()
    if order.index("encode") < order.index("claim"):
        assert dropped(effects) == [1]
        effects = bench.encode(token=2)
    effects = bench.stage(effects)
    assert [write.nbytes for write in of(Write, effects)] == [ROWS * ROW_NBYTES]
    assert answers(bench.wrote(effects)) == [(0, "Landed", 1, 1)]
    assert bench.at_rest()


def test_a_grant_is_written_from_its_rows_to_its_region() -> None:
    bench = Bench(ranks=2)
    for rank in (0, 1):
        bench.hello(rank)
        part = full_grant(1, 7, start=5 * rank, count=5, nbytes=5 * ROW_NBYTES, sharded=True)
        bench.hear(msgspec.structs.replace(part, offset=512 + rank), rank)
    effects = bench.claim() + bench.encode()
    (stage,) = of(Stage, effects)
    writes = of(Write, bench.stage(effects))
    assert [(w.transport, w.session) for w in writes] == [("shm", "slab-0"), ("shm", "slab-1")]
    assert [w.source - stage.offset for w in writes] == [0, 5 * ROW_NBYTES]
    assert [w.destination for w in writes] == [512, 513]
    assert [w.nbytes for w in writes] == [5 * ROW_NBYTES] * 2


def test_no_receiver_waits_for_another() -> None:
    bench = Bench(ranks=2)
    bench.asked(rank=0)
    assert answers(bench.wrote(bench.offer())) == [(0, "Landed", 1, 1)]
    assert bench.state() is RoomState.OFFERED
    effects = bench.asked(rank=1)
    assert answers(bench.wrote(effects)) == [(1, "Landed", 1, 1)]
    assert bench.at_rest()
    assert bench.count("items_sent") == 1


def test_a_grant_of_no_rows_is_answered_without_a_write() -> None:
    bench = Bench(ranks=2)
    bench.hello(0)
    bench.hello(1)
    bench.claim(rows=1)
    effects = bench.stage(bench.encode(rows=1))
    effects = bench.grant(1, 1, 1, rows=1, start=1, count=0, nbytes=0, sharded=True)
    assert answers(effects) == [(1, "Landed", 1, 1)]
    assert of(Write, effects) == []
    assert bench.state() is RoomState.OFFERED


# --- time ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "code", "words"),
    [
        (["asked"], Code.NOT_OFFERED, "no request of the encode engine claimed the room"),
        (["asked", "claim"], Code.TIMEOUT, "did not encode the item"),
        (["asked", "claim", "encode"], Code.TIMEOUT, "raise send_slab_bytes"),
    ],
)
def test_a_room_that_gets_no_further_fails_in_time(
    steps: list[str], code: Code, words: str
) -> None:
    bench = Bench()
    for step in steps:
        getattr(bench, step)()
    bench.hear(Ping())
    bench.now = 119.0
    bench.hear(Ping())
    assert answers(bench.tick(119.9)) == []
    effects = bench.tick(120.0)
    assert answers(effects) == [(0, "Refused", 1, 1)]
    assert reason(effects).code is code
    assert words in reason(effects).reason
    assert "offer_timeout_s" in reason(effects).reason
    assert bench.state() is None


def test_an_offer_that_nobody_wants_ends_in_time() -> None:
    bench = Bench()
    bench.offer()
    assert bench.machine.next_deadline() == 120.0
    bench.tick(120.0)
    assert bench.at_rest()
    assert bench.count("rooms_failed") == 1


def test_when_one_rank_never_asks_those_that_did_are_not_told_twice() -> None:
    bench = Bench(ranks=2)
    bench.asked(rank=0)
    bench.wrote(bench.offer())
    assert answers(bench.tick(120.0)) == []
    assert bench.at_rest()
    effects = bench.asked(rank=1)
    assert answers(effects) == [(1, "Refused", 1, 1)]
    assert reason(effects).code is Code.TIMEOUT


def test_a_late_write_stalls_and_is_answered_once_it_has_ended() -> None:
    bench = Bench(ranks=2)
    bench.asked(rank=0)
    bench.asked(rank=1)
    late, other = of(Write, bench.offer())
    bench.do(Wrote(other.write))
    bench.now = 29.0
    bench.hear(Ping())
    effects = bench.tick(30.0)
    assert answers(effects) == [(0, "Stalled", 1, 1)]
    assert "write_timeout_s" in reason(effects).reason
    assert bench.state() is RoomState.DRAINING
    assert not bench.at_rest()
    assert bench.machine.balance().landed > 0
    effects = bench.do(Wrote(late.write))
    assert answers(effects) == [(0, "Refused", 1, 1)]
    assert bench.at_rest()


def test_a_silent_peer_fails_its_rooms_and_no_others() -> None:
    bench = Bench(ranks=2)
    bench.asked(1, 1, rank=0)
    bench.asked(2, 1, rank=1)
    bench.now = 4.0
    assert [r.frame for r in of(Reply, bench.hear(Ping(), rank=1))] == [Pong()]
    effects = bench.tick(5.0)
    assert of(ForgetSession, effects) == [ForgetSession("shm", "slab-0")]
    assert reason(effects).code is Code.PEER_DEAD
    assert bench.machine.rooms() == {2: RoomState.ASKED}
    assert bench.machine.next_deadline() == 9.0


def test_a_silent_peer_keeps_what_is_being_written_for_it() -> None:
    bench = Bench()
    bench.asked()
    effects = bench.offer()
    bench.tick(5.0)
    assert bench.state() is RoomState.DRAINING
    assert bench.machine.balance().landed > 0
    bench.wrote(effects)
    assert bench.at_rest()


def test_rows_are_not_kept_for_ever_for_a_write_to_a_lost_peer() -> None:
    bench = Bench()
    bench.asked()
    effects = bench.offer()
    bench.tick(5.0)
    bench.tick(34.9)
    assert bench.machine.balance().landed > 0
    bench.tick(35.0)
    assert bench.machine.balance().free == bench.machine.balance().capacity
    assert bench.state() is RoomState.DRAINING
    # Another item takes the memory; the write must not be said to have landed.
    bench.offer(2, "other")
    said = bench.wrote(effects)
    assert [kind for _, kind, _, _ in answers(said)] == ["Refused"]
    assert bench.machine.rooms() == {2: RoomState.OFFERED}


def test_a_late_write_that_was_cancelled_takes_no_rows_from_others() -> None:
    bench = Bench(ranks=2)
    bench.asked(1, 1, rank=0)
    bench.asked(1, 1, rank=1)
    bench.offer()
    bench.cancel(1, 1, rank=0)
    for now in (10.0, 20.0, 29.9):
        bench.now = now
        for rank in (0, 1):
            bench.hear(Ping(), rank)
        bench.tick(now)
    bench.tick(30.0)
    assert bench.state() is RoomState.DRAINING
    assert bench.machine.balance().landed > 0


def test_other_rooms_keep_rows_that_a_lost_peer_is_being_written() -> None:
    bench = Bench(ranks=2)
    bench.asked(1, 1, rank=0)
    bench.offer(1)
    bench.claim(2)
    bench.tick(5.0)
    bench.tick(35.0)
    assert bench.machine.balance().landed > 0
    assert bench.state(2) is RoomState.OFFERED


# --- skip, cancel, end, stop -----------------------------------------------------------


def test_a_skip_before_the_claim_is_remembered() -> None:
    bench = Bench()
    bench.skip()
    assert bench.claim() == []
    assert dropped(bench.encode()) == [1]
    assert bench.at_rest()
    assert bench.count("rooms_skipped") == 1


def test_a_skip_releases_an_offer_at_once() -> None:
    bench = Bench()
    bench.offer()
    bench.skip()
    assert bench.at_rest()
    assert bench.count("rooms_failed") == 0
    bench.skip()
    assert bench.count("rooms_skipped") == 1


def test_a_skip_of_a_room_that_was_served_changes_nothing() -> None:
    bench = Bench()
    bench.asked()
    bench.wrote(bench.offer())
    counted = bench.machine.counters.counts()
    assert bench.skip() == []
    assert bench.machine.counters.counts() == counted
    assert answers(bench.grant()) == [(0, "Landed", 1, 1)]
    assert bench.at_rest()


def test_a_skip_ends_a_room_that_this_rank_serves_to_nobody() -> None:
    bench = Bench()
    bench.machine = EncodeRank(replace(SETTINGS, rank=1, ranks=2))
    bench.offer()
    assert not bench.at_rest()
    assert bench.skip() == []
    assert bench.at_rest()


def test_a_cancel_is_answered_when_nothing_is_written_any_more() -> None:
    bench = Bench()
    bench.asked()
    effects = bench.offer()
    assert bench.cancel() == []
    assert bench.machine.balance().landed > 0
    assert answers(bench.wrote(effects)) == [(0, "Cancelled", 1, 1)]
    assert bench.at_rest()
    assert answers(bench.cancel()) == [(0, "Cancelled", 1, 1)]


def test_a_cancel_overtakes_a_stall() -> None:
    bench = Bench()
    bench.asked()
    effects = bench.offer()
    bench.skip()
    assert bench.cancel() == []
    assert answers(bench.wrote(effects, BROKEN)) == [(0, "Cancelled", 1, 1)]


def test_a_cancel_that_comes_before_its_grant_holds() -> None:
    bench = Bench()
    bench.hello()
    bench.offer()
    assert answers(bench.cancel()) == [(0, "Cancelled", 1, 1)]
    effects = bench.grant()
    assert of(Write, effects) == []
    assert answers(effects) == [(0, "Cancelled", 1, 1)]


def test_rows_that_will_not_come_fail_the_room() -> None:
    bench = Bench()
    bench.asked()
    bench.claim()
    assert reason(bench.do(Ended(1, ENDED))) == ENDED


def test_the_end_of_the_request_does_not_stop_what_is_staged() -> None:
    bench = Bench()
    bench.asked()
    effects = bench.offer()
    assert bench.do(Ended(1, ENDED)) == []
    assert answers(bench.wrote(effects)) == [(0, "Landed", 1, 1)]


def test_a_stop_fails_everything_and_begins_nothing() -> None:
    bench = Bench(ranks=2)
    bench.asked(1, 1)
    effects = bench.offer(1)
    bench.asked(2, 2)
    told = bench.do(Stop())
    assert answers(told) == [(0, "Stalled", 1, 1), (0, "Refused", 2, 2)]
    assert reason(told).code is Code.SHUTDOWN
    assert answers(bench.grant(3, 3)) == [(0, "Refused", 3, 3)]
    bench.claim(4, "other")
    assert dropped(bench.encode("other", 9)) == [9]
    bench.wrote(effects)
    assert bench.at_rest()


# --- frames ----------------------------------------------------------------------------


def test_a_frame_for_an_older_incarnation_is_answered_stale() -> None:
    bench = Bench()
    effects = bench.hear(full_grant(1, 1), addressee=999)
    assert effects == [Reply(0, 2000, Stale(999))]
    assert bench.machine.rooms() == {}
    assert bench.count("frames_stale") == 1


@pytest.mark.parametrize("frame", [Identify("m"), Landed(1, 1), Welcome(), Cancelled(1, 1)])
def test_a_frame_that_is_not_for_an_encode_rank_is_counted(frame: Identify) -> None:
    bench = Bench()
    assert bench.hear(frame) == []
    assert bench.count("frames_malformed") == 1


def test_a_grant_before_the_hello_is_not_taken() -> None:
    bench = Bench()
    assert bench.grant() == []
    assert bench.machine.rooms() == {}
    bench.asked()
    assert bench.state() is RoomState.ASKED


def test_a_slab_does_not_move_under_its_grants() -> None:
    bench = Bench()
    bench.asked()
    assert bench.hello(slab_nbytes=1 << 10) == []
    assert bench.count("frames_malformed") == 1
    bench.cancel()
    assert replies(bench.hello(slab_nbytes=1 << 10)) == [Welcome()]


def test_answers_go_where_the_peer_was_heard_last() -> None:
    bench = Bench()
    bench.asked()
    bench.do(FromPeer(42, 2000, ME, Ping()))
    effects = bench.wrote(bench.offer())
    assert answers(effects) == [(42, "Landed", 1, 1)]


def test_a_full_table_refuses_with_the_key_to_raise() -> None:
    bench = Bench(max_rooms=1)
    bench.claim(1)
    effects = bench.asked(2, 1)
    assert reason(effects).code is Code.OVERLOADED
    assert "max_rooms" in reason(effects).reason
    assert isinstance(replies(effects)[0], Refused)


def test_an_end_before_anything_else_is_remembered() -> None:
    bench = Bench()
    bench.do(Ended(1, ENDED))
    assert reason(bench.asked()) == ENDED
    assert bench.claim() == []
    assert bench.at_rest()
