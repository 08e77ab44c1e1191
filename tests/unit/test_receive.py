# SPDX-License-Identifier: Apache-2.0
"""The prefill rank: every state against every event, and its rules."""

import pytest

from epd_connector.core.effects import Effect, Hangup, Send
from epd_connector.core.receive import IDLE_HANGUP_S
from epd_connector.core.receive_state import (
    ROOM_MOVES,
    Opened,
    RoomEvent,
    RoomState,
    Stop,
)
from epd_connector.errors import Code
from epd_connector.protocol.frames import (
    Cancelled,
    Hello,
    Identify,
    Landed,
    Pong,
    RankAddress,
    Refused,
    Stale,
    Stalled,
)
from epd_connector.rows import Layout
from tests.unit.receive_bench import (
    ENDPOINT,
    FENCE_S,
    REASON,
    WRITER,
    Bench,
    failure,
    grants,
    opening,
    sent,
    told,
)

OVER = (RoomState.LANDED, RoomState.RELEASED)
RESTARTED = WRITER + 1


def build(state: RoomState) -> Bench:
    """A bench whose room 1, under grant 1, is in ``state``."""
    bench = Bench()
    bench.open()
    match state:
        case RoomState.WITHDRAWING:
            bench.abandon()
        case RoomState.DOOMED:
            bench.hear(Stalled(1, 1, REASON))
        case RoomState.QUARANTINED:
            bench.run(5.0)
        case RoomState.FENCED:
            bench.hear(Stale(WRITER), RESTARTED)
        case RoomState.LANDED:
            bench.hear(Landed(1, 1))
        case RoomState.RELEASED:
            bench.hear(Refused(1, 1, REASON))
    assert bench.state() is (None if state in OVER else state)
    return bench


def tell(bench: Bench, event: RoomEvent) -> list[Effect]:
    """The input that means ``event``."""
    match event:
        case RoomEvent.LANDED:
            return bench.hear(Landed(1, 1))
        case RoomEvent.REFUSED:
            return bench.hear(Refused(1, 1, REASON))
        case RoomEvent.STALLED:
            return bench.hear(Stalled(1, 1, REASON))
        case RoomEvent.CANCELLED:
            return bench.hear(Cancelled(1, 1))
        case RoomEvent.ABANDON:
            return bench.abandon()
        case RoomEvent.SILENCE:
            return bench.run(bench.now + 6.0)
        case RoomEvent.RETURN:
            return bench.hear(Pong())
        case RoomEvent.DEATH:
            return bench.hear(Stale(WRITER), RESTARTED)
        case RoomEvent.FENCE:
            return bench.run(bench.now + FENCE_S)


def expected(state: RoomState, event: RoomEvent) -> RoomState:
    answers = (RoomEvent.LANDED, RoomEvent.REFUSED, RoomEvent.CANCELLED, RoomEvent.STALLED)
    if state is RoomState.QUARANTINED and event is RoomEvent.STALLED:
        return RoomState.WITHDRAWING  # any word from the writer is its return
    if state is RoomState.FENCED and event is RoomEvent.SILENCE:
        return RoomState.RELEASED  # time passes, and with it the fence
    if state is RoomState.FENCED and event in answers:
        return state  # the dead do not speak
    return ROOM_MOVES.get((state, event), state)


@pytest.mark.parametrize("event", RoomEvent, ids=lambda event: event.value)
@pytest.mark.parametrize("state", RoomState, ids=lambda state: state.value)
def test_every_state_against_every_event(state: RoomState, event: RoomEvent) -> None:
    bench = build(state)
    effects = tell(bench, event)
    target = expected(state, event)
    assert bench.state() is (None if target in OVER else target)
    words = []
    if state is RoomState.GRANTED and target is not state and event is not RoomEvent.ABANDON:
        words.append("RoomLanded" if target is RoomState.LANDED else "RoomFailed")
    released = target is RoomState.RELEASED is not state
    if released or (state is RoomState.LANDED and event is RoomEvent.ABANDON):
        words.append("RoomReleased")
    assert told(effects) == [(word, 1) for word in words]


@pytest.mark.parametrize("event", RoomEvent, ids=lambda event: event.value)
@pytest.mark.parametrize("state", RoomState, ids=lambda state: state.value)
def test_the_region_is_safe_in_the_end_and_said_to_be_once(
    state: RoomState, event: RoomEvent
) -> None:
    bench = build(state)
    effects = tell(bench, event) + bench.abandon()
    effects += bench.hear(Stale(WRITER), RESTARTED + 1) + bench.run(bench.now + FENCE_S)
    assert bench.machine.idle()
    before = state is RoomState.RELEASED  # it was said while the bench was built
    assert told(effects).count(("RoomReleased", 1)) == 1 - before


def test_the_table_has_no_dead_end() -> None:
    for state in RoomState:
        out = {target for (source, _), target in ROOM_MOVES.items() if source is state}
        assert bool(out - {state}) == (state not in OVER)
    assert set(ROOM_MOVES.values()) == set(RoomState) - {RoomState.GRANTED}


# --- granting --------------------------------------------------------------------------


