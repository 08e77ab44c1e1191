# SPDX-License-Identifier: Apache-2.0
"""The encode rank's rooms: every state against every event, and what each step brings about."""

import pytest

from epd_connector.core.effects import Effect, Stage, Write
from epd_connector.core.send_events import Staged, Wrote
from epd_connector.core.send_state import ROOM_MOVES, RoomEvent, RoomState
from tests.unit.send_bench import Bench, answers

UNKNOWN = 777


def build(state: RoomState) -> Bench:
    """A bench whose room 1, granted by the one prefill rank, is in ``state``."""
    bench = Bench()
    bench.asked()
    if state is RoomState.CONCLUDED:
        bench.skip()
        return bench
    if state is not RoomState.ASKED:
        bench.claim()
    if state not in (RoomState.ASKED, RoomState.CLAIMED):
        effects = bench.encode()
        if state is not RoomState.STAGING:
            bench.stage(effects)
    if state is RoomState.DRAINING:
        bench.skip()
    assert bench.state() is state
    return bench


def tell(bench: Bench, state: RoomState, event: RoomEvent) -> list[Effect]:
    """The input that means ``event`` to a room in ``state``."""
    match event:
        case RoomEvent.CLAIM:
            return bench.claim()
        case RoomEvent.ROWS:
            return bench.encode()
        case RoomEvent.STAGED:
            return bench.do(Staged(1 if state is RoomState.STAGING else UNKNOWN))
        case RoomEvent.SERVED if state is RoomState.OFFERED:
            return bench.do(Wrote(1))
        case RoomEvent.SERVED:
            return bench.cancel()
        case RoomEvent.FAIL:
            return bench.skip()
        case RoomEvent.DRAINED:
            return bench.do(Wrote(1 if state is RoomState.DRAINING else UNKNOWN))


def expected(state: RoomState, event: RoomEvent) -> RoomState:
    target = ROOM_MOVES.get((state, event), state)
    if target is RoomState.DRAINING and state not in (RoomState.OFFERED, RoomState.DRAINING):
        return RoomState.CONCLUDED  # no write is in flight, so it is drained at once
    return target


EFFECTS: dict[tuple[RoomState, RoomEvent], list[str]] = {
    (RoomState.ASKED, RoomEvent.SERVED): ["Cancelled"],
    (RoomState.ASKED, RoomEvent.FAIL): ["Refused"],
    (RoomState.CLAIMED, RoomEvent.ROWS): ["Stage"],
    (RoomState.CLAIMED, RoomEvent.SERVED): ["Cancelled"],
    (RoomState.CLAIMED, RoomEvent.FAIL): ["Refused"],
    (RoomState.STAGING, RoomEvent.STAGED): ["Write"],
    (RoomState.STAGING, RoomEvent.SERVED): ["Cancelled"],
    (RoomState.STAGING, RoomEvent.FAIL): ["Refused"],
    (RoomState.OFFERED, RoomEvent.SERVED): ["Landed"],
    (RoomState.OFFERED, RoomEvent.FAIL): ["Stalled"],
    (RoomState.DRAINING, RoomEvent.DRAINED): ["Refused"],
    # Not steps of the room, but answered all the same.
    (RoomState.CONCLUDED, RoomEvent.SERVED): ["Cancelled"],
}


def outcome(effects: list[Effect]) -> list[str]:
    kinds = [type(effect).__name__ for effect in effects if isinstance(effect, Stage | Write)]
    return kinds + [kind for _, kind, _, _ in answers(effects)]


@pytest.mark.parametrize("event", RoomEvent, ids=lambda event: event.value)
@pytest.mark.parametrize("state", RoomState, ids=lambda state: state.value)
def test_every_state_against_every_event(state: RoomState, event: RoomEvent) -> None:
    bench = build(state)
    before = bench.machine.balance()
    concluded = bench.count("rooms_concluded")
    effects = tell(bench, state, event)
    after = bench.state() or RoomState.CONCLUDED
    assert after is expected(state, event)
    assert outcome(effects) == EFFECTS.get((state, event), [])
    ends = after is RoomState.CONCLUDED is not state
    assert bench.count("rooms_concluded") == concluded + ends
    if (state, event) not in ROOM_MOVES:
        assert bench.machine.balance() == before


@pytest.mark.parametrize("event", RoomEvent, ids=lambda event: event.value)
@pytest.mark.parametrize("state", RoomState, ids=lambda state: state.value)
def test_whatever_was_said_the_room_comes_to_rest(state: RoomState, event: RoomEvent) -> None:
    bench = build(state)
    tell(bench, state, event)
    bench.skip()
    for number in (1, 2):
        bench.do(Staged(number))
        bench.do(Wrote(number))
    assert bench.at_rest()
    assert bench.count("rooms_concluded") == 1


def test_the_table_has_no_dead_end() -> None:
    for state in RoomState:
        out = {target for (source, _), target in ROOM_MOVES.items() if source is state}
        assert bool(out) == (state is not RoomState.CONCLUDED)
    into = set(ROOM_MOVES.values())
    assert into == set(RoomState) - {RoomState.ASKED}


def test_the_effects_were_listed_for_every_step() -> None:
    silent = {(RoomState.ASKED, RoomEvent.CLAIM)}
    assert set(EFFECTS) - {(RoomState.CONCLUDED, RoomEvent.SERVED)} == set(ROOM_MOVES) - silent
