# SPDX-License-Identifier: Apache-2.0
"""What a prefill head receives, and when a request may run, fails or is spared."""

import pytest

from epd_connector.core.admission_state import (
    FromRank,
    Joined,
    Left,
    Loading,
    Needed,
    PassEnded,
    Promised,
    RequestState,
    Spared,
    Stop,
    TransferState,
)
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    Pong,
    RoomFailed,
    RoomLanded,
    RoomLoaded,
    RoomReleased,
    RoomsSkipped,
)
from epd_connector.rows import Layout
from tests.unit.admission_harness import (
    HERE,
    ROW,
    THERE,
    Harness,
    abandoned,
    asked,
    failed,
    identity,
    item,
    known,
    local,
    opened,
    rooms_opened,
    settings,
    skipped,
)

WAITING, READY, FAILED = RequestState.WAITING, RequestState.READY, RequestState.FAILED


# --- one item and several -----------------------------------------------------------------


def test_one_item_is_resolved_placed_received_and_loaded() -> None:
    head = Harness()
    assert asked(head.start("r", item("a", 5))) == [f"tcp://{HERE}"]
    assert head.room(5) is TransferState.RESOLVING

    (frame,) = opened(head.hear(identity()))
    assert (frame.room, frame.rows, frame.width, frame.dtype) == (5, 4, 64, "bfloat16")
    assert (frame.itemsize, frame.layout, frame.offset) == (2, Layout.WHOLE, 0)
    assert frame.senders == identity().ranks

    assert head.rank(0, RoomLanded(5, 4 * ROW)) == []
    assert head.state("r") is WAITING
    assert not head.head.holds("a")
    head.rank(1, RoomLanded(5, 4 * ROW))
    assert head.state("r") is READY
    assert head.head.holds("a")

    head.load("r", "a")
    head.leave("r")
    assert head.head.idle()
    assert head.head.balance().resident == 4 * ROW


def test_a_request_waits_for_every_item_from_every_engine() -> None:
    head = Harness()
    head.start("r", item("a", 5), item("b", 6, address=THERE))
    assert rooms_opened(head.hear(identity())) == []
    assert rooms_opened(head.hear(identity(), THERE)) == [5, 6]
    head.land(5)
    assert head.state("r") is WAITING
    head.land(6)
    assert head.state("r") is READY


def test_a_known_engine_is_not_asked_again() -> None:
    head = known()
    effects = head.start("r", item("a", 5))
    assert asked(effects) == []
    assert rooms_opened(effects) == [5]


def test_shards_take_the_bytes_of_the_largest_one() -> None:
    head = known(settings(shard_min_bytes=0, ranks=3))
    (frame,) = opened(head.start("r", item("a", 5, rows=20)))
    assert frame.layout is Layout.SHARDS
    assert head.head.balance().leased == 1024  # 7 rows, rounded up
    head.land(5)
    assert head.head.counters.items_sharded == 1
    assert head.head.counters.embedding_bytes == 20 * ROW


def test_only_items_that_are_worth_a_collective_are_sharded() -> None:
    head = known(settings(shard_min_bytes=5 * ROW))
    effects = head.start("r", item("a", 5, rows=4), item("b", 6, rows=5))
    assert [frame.layout for frame in opened(effects)] == [Layout.WHOLE, Layout.SHARDS]
    head.land(5)
    head.land(6)
    assert head.head.counters.items_whole == 1
    assert head.head.counters.items_sharded == 1


def test_ranks_with_one_slab_share_the_bytes_of_the_whole_item() -> None:
    head = known(settings(shares_slab=True, ranks=3, shard_min_bytes=0))
    (frame,) = opened(head.start("r", item("a", 5, rows=20)))
    assert frame.layout is Layout.SHARED
    assert head.head.balance().leased == 20 * ROW
    head.land(5)
    assert head.head.counters.items_shared == 1
    assert head.head.counters.embedding_bytes == 20 * ROW


def test_one_rank_has_nothing_to_shard() -> None:
    head = known(settings(shard_min_bytes=0, ranks=1))
    assert opened(head.start("r", item("a", 5)))[0].layout is Layout.WHOLE


def test_a_request_without_items_runs() -> None:
    head = Harness()
    head.start("text")
    assert head.state("text") is READY


def test_an_item_that_is_not_needed_yet_receives_nothing() -> None:
    head = known()
    assert head.do(Joined("r", (item("a", 5), item("b", 6)))) == []
    assert rooms_opened(head.need("r", "a")) == [5]
    head.land(5)
    assert head.state("r") is READY
    assert rooms_opened(head.need("r", "b")) == [6]
    assert head.state("r") is WAITING


