# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is for the receive slab, and what is dropped for whom."""

from epd_connector.core.admission_state import (
    Loading,
    PassEnded,
    Promised,
    RequestState,
    TransferState,
)
from epd_connector.errors import Code
from tests.unit.admission_harness import (
    ROW,
    Harness,
    failed,
    item,
    known,
    local,
    opened,
    rooms_opened,
    settings,
    skipped,
)

WAITING, READY, FAILED = RequestState.WAITING, RequestState.READY, RequestState.FAILED


def with_resident(harness: Harness, hash: str, room: int, rows: int) -> None:
    """``hash`` has been received, and nobody waits for it."""
    harness.start("past", item(hash, room, rows))
    harness.land(room)
    harness.load("past", hash)
    harness.leave("past")


# --- turns --------------------------------------------------------------------------------


def test_requests_get_memory_in_the_order_of_their_need() -> None:
    head = known()
    head.start("one", item("a", 5, rows=16))
    assert head.start("two", item("b", 6, rows=20)) == []
    assert head.start("three", item("c", 7, rows=4)) == []  # fits, and waits its turn
    assert head.room(7) is TransferState.QUEUED
    head.land(5)
    assert rooms_opened(head.load("one", "a")) == [6, 7]


def test_a_request_gets_memory_for_all_of_its_items_or_for_none() -> None:
    head = known()
    head.start("one", item("a", 5, rows=10))
    assert opened(head.start("two", item("b", 6, rows=20), item("c", 7, rows=10))) == []
    assert head.head.balance().leased == 10 * ROW
    head.leave("one")
    assert rooms_opened(head.release(5)) == [6, 7]


def test_an_engine_that_does_not_answer_is_in_nobodys_way() -> None:
    head = known()
    head.start("slow", item("a", 5, address="silent:1"))
    assert rooms_opened(head.start("fast", item("b", 6))) == [6]


def test_two_requests_that_need_more_than_half_take_turns() -> None:
    head = known()
    head.start("one", item("a", 5, rows=10), item("b", 6, rows=10))
    head.start("two", item("c", 7, rows=10), item("d", 8, rows=10))
    head.land(5, 6)
    assert rooms_opened(head.load("one", "a", "b")) == [7, 8]
    head.land(7, 8)
    assert head.state("two") is READY


def test_of_two_that_hold_what_the_other_needs_the_later_one_gives_way() -> None:
    head = known()
    head.start("x user", item("x", 5, rows=12))
    head.start("y user", item("y", 6, rows=12))
    head.land(5, 6)
    head.start("one", item("x", 7, rows=12), item("c", 8, rows=12))
    head.start("two", item("y", 9, rows=12), item("d", 10, rows=12))
    assert failed(head.leave("x user")) == {}
    effects = head.leave("y user")
    assert list(failed(effects)) == ["two"]
    assert failed(effects)["two"].code is Code.OVERLOADED
    assert "receive_slab_bytes" in failed(effects)["two"].reason
    assert rooms_opened(effects) == [8]
    head.land(8)
    assert head.state("one") is READY


def test_a_request_whose_own_item_lies_in_the_way_fails_when_nothing_else_can_go() -> None:
    head = known()
    head.start("p user", item("p", 5, rows=8))
    head.start("x user", item("x", 6, rows=8))
    head.land(5, 6)
    head.start("r", item("x", 7, rows=8), item("c", 8, rows=20))
    head.start("behind", item("b", 9, rows=4))
    assert failed(head.leave("p user")) == {}
    effects = head.leave("x user")
    assert failed(effects)["r"].code is Code.OVERLOADED
    assert rooms_opened(effects) == [9]


# --- too large ----------------------------------------------------------------------------


def test_an_item_larger_than_the_slab_fails_at_once() -> None:
    head = known()
    failure = failed(head.start("r", item("a", 5, rows=33)))["r"]
    assert failure.code is Code.TOO_LARGE
    for part in ("33 rows", str(33 * ROW), str(32 * ROW), "receive_slab_bytes"):
        assert part in failure.reason


def test_a_request_larger_than_the_slab_fails_at_once() -> None:
    head = known()
    failure = failed(head.start("r", item("a", 5, rows=20), item("b", 6, rows=20)))["r"]
    assert failure.code is Code.TOO_LARGE
    for part in ("2 items", str(40 * ROW), str(32 * ROW), "receive_slab_bytes"):
        assert part in failure.reason


