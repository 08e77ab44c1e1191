# SPDX-License-Identifier: Apache-2.0
"""Items that several ask for, that are there already, or that nobody needs."""

import pytest

from epd_connector.core.admission_state import (
    Joined,
    RequestState,
    Spared,
)
from epd_connector.errors import Code
from tests.unit.admission_harness import (
    ROW,
    Harness,
    abandoned,
    failed,
    item,
    known,
    local,
    rooms_opened,
    settings,
    skipped,
)

WAITING, READY, FAILED = RequestState.WAITING, RequestState.READY, RequestState.FAILED


# --- the same item twice ------------------------------------------------------------------


def test_twice_in_one_request_is_one_transfer() -> None:
    head = known()
    assert rooms_opened(head.start("r", item("a", 5), item("a", 6))) == [5]
    assert skipped(head.land(5)) == [6]
    assert head.state("r") is READY


def test_in_two_requests_is_one_transfer_and_the_spare_is_skipped_once_landed() -> None:
    head = known()
    assert rooms_opened(head.start("one", item("a", 5))) == [5]
    assert head.start("two", item("a", 6)) == []
    assert skipped(head.land(5)) == [6]
    assert head.state("one") is READY
    assert head.state("two") is READY


@pytest.mark.parametrize("requests", [("one", "one"), ("one", "two")])
def test_the_spare_is_used_when_the_first_fails(requests: tuple[str, str]) -> None:
    head = known()
    if requests[0] == requests[1]:
        head.start("one", item("a", 5), item("a", 6))
    else:
        head.start("one", item("a", 5))
        head.start("two", item("a", 6))
    effects = head.fail(5, Code.ENCODE_FAILED)
    assert abandoned(effects) == [5]
    assert skipped(effects) == [5]
    assert rooms_opened(effects) == [6]
    assert failed(effects) == {}
    head.land(6)
    assert {head.state(request) for request in requests} == {READY}
    head.release(5)
    assert head.head.balance().quarantined == 0


def test_many_spares_of_a_dead_engine_fail_one_after_the_other() -> None:
    head = Harness(settings(max_rooms=4096))
    head.start("first", *(item("a", room) for room in range(5, 1005)))
    effects = head.wait(6, "first")
    assert failed(effects)["first"].code is Code.UNREACHABLE
    assert head.head.counters.rooms_opened == 1000
    assert skipped(effects) == []


def test_one_request_leaves_and_the_other_keeps_the_transfer() -> None:
    head = known()
    head.start("one", item("a", 5))
    head.start("two", item("a", 6))
    assert skipped(head.leave("one")) == []
    head.land(5)
    assert head.state("two") is READY


def test_a_uuid_that_names_two_items_is_the_clients_fault() -> None:
    head = known()
    head.start("one", item("a", 5, rows=4))
    failure = failed(head.start("two", item("a", 6, rows=7)))["two"]
    assert failure.code is Code.BAD_REQUEST
    assert "4 rows" in failure.reason
    assert "7 tokens" in failure.reason
    head.land(5)
    assert head.state("one") is READY


def test_an_item_without_a_room_is_taken_from_whoever_brought_one() -> None:
    head = known()
    head.start("one", item("a", 5))
    head.start("two", item("a", None))
    head.land(5)
    assert head.state("two") is READY


def test_an_item_without_a_room_that_nobody_brought_fails_clearly() -> None:
    head = known(settings(encode_locally=True))
    effects = head.start("r", item("a", None), item("b", None, encodable=True))
    assert failed(effects)["r"].code is Code.BAD_REQUEST
    assert "names no room" in failed(effects)["r"].reason
    assert local(head.start("s", item("b", None, encodable=True))) == [("s", "b")]


# --- cached and spared --------------------------------------------------------------------


def test_an_item_that_is_held_is_skipped_at_once() -> None:
    head = known()
    head.start("one", item("a", 5))
    head.land(5)
    effects = head.start("two", item("a", 6))
    assert skipped(effects) == [6]
    assert rooms_opened(effects) == []
    assert head.state("two") is READY


def test_a_spared_item_is_skipped_and_not_waited_for() -> None:
    head = known()
    head.do(Joined("r", (item("a", 5), item("b", 6))))
    assert skipped(head.do(Spared("r", ("a",)))) == [5]
    head.need("r", "b")
    head.land(6)
    assert head.state("r") is READY


def test_an_item_spared_on_its_way_is_cancelled() -> None:
    head = known()
    head.start("r", item("a", 5))
    effects = head.do(Spared("r", ("a",)))
    assert abandoned(effects) == [5]
    assert skipped(effects) == [5]
    assert head.state("r") is READY
    assert head.head.balance().quarantined == 4 * ROW
    head.release(5)
    assert head.head.transfers() == {}


def test_items_never_needed_are_skipped_when_the_request_leaves() -> None:
    head = known()
    head.do(Joined("r", (item("a", 5), item("b", 6))))
    assert sorted(skipped(head.leave("r"))) == [5, 6]
