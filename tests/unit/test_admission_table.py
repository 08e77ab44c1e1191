# SPDX-License-Identifier: Apache-2.0
"""Every state of a transfer and of a request against everything that can happen to it."""

from collections.abc import Callable

import pytest

from epd_connector.core.admission_state import (
    TRANSFER_MOVES,
    Left,
    Needed,
    RequestState,
    Spared,
    Stop,
    TransferEvent,
    TransferState,
)
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import RoomFailed, RoomLanded, RoomLoaded, RoomReleased
from tests.unit.admission_harness import Harness, identity, item, known

RESOLVING, QUEUED, RECEIVING = (
    TransferState.RESOLVING, TransferState.QUEUED, TransferState.RECEIVING,
)  # fmt: skip
READY, CLEARING, OVER = TransferState.READY, TransferState.CLEARING, TransferState.OVER

MOVES = {
    RESOLVING: {TransferEvent.RESOLVED: QUEUED, TransferEvent.FAIL: OVER},
    QUEUED: {
        TransferEvent.OUTDATED: RESOLVING,
        TransferEvent.PLACED: RECEIVING,
        TransferEvent.FAIL: OVER,
    },
    RECEIVING: {TransferEvent.LANDED: READY, TransferEvent.FAIL: CLEARING},
    READY: {TransferEvent.DROP: OVER},
    CLEARING: {TransferEvent.CLEARED: OVER},
    OVER: {},
}  # fmt: skip


@pytest.mark.parametrize("event", TransferEvent)
@pytest.mark.parametrize("state", TransferState)
def test_the_table(state: TransferState, event: TransferEvent) -> None:
    assert TRANSFER_MOVES.get((state, event)) is MOVES[state].get(event)


# --- the table as the machine walks it ----------------------------------------------------

ROOM = 5
FAILURE = Failure(Code.ENCODE_FAILED, "because")


def resolving() -> Harness:
    head = Harness()
    head.start("r", item("a", ROOM))
    return head


def queued() -> Harness:
    head = known()
    head.start("large", item("large", 99, rows=32))
    head.start("r", item("a", ROOM))
    return head


def receiving() -> Harness:
    head = known()
    head.start("r", item("a", ROOM))
    return head


def ready() -> Harness:
    head = receiving()
    head.land(ROOM)
    return head


def clearing() -> Harness:
    head = receiving()
    head.leave("r")
    head.start("r", item("a", 6))
    return head


def over() -> Harness:
    head = clearing()
    head.release(ROOM)
    return head


STATES: dict[TransferState, Callable[[], Harness]] = {
    RESOLVING: resolving,
    QUEUED: queued,
    RECEIVING: receiving,
    READY: ready,
    CLEARING: clearing,
    OVER: over,
}


def after(head: Harness) -> TransferState:
    return head.room(ROOM) or OVER


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_reached(state: TransferState) -> None:
    assert after(STATES[state]()) is state


@pytest.mark.parametrize(
    ("frame", "moves"),
    [
        (RoomLanded(ROOM, 1), {RECEIVING: READY}),
        (RoomFailed(ROOM, FAILURE), {RECEIVING: CLEARING}),
        (RoomReleased(ROOM), {CLEARING: OVER}),
        (RoomLoaded(ROOM), {}),
    ],
)
@pytest.mark.parametrize("state", STATES)
def test_what_ranks_say(
    state: TransferState,
    frame: RoomLanded | RoomFailed | RoomReleased | RoomLoaded,
    moves: dict[TransferState, TransferState],
) -> None:
    head = STATES[state]()
    head.every_rank(frame)
    head.every_rank(frame)
    assert after(head) is moves.get(state, state)


@pytest.mark.parametrize("state", STATES)
def test_an_identity_moves_only_what_waits_for_it(state: TransferState) -> None:
    head = STATES[state]()
    head.hear(identity())
    assert after(head) is (RECEIVING if state is RESOLVING else state)


@pytest.mark.parametrize("event", [Left("r"), Spared("r", ("a",)), Stop()])
@pytest.mark.parametrize("state", STATES)
def test_nobody_wants_it_any_more(state: TransferState, event: Left | Spared | Stop) -> None:
    head = STATES[state]()
    head.do(event)
    moves = {RESOLVING: OVER, QUEUED: OVER, RECEIVING: CLEARING}
    assert after(head) is moves.get(state, state)


# --- requests -----------------------------------------------------------------------------


def failed() -> Harness:
    head = receiving()
    head.fail(ROOM, Code.ENCODE_FAILED)
    return head


REQUESTS = {
    RequestState.WAITING: receiving,
    RequestState.READY: ready,
    RequestState.FAILED: failed,
}


@pytest.mark.parametrize("state", REQUESTS)
def test_needing_again_changes_nothing(state: RequestState) -> None:
    head = REQUESTS[state]()
    head.do(Needed("r", ("a",)))
    assert head.state("r") is state


@pytest.mark.parametrize("state", REQUESTS)
def test_a_request_that_is_spared_runs_unless_it_failed(state: RequestState) -> None:
    head = REQUESTS[state]()
    head.do(Spared("r", ("a",)))
    expected = RequestState.FAILED if state is RequestState.FAILED else RequestState.READY
    assert head.state("r") is expected


@pytest.mark.parametrize("state", REQUESTS)
def test_only_a_waiting_request_times_out(state: RequestState) -> None:
    head = REQUESTS[state]()
    head.wait(200, "r")
    expected = RequestState.FAILED if state is RequestState.WAITING else state
    assert head.state("r") is expected


@pytest.mark.parametrize("state", REQUESTS)
def test_a_request_that_left_is_unknown(state: RequestState) -> None:
    head = REQUESTS[state]()
    head.do(Left("r"))
    assert not head.head.knows("r")
    assert not head.head.encodes_locally("r", "a")
    with pytest.raises(KeyError):
        head.state("r")