def test_items_that_others_brought_count_towards_the_size_of_a_request() -> None:
    head = known()
    head.start("one", item("a", 5, rows=20))
    effects = head.start("two", item("a", 6, rows=20), item("b", 7, rows=20))
    assert failed(effects)["two"].code is Code.TOO_LARGE
    head.land(5)
    assert head.state("one") is READY


def test_a_request_that_is_too_large_encodes_what_it_can() -> None:
    head = known(settings(encode_locally=True))
    items = (item("a", 5, rows=20, encodable=True), item("b", 6, rows=20, encodable=True))
    effects = head.start("r", *items)
    assert local(effects) == [("r", "a"), ("r", "b")]
    assert skipped(effects) == [5, 6]
    assert head.state("r") is READY


# --- residents ----------------------------------------------------------------------------


def test_residents_are_dropped_oldest_first_and_only_when_needed() -> None:
    head = known()
    for hash, room in (("a", 5), ("b", 6), ("c", 7)):
        with_resident(head, hash, room, rows=8)
    head.start("r", item("d", 8, rows=8))
    assert [head.head.holds(hash) for hash in "abc"] == [True, True, True]
    head.start("s", item("e", 9, rows=8))
    assert [head.head.holds(hash) for hash in "abc"] == [False, True, True]


def test_a_resident_that_was_of_use_again_is_the_youngest() -> None:
    head = known()
    with_resident(head, "a", 5, rows=16)
    with_resident(head, "b", 6, rows=16)
    head.start("again", item("a", 7, rows=16))
    head.load("again", "a")
    head.leave("again")
    head.start("r", item("c", 8, rows=16))
    assert [head.head.holds(hash) for hash in "ab"] == [True, False]


def test_a_promised_resident_stays_until_the_pass_ends() -> None:
    head = known()
    with_resident(head, "a", 5, rows=20)
    head.do(Promised("a"))
    assert rooms_opened(head.start("r", item("b", 6, rows=20))) == []
    assert head.head.holds("a")
    assert rooms_opened(head.do(PassEnded())) == [6]
    assert not head.head.holds("a")


def test_an_item_on_a_load_list_stays_until_it_is_loaded() -> None:
    head = known()
    with_resident(head, "a", 5, rows=20)
    head.do(Promised("a"))
    head.do(Loading("somebody", "a"))
    head.do(PassEnded())
    assert rooms_opened(head.start("r", item("b", 6, rows=20))) == []
    assert rooms_opened(head.loaded(5)) == [6]


def test_a_wanted_item_is_no_resident() -> None:
    head = known()
    with_resident(head, "a", 5, rows=20)
    head.start("waits", item("a", 6, rows=20))
    assert rooms_opened(head.start("r", item("b", 7, rows=20))) == []
    assert head.state("waits") is READY
    assert rooms_opened(head.leave("waits")) == [7]


def test_a_preempted_request_loads_a_resident_again_without_a_transfer() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.land(5)
    head.load("r", "a")
    assert head.need("r", "a") == []
    assert head.state("r") is READY
    head.load("r", "a")
    assert head.head.counters.items_published == 2
    assert head.head.counters.items_reloaded == 1


def test_a_resident_that_is_gone_with_its_room_fails_clearly() -> None:
    head = known()
    head.start("r", item("a", 5, rows=20))
    head.land(5)
    head.load("r", "a")
    head.start("other", item("b", 6, rows=20))
    failure = failed(head.need("r", "a"))["r"]
    assert failure.code is Code.LOST
    assert "send the request again" in failure.reason


# --- rooms --------------------------------------------------------------------------------


def test_rooms_are_bounded() -> None:
    head = known(settings(max_rooms=2))
    with_resident(head, "old", 4, rows=2)
    head.start("one", item("a", 5, rows=2))
    head.start("two", item("b", 6, rows=2))
    assert not head.head.holds("old")
    failure = failed(head.start("three", item("c", 7, rows=2)))["three"]
    assert failure.code is Code.OVERLOADED
    assert "2 rooms" in failure.reason
    assert "max_rooms" in failure.reason
    assert head.state("one") is WAITING
