# SPDX-License-Identifier: Apache-2.0
"""What a prefill head makes of encode engines that are slow, wrong, restarted or gone."""

import msgspec
import pytest

from epd_connector.core.admission import PAUSE_S
from epd_connector.core.admission_state import Gone, RequestState, TransferState
from epd_connector.core.effects import Hangup, TellRanks
from epd_connector.core.topology import ASK_AGAIN_S, MAX_ADDRESSES, NEGATIVE_S
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    HostGone,
    Identity,
    NotReady,
    Rejected,
    RoomLanded,
    RoomReceivers,
    RoomReleased,
)
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
    receivers,
    rooms_opened,
    settings,
    skipped,
)

WAITING, READY, FAILED = RequestState.WAITING, RequestState.READY, RequestState.FAILED


# --- finding an engine --------------------------------------------------------------------


def test_an_engine_that_does_not_answer_fails_the_request_in_seconds() -> None:
    head = Harness()
    head.start("r", item("a", 5))
    assert failed(head.wait(4.9, "r")) == {}
    effects = head.wait(0.2, "r")
    failure = failed(effects)["r"]
    assert failure.code is Code.UNREACHABLE
    for part in (HERE, "no answer", "5.0 s", "resolve_timeout_s"):
        assert part in failure.reason
    assert Hangup(f"tcp://{HERE}") in effects


def test_an_engine_that_was_given_up_is_not_dialed_to_skip_its_rooms() -> None:
    head = Harness()
    head.start("one", item("a", 5))
    assert skipped(head.wait(5, "one")) == []
    assert skipped(head.start("two", item("a", 6), item("b", 7, address=THERE))) == [7]


def test_a_silent_engine_is_asked_again_and_again() -> None:
    head = Harness()
    head.start("r", item("a", 5))
    head.now += ASK_AGAIN_S
    assert head.head.next_deadline() == head.now
    assert asked(head.wait(1.0, "r")) == [f"tcp://{HERE}"]


def test_an_engine_that_was_not_there_is_not_asked_for_a_while_and_then_found() -> None:
    head = Harness()
    head.start("one", item("a", 5))
    head.wait(5, "one")
    effects = head.start("two", item("a", 6))
    assert failed(effects)["two"].code is Code.UNREACHABLE
    assert asked(effects) == []
    head.wait(NEGATIVE_S)
    assert asked(head.start("three", item("a", 7))) == [f"tcp://{HERE}"]
    assert rooms_opened(head.hear(identity())) == [7]


def test_not_ready_is_not_remembered() -> None:
    head = Harness()
    head.start("r", item("a", 5))
    assert head.hear(NotReady("rank 1 of 2 is not up")) == []
    assert asked(head.wait(1.0, "r")) == [f"tcp://{HERE}"]
    assert rooms_opened(head.hear(identity())) == [5]


def test_an_engine_that_never_gets_ready_says_why() -> None:
    head = Harness()
    head.start("r", item("a", 5))
    head.hear(NotReady("rank 1 of 2 is not up"))
    assert "rank 1 of 2 is not up" in failed(head.wait(5, "r"))["r"].reason


def test_the_spare_of_another_engine_is_used_when_the_first_is_not_there() -> None:
    head = Harness()
    head.start("r", item("a", 5), item("a", 6, address=THERE))
    effects = head.wait(5, "r")
    assert asked(effects)[-1] == f"tcp://{THERE}"
    assert rooms_opened(head.hear(identity(), THERE)) == [6]


@pytest.mark.parametrize(
    ("answer", "values"),
    [
        (identity(fingerprint="model-b"), ("model-a", "model-b")),
        (identity(dtype="float16"), ("bfloat16", "float16")),
        (identity(width=96), ("96", "64")),
        (identity(width=0), ("0 elements", "64")),
        (identity(modality="audio"), ("audio", "image")),
        (Rejected(Failure(Code.MISMATCH, "model-a is not model-b")), ("model-a", "model-b")),
    ],
)
def test_a_mismatch_names_both_values(answer: Identity | Rejected, values: tuple[str, ...]) -> None:
    head = Harness()
    head.start("r", item("a", 5))
    failure = failed(head.hear(answer))["r"]
    assert failure.code is Code.MISMATCH
    for value in (*values, HERE):
        assert value in failure.reason


def test_wide_rows_are_taken_as_they_are() -> None:
    head = Harness()
    head.start("r", item("a", 5))
    (frame,) = opened(head.hear(identity(width=256)))
    assert frame.width == 256
    assert head.head.balance().leased == 4 * 4 * ROW