def test_a_room_is_granted_behind_a_hello() -> None:
    bench = Bench()
    effects = bench.open()
    assert sent(effects) == ["Hello", "Grant"]
    (grant,) = grants(effects)
    assert (grant.start, grant.count, grant.nbytes, grant.offset) == (0, 10, 80, 4096)
    assert sent(bench.open(2)) == ["Grant"]
    assert all(e.addressee == WRITER for e in effects if isinstance(e, Send))


@pytest.mark.parametrize(("rank", "start", "count"), [(0, 0, 4), (1, 4, 3), (2, 7, 3)])
def test_a_shard_is_granted_to_the_rank_that_serves_it(rank: int, start: int, count: int) -> None:
    senders = tuple(RankAddress(f"tcp://e{n}", WRITER + n, {}) for n in range(2))
    bench = Bench(rank=rank, ranks=3)
    effects = bench.open(layout=Layout.SHARDS, senders=senders)
    (grant,) = grants(effects)
    assert grant.sharded
    assert (grant.start, grant.count, grant.nbytes) == (start, count, count * 8)
    assert grant.offset == 4096
    assert {e.endpoint for e in effects if isinstance(e, Send)} == {f"tcp://e{rank * 2 // 3}"}


@pytest.mark.parametrize(("rank", "start", "count"), [(0, 0, 4), (1, 4, 3), (2, 7, 3)])
def test_in_a_shared_slab_a_rank_grants_the_place_of_its_rows(
    rank: int, start: int, count: int
) -> None:
    (grant,) = grants(Bench(rank=rank, ranks=3).open(layout=Layout.SHARED))
    assert grant.sharded
    assert (grant.start, grant.count) == (start, count)
    assert (grant.offset, grant.nbytes) == (4096 + start * 8, count * 8)


def test_a_room_without_a_transport_fails_at_once() -> None:
    bench = Bench()
    effects = bench.do(Opened(opening(1), None))
    assert told(effects) == [("RoomFailed", 1), ("RoomReleased", 1)]
    assert failure(effects).code is Code.UNREACHABLE
    assert sent(effects) == []


def test_a_full_table_fails_the_room_with_the_key_to_raise() -> None:
    bench = Bench(max_rooms=1)
    bench.open(1)
    effects = bench.open(2)
    assert told(effects) == [("RoomFailed", 2), ("RoomReleased", 2)]
    assert "max_rooms" in failure(effects).reason


def test_a_room_that_is_open_is_not_opened_again() -> None:
    bench = Bench()
    bench.open()
    assert bench.open() == []


def test_an_unanswered_grant_is_repeated_ever_more_slowly() -> None:
    bench = Bench()
    (grant,) = grants(bench.open())
    times = []
    while bench.now < 62.0:
        due = bench.machine.next_deadline()
        assert due is not None
        effects = bench.tick(due)
        bench.hear(Pong())
        if grants(effects):
            assert grants(effects) == [grant]
            assert sent(effects).index("Hello") < sent(effects).index("Grant")
            times.append(bench.now)
    assert times == [2.0, 6.0, 14.0, 30.0, 46.0, 62.0]


def test_an_unanswered_cancel_is_repeated() -> None:
    bench = Bench()
    bench.open()
    assert sent(bench.abandon()) == ["Cancel"]
    assert "Cancel" in sent(bench.tick(2.0))


def test_an_answer_to_another_grant_means_nothing() -> None:
    bench = Bench()
    bench.open()
    assert bench.hear(Landed(1, 2)) == []
    assert bench.hear(Landed(9, 1)) == []
    assert bench.state() is RoomState.GRANTED


def test_a_room_opened_again_has_a_new_grant_and_its_own_end() -> None:
    bench = Bench()
    bench.open()
    bench.hear(Refused(1, 1, REASON))
    assert told(bench.abandon()) == []
    (grant,) = grants(bench.open())
    assert grant.grant == 2
    assert bench.hear(Landed(1, 1)) == []
    assert told(bench.hear(Landed(1, 2))) == [("RoomLanded", 1)]
    assert told(bench.abandon()) == [("RoomReleased", 1)]


# --- writers come and go -----------------------------------------------------------------


def test_a_busy_writer_is_asked_for_a_sign_of_life() -> None:
    bench = Bench()
    bench.open()
    assert sent(bench.tick(1.0)) == ["Ping"]
    bench.hear(Pong())
    effects = bench.run(5.9)
    assert told(effects) == []


def test_a_silent_writer_fails_its_rooms_in_seconds_once() -> None:
    bench = Bench()
    bench.open(1)
    bench.open(2)
    effects = bench.run(20.0)
    assert told(effects) == [("RoomFailed", 1), ("RoomFailed", 2)]
    assert not bench.machine.idle()
    assert bench.count("peers_lost") == 1


def test_a_room_opened_at_a_silent_writer_fails_in_seconds_too() -> None:
    bench = Bench()
    bench.open(1)
    bench.run(20.0)
    bench.open(2)
    effects = bench.run(26.0)
    assert told(effects) == [("RoomFailed", 2)]
    assert failure(effects).code is Code.PEER_DEAD