def test_an_item_without_a_room_is_none_of_its_business() -> None:
    head = known()
    head.start("r", item("a", 5))
    assert head.need("r", "not transferred") == []
    head.land(5)
    assert head.state("r") is READY


def test_joining_or_needing_twice_changes_nothing() -> None:
    head = known()
    head.start("r", item("a", 5))
    assert head.do(Joined("r", (item("b", 6),))) == []
    assert head.need("r", "a") == []
    assert head.head.transfers() == {5: TransferState.RECEIVING}


# --- loads --------------------------------------------------------------------------------


def test_a_loaded_item_stays_until_every_rank_has_loaded_it() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.land(5)
    head.do(Loading("r", "a"))
    head.leave("r")
    assert head.head.balance().landed == 4 * ROW
    head.rank(0, RoomLoaded(5))
    assert head.head.balance().landed == 4 * ROW
    head.rank(0, RoomLoaded(5))
    assert head.head.balance().landed == 4 * ROW
    head.rank(1, RoomLoaded(5))
    assert head.head.balance().resident == 4 * ROW
    assert head.head.counters.items_published == 1


def test_two_loads_of_one_item_count_for_themselves() -> None:
    head = known()
    head.start("one", item("a", 5))
    head.start("two", item("a", 6))
    head.land(5)
    head.do(Loading("one", "a"))
    head.do(Loading("two", "a"))
    head.loaded(5)
    assert head.head.balance().landed == 4 * ROW
    head.loaded(5)
    assert head.head.balance().resident == 4 * ROW


def test_loading_and_promising_what_is_not_held_does_nothing() -> None:
    head = known()
    head.start("r", item("a", 5))
    for hash in ("a", "unknown"):
        assert head.do(Loading("r", hash)) == []
        assert head.do(Promised(hash)) == []
        with pytest.raises(KeyError):
            head.head.held(hash)
    assert head.do(PassEnded()) == []
    assert head.state("r") is WAITING


# --- aborts at every stage ----------------------------------------------------------------


def test_abort_while_the_engine_is_being_asked() -> None:
    head = Harness()
    head.start("r", item("a", 5))
    assert skipped(head.leave("r")) == [5]
    assert head.head.idle()
    assert opened(head.hear(identity())) == []


def test_abort_while_it_waits_for_memory() -> None:
    head = known()
    head.start("large", item("a", 5, rows=32))
    head.start("r", item("b", 6))
    assert head.room(6) is TransferState.QUEUED
    effects = head.leave("r")
    assert skipped(effects) == [6]
    assert abandoned(effects) == []
    assert head.room(6) is None


def test_abort_while_it_is_received_returns_memory_when_every_rank_released_it() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.rank(0, RoomLanded(5, 4 * ROW))
    effects = head.leave("r")
    assert abandoned(effects) == [5]
    assert skipped(effects) == [5]
    assert not head.head.idle()
    head.rank(1, RoomReleased(5))
    head.rank(1, RoomReleased(5))
    assert head.head.balance().quarantined == 4 * ROW
    head.rank(0, RoomReleased(5))
    assert head.head.balance().free == head.head.balance().capacity
    assert head.head.idle()


def test_abort_when_it_is_ready_keeps_the_item() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.land(5)
    assert head.leave("r") == []
    assert head.head.balance().resident == 4 * ROW


def test_leaving_twice_or_without_having_joined_is_nothing() -> None:
    head = known()
    assert head.do(Left("nobody")) == []
    assert head.do(Needed("nobody", ("a",))) == []
    assert head.do(Spared("nobody", ("a",))) == []
    assert not head.head.knows("nobody")


def test_a_new_request_for_an_item_that_is_being_cleared_takes_its_own_room() -> None:
    head = known()
    head.start("one", item("a", 5))
    head.leave("one")
    assert rooms_opened(head.start("two", item("a", 6))) == [6]
    head.land(6)
    head.release(5)
    assert head.state("two") is READY


# --- failures -----------------------------------------------------------------------------


def test_one_rank_fails_and_the_request_fails_once_for_all() -> None:
    head = known()
    head.start("r", item("a", 5), item("b", 6))
    effects = head.fail(5, Code.WRITE_FAILED, rank=1)
    failure = failed(effects)["r"]
    assert failure.code is Code.WRITE_FAILED
    for part in ("0000000000000005", HERE, "rank 1", "because"):
        assert part in failure.reason
    assert abandoned(effects) == [5, 6]
    assert head.fail(5, Code.WRITE_FAILED, rank=0) == []
    assert head.state("r") is FAILED
    assert head.need("r", "a", "b") == []

    head.rank(0, RoomReleased(5))
    head.release(6)
    assert head.head.balance().quarantined == 4 * ROW
    head.rank(1, RoomReleased(5))
    assert head.head.balance().quarantined == 0
    assert head.leave("r") == []