def test_addresses_are_bounded() -> None:
    head = Harness(settings(max_rooms=2 * MAX_ADDRESSES))
    items = [item(f"i{n}", 10 + n, address=f"e{n}:1") for n in range(MAX_ADDRESSES)]
    head.start("many", *items)
    failure = failed(head.start("r", item("a", 5)))["r"]
    assert failure.code is Code.OVERLOADED
    assert str(MAX_ADDRESSES) in failure.reason
    head.wait(6, "many")
    assert asked(head.start("s", item("a", 6))) == [f"tcp://{HERE}"]


# --- an engine restarts or dies -----------------------------------------------------------


def test_a_stale_room_is_opened_once_more_under_the_new_identity_after_clearing() -> None:
    head = known()
    head.start("r", item("a", 5))
    effects = head.fail(5, Code.STALE)
    assert abandoned(effects) == [5]
    assert skipped(effects) == []
    assert failed(effects) == {}
    assert head.rank(0, RoomReleased(5)) == []
    assert head.room(5) is TransferState.CLEARING
    assert asked(head.rank(1, RoomReleased(5))) == [f"tcp://{HERE}"]
    (frame,) = opened(head.hear(identity(incarnation=2)))
    assert frame.senders[0].incarnation == 2
    head.land(5)
    assert head.state("r") is READY


def test_a_room_that_is_stale_twice_fails() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.fail(5, Code.STALE)
    head.release(5)
    head.hear(identity(incarnation=2))
    effects = head.fail(5, Code.STALE)
    assert failed(effects)["r"].code is Code.STALE
    assert skipped(effects) == [5]
    head.release(5)
    assert head.head.transfers() == {}


def test_a_late_release_of_the_first_attempt_frees_nothing_of_the_second() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.fail(5, Code.STALE)
    head.release(5)
    head.rank(0, RoomReleased(5))  # the answer of rank 0 to the Abandon
    head.hear(identity(incarnation=2))
    head.rank(0, RoomReleased(5))
    head.leave("r")
    head.rank(1, RoomReleased(5))
    assert head.head.balance().quarantined == 4 * ROW
    head.rank(0, RoomReleased(5))
    assert head.head.balance().quarantined == 0


def test_an_abort_while_a_stale_room_is_cleared_does_not_open_it_again() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.fail(5, Code.STALE)
    assert skipped(head.leave("r")) == [5]
    effects = head.release(5)
    assert asked(effects) == []
    assert head.head.idle()


def test_a_stale_engine_that_does_not_come_back_fails_the_request() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.fail(5, Code.STALE)
    head.release(5)
    assert failed(head.wait(5, "r"))["r"].code is Code.UNREACHABLE


@pytest.mark.parametrize("code", [Code.PEER_DEAD, Code.WRITE_FAILED, Code.STALE])
def test_a_failure_of_the_engine_makes_it_be_asked_again(code: Code) -> None:
    head = known()
    head.start("one", item("a", 5))
    head.fail(5, code)
    assert asked(head.start("two", item("b", 6))) == [f"tcp://{HERE}"]


def test_a_failure_of_the_item_does_not() -> None:
    head = known()
    head.start("one", item("a", 5))
    head.fail(5, Code.ENCODE_FAILED)
    assert asked(head.start("two", item("b", 6))) == []


def test_what_waited_for_memory_is_opened_under_the_identity_of_today() -> None:
    head = known()
    head.start("one", item("a", 5, rows=20))
    head.start("two", item("b", 6, rows=20))
    assert head.room(6) is TransferState.QUEUED
    assert asked(head.fail(5, Code.PEER_DEAD)) == [f"tcp://{HERE}"]
    assert head.room(6) is TransferState.RESOLVING
    assert rooms_opened(head.release(5)) == []
    (frame,) = opened(head.hear(identity(incarnation=2)))
    assert (frame.room, frame.senders[0].incarnation) == (6, 2)


# --- deadlines ----------------------------------------------------------------------------


def test_a_deadline_names_the_ranks_that_have_not_landed() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.rank(1, RoomLanded(5, 1))
    assert failed(head.wait(59, "r")) == {}
    effects = head.wait(1, "r")
    failure = failed(effects)["r"]
    assert failure.code is Code.TIMEOUT
    for part in ("0000000000000005", HERE, "ranks [0]", "60.0 s", "receive_timeout_s"):
        assert part in failure.reason
    assert abandoned(effects) == [5]


def test_a_deadline_names_the_memory_that_was_not_to_be_had() -> None:
    head = known()
    head.start("large", item("b", 6, rows=32))
    head.land(6)
    head.start("r", item("a", 5))
    failure = failed(head.wait(60, "r", "large"))["r"]
    assert failure.code is Code.TIMEOUT
    for part in ("no memory", str(4 * ROW), str(32 * ROW), "receive_slab_bytes"):
        assert part in failure.reason