def test_a_writer_that_returns_is_asked_to_give_the_regions_back() -> None:
    bench = Bench()
    bench.open()
    bench.run(10.0)
    assert sent(bench.hear(Pong())) == ["Hello", "Cancel"]
    assert told(bench.hear(Cancelled(1, 1))) == [("RoomReleased", 1)]
    bench.open(2)
    assert told(bench.run(14.0)) == []


def test_a_writer_that_returned_is_watched_as_before() -> None:
    bench = Bench()
    bench.open()
    bench.run(10.0)
    bench.now = 10.5
    bench.hear(Pong())
    assert sent(bench.run(11.5)).count("Ping") == 1


def test_a_landing_that_was_on_its_way_counts_as_the_answer() -> None:
    bench = Bench()
    bench.open()
    bench.run(10.0)
    assert told(bench.hear(Landed(1, 1))) == [("RoomReleased", 1)]


def test_a_restarted_writer_frees_its_regions_after_the_fence() -> None:
    bench = Bench()
    bench.open()
    effects = bench.hear(Stale(WRITER), RESTARTED)
    assert told(effects) == [("RoomFailed", 1)]
    assert failure(effects).code is Code.STALE
    assert told(bench.run(FENCE_S - 0.1)) == []
    assert told(bench.tick(FENCE_S)) == [("RoomReleased", 1)]
    assert sent(bench.open(2, RESTARTED)) == ["Hello", "Grant"]


def test_a_transport_without_a_fence_frees_them_at_once() -> None:
    bench = Bench(fences={})
    bench.open()
    bench.hear(Stale(WRITER), RESTARTED)
    assert told(bench.run(0.0)) == [("RoomReleased", 1)]


def test_an_opening_from_an_outdated_identity_harms_nobody() -> None:
    """The head may hold the identity of an engine that this rank knows to have restarted."""
    bench = Bench()
    bench.open(1)
    bench.hear(Stale(WRITER), RESTARTED)
    bench.run(FENCE_S)
    bench.open(2, RESTARTED)
    effects = bench.open(3, WRITER)
    assert told(effects) == [("RoomFailed", 3), ("RoomReleased", 3)]
    assert failure(effects).code is Code.STALE
    assert bench.state(2) is RoomState.GRANTED
    assert told(bench.hear(Landed(2, 2), RESTARTED)) == [("RoomLanded", 2)]


@pytest.mark.parametrize(("alive", "dead"), [(WRITER, RESTARTED), (RESTARTED, WRITER)])
def test_only_a_frame_proves_which_of_two_writers_is_gone(alive: int, dead: int) -> None:
    """What the head says of an endpoint is no evidence that the other writer has ended."""
    bench = Bench()
    bench.open(1, WRITER)
    assert told(bench.open(2, RESTARTED)) == []
    rooms = {WRITER: 1, RESTARTED: 2}
    effects = bench.hear(Pong(), alive)
    assert told(effects) == [("RoomFailed", rooms[dead])]
    assert bench.state(rooms[dead]) is RoomState.FENCED
    assert bench.state(rooms[alive]) is RoomState.GRANTED


def test_the_dead_do_not_speak() -> None:
    bench = Bench()
    bench.open(1, WRITER)
    bench.hear(Stale(WRITER), RESTARTED)
    bench.open(2, RESTARTED)
    assert bench.hear(Pong(), WRITER) == []
    assert bench.state(2) is RoomState.GRANTED
    assert bench.count("frames_stale") == 2


def test_an_idle_connection_is_closed_and_opened_again() -> None:
    bench = Bench()
    bench.open()
    bench.hear(Landed(1, 1))
    effects = bench.run(IDLE_HANGUP_S)
    assert effects == [Hangup(ENDPOINT)]
    assert bench.machine.next_deadline() is None
    assert sent(bench.open(2)) == ["Hello", "Grant"]


def test_a_connection_in_use_again_is_not_closed() -> None:
    bench = Bench()
    bench.open()
    bench.hear(Landed(1, 1))
    bench.run(IDLE_HANGUP_S - 1)
    assert sent(bench.open(2)) == ["Grant"]
    effects = bench.run(IDLE_HANGUP_S + 2)
    assert told(effects) == []
    assert Hangup(ENDPOINT) not in effects


# --- frames and the end --------------------------------------------------------------------


def test_frames_of_no_use_are_counted() -> None:
    bench = Bench()
    assert bench.hear(Pong()) == []
    bench.open()
    assert bench.hear(Landed(1, 1), addressee=77) == []
    assert bench.count("frames_stale") == 2
    assert bench.hear(Identify("m")) == []
    assert bench.hear(Hello(0, 1, 1, {})) == []
    assert bench.count("frames_malformed") == 2


def test_a_stop_withdraws_everything() -> None:
    bench = Bench()
    bench.open(1)
    bench.open(2)
    assert sent(bench.do(Stop())) == ["Cancel", "Cancel"]
    assert told(bench.hear(Cancelled(1, 1))) == [("RoomReleased", 1)]
    assert not bench.machine.idle()
    bench.hear(Cancelled(2, 2))
    assert bench.machine.idle()