def test_a_failure_fails_only_those_who_wait_for_the_item() -> None:
    head = known()
    head.start("one", item("a", 5))
    head.start("two", item("b", 6))
    assert list(failed(head.fail(5, Code.ENCODE_FAILED))) == ["one"]
    head.land(6)
    assert head.state("two") is READY


def test_a_request_that_failed_on_one_item_starts_nothing_for_the_next() -> None:
    head = known()
    head.start("r", item("a", 5, rows=33), item("b", 6))
    assert head.state("r") is FAILED
    assert head.head.transfers() == {}
    head.hear(RoomsSkipped((5, 6)))
    assert head.head.next_deadline() is None
    assert head.leave("r") == []


def test_nothing_is_asked_for_a_request_that_has_failed() -> None:
    head = known()
    items = (item("a", 5, rows=33), item("b", 6, address="other:1"))
    assert asked(head.start("r", *items)) == []


@pytest.mark.parametrize("frame", [RoomFailed(5, Failure(Code.INTERNAL, "?")), RoomReleased(5)])
def test_an_item_that_has_landed_cannot_fail(frame: RoomFailed | RoomReleased) -> None:
    head = known()
    head.start("r", item("a", 5))
    head.land(5)
    assert head.every_rank(frame) == []
    assert head.state("r") is READY
    head.load("r", "a")


def test_a_rank_that_does_not_exist_does_not_count() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.rank(0, RoomLanded(5, 4 * ROW))
    assert head.do(FromRank(7, RoomLanded(5, 4 * ROW))) == []
    assert head.do(FromRank(7, RoomFailed(5, Failure(Code.INTERNAL, "?")))) == []
    assert head.state("r") is WAITING


def test_frames_of_unknown_rooms_and_other_conversations_are_dropped() -> None:
    head = known()
    head.start("r", item("a", 5))
    for frame in (RoomLanded(9, 1), RoomReleased(9), RoomLoaded(9), Pong()):
        assert head.every_rank(frame) == []
    assert head.hear(Pong()) == []
    assert head.hear(identity(), "stranger:1") == []


# --- encoding locally ---------------------------------------------------------------------


def test_an_item_that_failed_is_encoded_by_a_host_that_has_the_pixels() -> None:
    head = known(settings(encode_locally=True))
    head.start("r", item("a", 5, encodable=True), item("b", 6))
    effects = head.fail(5, Code.ENCODE_FAILED)
    assert local(effects) == [("r", "a")]
    assert failed(effects) == {}
    assert head.head.encodes_locally("r", "a")
    assert not head.head.encodes_locally("r", "b")
    assert head.state("r") is WAITING
    head.land(6)
    assert head.state("r") is READY
    assert head.need("r", "a") == []


def test_without_pixels_the_request_fails() -> None:
    head = known(settings(encode_locally=True))
    head.start("r", item("a", 5, encodable=False))
    assert list(failed(head.fail(5, Code.ENCODE_FAILED))) == ["r"]


def test_pixels_do_not_help_where_failing_is_configured() -> None:
    head = known(settings(encode_locally=False))
    head.start("r", item("a", 5, encodable=True))
    assert list(failed(head.fail(5, Code.ENCODE_FAILED))) == ["r"]


@pytest.mark.parametrize("first_has_pixels", [True, False])
def test_of_two_who_wait_the_one_with_pixels_goes_on(first_has_pixels: bool) -> None:
    head = known(settings(encode_locally=True))
    head.start("one", item("a", 5, encodable=first_has_pixels))
    head.start("two", item("a", 5, encodable=not first_has_pixels))
    effects = head.fail(5, Code.ENCODE_FAILED)
    lucky, other = ("one", "two") if first_has_pixels else ("two", "one")
    assert local(effects) == [(lucky, "a")]
    assert list(failed(effects)) == [other]
    assert head.state(lucky) is READY


# --- stop ---------------------------------------------------------------------------------


def test_stop_fails_everybody_and_waits_for_the_ranks() -> None:
    head = known()
    head.start("one", item("a", 5))
    head.start("two", item("b", 6, address="late:1"))
    head.do(Joined("three", (item("c", 7),)))
    effects = head.do(Stop())
    assert {failure.code for failure in failed(effects).values()} == {Code.SHUTDOWN}
    assert sorted(failed(effects)) == ["one", "three", "two"]
    assert abandoned(effects) == [5]
    assert sorted(skipped(effects)) == [5, 6, 7]
    assert not head.head.idle()
    head.release(5)
    assert head.head.idle()
    assert head.head.balance().free == head.head.balance().capacity