def test_a_deadline_names_the_attempt_that_is_being_cleared() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.fail(5, Code.STALE)
    assert "earlier attempt" in failed(head.wait(60, "r"))["r"].reason
    head.release(5)
    assert head.head.transfers() == {}


def test_a_deadline_names_the_engine_that_is_being_asked() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.wait(58, "r")
    head.fail(5, Code.STALE)
    head.release(5)
    reason = failed(head.wait(2, "r"))["r"].reason
    assert "not received within 60.0 s (receive_timeout_s)" in reason
    assert reason.endswith("the encode engine had not said yet who it is"), "asked for 2 s only"


def test_two_deadlines_at_once_fail_the_request_once() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.wait(55, "r")
    head.fail(5, Code.STALE)
    head.release(5)
    assert list(failed(head.wait(5, "r"))) == ["r"]


def test_a_deadline_runs_from_the_first_item() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.wait(30, "r")
    head.start("s", item("b", 6))
    effects = head.wait(30, "r", "s")
    assert list(failed(effects)) == ["r"]


def test_after_the_deadline_the_host_encodes_what_it_can_and_the_room_is_given_up() -> None:
    head = known(settings(encode_locally=True))
    head.start("r", item("a", 5, encodable=True), item("a", 6, encodable=True))
    effects = head.wait(60, "r")
    assert local(effects) == [("r", "a")]
    assert abandoned(effects) == [5]
    assert skipped(effects) == [5, 6]
    assert head.state("r") is READY


def test_a_pause_is_not_counted() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.wait(30, "r")
    assert failed(head.wait(500)) == {}
    assert head.state("r") is WAITING
    assert failed(head.wait(29, "r")) == {}
    assert list(failed(head.wait(2, "r"))) == ["r"]


def test_short_silences_are_counted() -> None:
    head = known()
    head.start("r", item("a", 5))
    for _ in range(30):
        head.now += PAUSE_S
        head.state("r")
    assert list(failed(head.wait(0.1, "r"))) == ["r"]


# --- hosts that are said to be dead -------------------------------------------------------


@pytest.mark.parametrize("host", ["encode", "ranks"])
def test_after_the_word_that_a_host_is_dead_nothing_is_opened_there(host: str) -> None:
    head = Harness(settings(ranks=1))
    head.start("r", item("a", 5))
    one = identity()
    elsewhere = msgspec.structs.replace(one.ranks[0], endpoint="tcp://ranks:11")
    head.hear(msgspec.structs.replace(one, ranks=(elsewhere,)))
    head.land(5)
    effects = head.do(Gone(host))
    assert TellRanks(HostGone(host)) in effects
    effects = head.start("next", item("b", 6))
    assert rooms_opened(effects) == []
    assert asked(effects) == [f"tcp://{HERE}"]


def test_the_word_that_another_host_is_dead_changes_nothing() -> None:
    head = known(settings(ranks=1))
    head.do(Gone("10.0.0.9"))
    assert rooms_opened(head.start("r", item("a", 5))) == [5]


# --- encode ranks that serve nobody -------------------------------------------------------


@pytest.mark.parametrize(("encode_ranks", "told"), [(1, 0), (2, 0), (3, 1), (4, 1)])
def test_encode_ranks_that_serve_nobody_hear_when_the_room_is_opened_and_when_it_has_landed(
    encode_ranks: int, told: int
) -> None:
    head = Harness(settings(ranks=2))
    head.start("r", item("a", 5))
    one = identity()
    effects = head.hear(msgspec.structs.replace(one, ranks=one.ranks * encode_ranks))
    assert rooms_opened(effects) == [5]
    assert receivers(effects) == [RoomReceivers(5, 2)] * told
    assert receivers(head.rank(0, RoomLanded(5, 1))) == []
    landed = head.rank(1, RoomLanded(5, 1))
    assert receivers(landed) == [RoomReceivers(5, 2)] * told
    assert skipped(landed) == []


def test_a_room_that_is_opened_once_more_is_told_once_more() -> None:
    head = Harness(settings(ranks=1))
    head.start("r", item("a", 5))
    one = identity()
    head.hear(msgspec.structs.replace(one, ranks=one.ranks * 2))
    head.fail(5, Code.STALE)
    head.release(5)
    again = identity(2)
    effects = head.hear(msgspec.structs.replace(again, ranks=again.ranks * 2))
    assert (rooms_opened(effects), receivers(effects)) == ([5], [RoomReceivers(5, 1)])
