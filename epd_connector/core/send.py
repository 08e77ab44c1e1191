# SPDX-License-Identifier: Apache-2.0
"""The encode rank: matches offers with grants, stages rows once, writes them, answers.

Owns the rooms of one encode rank; its staged copies (``send_copies``) and its peers
(``send_peers``) are parts of it. Does no I/O: the runtime stages, writes and sends
what ``handle`` returns and reports back. Used by one thread.

A grant is answered exactly once (repeats get the same answer again), a room concludes
exactly once, and the bytes of a copy are freed only when no write can read them.
"""

from dataclasses import dataclass

from epd_connector.core.deadlines import Deadlines
from epd_connector.core.effects import DropRows, Effect, Noted, Reply
from epd_connector.core.send_copies import CopyDesk
from epd_connector.core.send_events import (
    Claim,
    Encoded,
    Ended,
    FromPeer,
    SendEvent,
    Skipped,
    Staged,
    Stop,
    Tick,
    Wrote,
)
from epd_connector.core.send_peers import PeerDesk
from epd_connector.core.send_state import (
    ROOM_MOVES,
    Answer,
    CopyState,
    GrantState,
    HeldGrant,
    RoomEvent,
    RoomState,
    SendRoom,
    StagedCopy,
    Tombstone,
)
from epd_connector.core.tombstones import Tombstones
from epd_connector.errors import Code, Failure
from epd_connector.memory.slab import Balance
from epd_connector.protocol.frames import (
    Cancel,
    Cancelled,
    Grant,
    Hello,
    Landed,
    Ping,
    Refused,
)
from epd_connector.rows import served_ranks
from epd_connector.stats import Counters


@dataclass(frozen=True, slots=True)
class SendSettings:
    """What an encode rank is configured with. Times in seconds, sizes in bytes."""

    incarnation: int
    rank: int
    ranks: int
    slab_nbytes: int
    offer_timeout_s: float
    write_timeout_s: float
    peer_timeout_s: float
    failed_peer_s: float
    write_parallelism: int
    max_rooms: int
    tombstone_s: float


ANSWERS_PER_ROOM = 4
"""Answers to grants that are remembered, as a multiple of ``max_rooms``."""
NOT_NEEDED = Failure(Code.CANCELLED, "the prefill side does not need this room")
TOO_LATE = Failure(Code.CANCELLED, "the room was concluded before this grant")


class EncodeRank:
    """The sans-IO machine of one encode rank."""

    def __init__(self, settings: SendSettings) -> None:
        self.settings = settings
        self.counters = Counters()
        self._rooms: dict[int, SendRoom] = {}
        self._tombs: Tombstones[int, Tombstone] = Tombstones(
            settings.max_rooms, settings.tombstone_s
        )
        self._answers: Tombstones[tuple[int, int, int], Answer] = Tombstones(
            ANSWERS_PER_ROOM * settings.max_rooms, settings.tombstone_s
        )
        self._claims: dict[str, dict[int, SendRoom]] = {}
        self._copies = CopyDesk(settings.slab_nbytes, self.counters)
        self._deadlines: Deadlines[int] = Deadlines()
        self._desk = PeerDesk(settings, self.counters)
        self._stopped = False
        self._now = 0.0
        self._effects: list[Effect] = []

    def handle(self, event: SendEvent, now: float) -> list[Effect]:
        """Takes one event at monotonic time ``now`` (seconds); returns what is to be done."""
        self._now = now
        self._effects = self._desk.effects = self._copies.effects = []
        match event:
            case FromPeer():
                self._on_peer(event)
            case Claim():
                self._on_claim(event)
            case Encoded():
                self._on_encoded(event)
            case Staged():
                self._on_staged(event)
            case Wrote():
                self._on_wrote(event)
            case Ended():
                self._on_ended(event)
            case Skipped():
                self._on_skipped(event)
            case Tick():
                self._on_tick()
            case Stop():
                self._on_stop()
        return self._effects

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due, or None while nothing waits for time to pass."""
        times = [self._deadlines.next(), self._desk.next_deadline()]
        return min((when for when in times if when is not None), default=None)

    def rooms(self) -> dict[int, RoomState]:
        """Open rooms and their states."""
        return {number: room.state for number, room in self._rooms.items()}

    def idle(self) -> bool:
        """Whether nothing is open: no room, no copy, no write."""
        return not self._rooms and self._copies.idle() and not self._desk.writing()

    def balance(self) -> Balance:
        """Bytes of the send slab by state."""
        return self._copies.slab.balance()

    def check(self) -> None:
        """Holds the invariants. Raises AssertionError."""
        self._copies.check()
        claimed = {room for rooms in self._claims.values() for room in rooms.values()}
        for room in self._rooms.values():
            assert room.state is not RoomState.CONCLUDED
            assert (room.state is RoomState.CLAIMED) == (room in claimed)

    # --- rooms begin ------------------------------------------------------------------

    def _on_claim(self, event: Claim) -> None:
        if event.room in self._tombs:
            return
        room = self._rooms.get(event.room)
        if room is None:
            room = self._new_room(event.room, RoomState.CLAIMED)
            if room is None:
                self._note(event.room, self._overload())
                return
        elif room.state is RoomState.ASKED:
            self._move(room, RoomEvent.CLAIM)
        else:
            return
        room.hash, room.rows = event.hash, event.rows
        self._claims.setdefault(event.hash, {})[room.room] = room
        self._deadlines.set(room.room, self._now + self.settings.offer_timeout_s)
        copy = self._copies.find(event.hash)
        if copy is not None:
            self._use(room, copy)

    def _on_encoded(self, event: Encoded) -> None:
        waiting = list(self._claims.get(event.hash, {}).values())
        if self._copies.find(event.hash) is not None or not waiting:
            self._effects.append(DropRows(event.token))
            return
        oversized = self._copies.oversized(event)
        if oversized is not None:
            self._effects.append(DropRows(event.token))
            for room in waiting:
                self._fail(room, oversized)
            return
        copy = self._copies.make(event, self._now)
        for room in waiting:
            self._use(room, copy)
        self._copies.release(copy)
        self._copies.advance()

    def _use(self, room: SendRoom, copy: StagedCopy) -> None:
        """``room`` is served from ``copy``, if the rows are as many as its request said."""
        if room.rows != copy.rows:
            failure = Failure(
                Code.MISMATCH,
                f"the tower gave {copy.rows} rows where the prompt has {room.rows} tokens",
            )
            self._fail(room, failure)
            return
        room.copy = copy
        copy.users[room.room] = room
        self._move(room, RoomEvent.ROWS)
        if copy.state is CopyState.READY:
            self._offer(room)

    def _on_staged(self, event: Staged) -> None:
        copy = self._copies.landed(event.copy)
        if copy is None:
            return
        if event.failure is not None:
            for room in list(copy.users.values()):
                self._fail(room, event.failure)
        elif copy.users:
            self._copies.ready(copy)
            for room in list(copy.users.values()):
                self._offer(room)
        self._copies.release(copy)

    def _offer(self, room: SendRoom) -> None:
        self._move(room, RoomEvent.STAGED)
        self.counters.add("items_offered")
        for grant in list(room.grants.values()):
            if grant.state is GrantState.WAITING:
                self._serve(room, grant)
        self._settle(room)

    # --- grants -----------------------------------------------------------------------

    def _on_peer(self, event: FromPeer) -> None:
        if not self._desk.admit(event, self._now):
            return
        match event.frame:
            case Hello():
                self._desk.greet(event, event.frame, self._now)
            case Ping():
                self._desk.pong(event)
            case Grant():
                self._on_grant(event, event.frame)
            case Cancel():
                self._on_cancel(event, event.frame)
            case _:
                self.counters.add("frames_malformed")

    def _on_grant(self, event: FromPeer, frame: Grant) -> None:
        answer = self._answers.find((event.sender, frame.room, frame.grant))
        if answer is not None:
            self.counters.add("grants_repeated")
            self._effects.append(Reply(event.route, event.sender, answer))
            return
        tomb = self._tombs.find(frame.room)
        if tomb is not None:
            self._reply(event.route, event.sender, _refused(frame, tomb.failure or TOO_LATE))
            return
        peer = self._desk.peer(event.sender)
        if peer is None:
            # Its Hello was lost with a connection; the grant comes again behind a new one.
            self.counters.add("grants_repeated")
            return
        room = self._rooms.get(frame.room) or self._new_room(frame.room, RoomState.ASKED)
        if room is None:
            self._refuse_stranger(event, frame, self._overload())
            return
        if room.state is RoomState.ASKED and not room.grants:
            self._deadlines.set(room.room, self._now + self.settings.offer_timeout_s)
        held = room.grants.get(peer.hello.rank)
        if held is not None and not self._replaces(event, frame, held):
            return
        grant = HeldGrant(frame, peer)
        problem = self._desk.foreign(grant, room)
        if problem is not None:
            self._refuse_stranger(event, frame, problem)
            self._settle_unasked(room)
            return
        room.receivers = served_ranks(self.settings.rank, self.settings.ranks, peer.hello.ranks)
        room.grants[peer.hello.rank] = grant
        self._desk.take(grant)
        if room.failure is not None:
            self._answer(room, grant, _refused(frame, room.failure))
        elif room.state is RoomState.OFFERED:
            self._serve(room, grant)
        self._settle(room)

    def _replaces(self, event: FromPeer, frame: Grant, held: HeldGrant) -> bool:
        """Whether ``frame`` is a new attempt; a repeat or one too many is dealt with here."""
        if held.frame.grant == frame.grant and held.peer.incarnation == event.sender:
            self.counters.add("grants_repeated")
            if held.answer is not None:
                self._effects.append(Reply(event.route, event.sender, held.answer))
            return False
        if held.state is GrantState.ANSWERED and held.peer.incarnation == event.sender:
            return True
        reason = f"grant {held.frame.grant} of rank {held.peer.hello.rank} is not answered yet"
        self._refuse_stranger(event, frame, Failure(Code.OVERLOADED, reason))
        return False

    def _serve(self, room: SendRoom, grant: HeldGrant) -> None:
        """The rows are staged: check the grant against the offer, then write or answer it."""
        assert room.copy is not None
        failure = self._desk.contract(grant, room, self._now)
        if failure is not None:
            self._answer(room, grant, _refused(grant.frame, failure))
        elif grant.frame.nbytes == 0:
            self._answer(room, grant, Landed(room.room, grant.frame.grant))
        else:
            self._desk.enqueue(grant)
            self._pump(grant)

    def _pump(self, grant: HeldGrant) -> None:
        self._desk.pump(grant.peer, self._rooms, self._now)

    def _on_cancel(self, event: FromPeer, frame: Cancel) -> None:
        room = self._rooms.get(frame.room)
        grant = self._find(room, event.sender, frame.grant)
        answer = Cancelled(frame.room, frame.grant)
        if room is None or grant is None or grant.state is GrantState.ANSWERED:
            # Nothing is being written under it now, and nothing may be if it comes after all.
            self._reply(event.route, event.sender, answer)
        elif grant.state is GrantState.WAITING:
            self._answer(room, grant, answer)
            self._settle(room)
        else:
            grant.state, grant.verdict = GrantState.WITHDRAWN, answer

    def _find(self, room: SendRoom | None, sender: int, number: int) -> HeldGrant | None:
        if room is None:
            return None
        for grant in room.grants.values():
            if grant.frame.grant == number and grant.peer.incarnation == sender:
                return grant
        return None

    def _on_wrote(self, event: Wrote) -> None:
        grant = self._desk.finish(event.write)
        if grant is None:
            return
        room = self._rooms[grant.frame.room]
        if event.failure is not None:
            self._on_write_failed(room, grant, event.failure)
        elif grant.verdict is not None:
            self._answer(room, grant, grant.verdict)
        else:
            self.counters.add("bytes_sent", grant.frame.nbytes)
            self._answer(room, grant, Landed(room.room, grant.frame.grant))
        self._pump(grant)
        self._settle(room)

    def _on_write_failed(self, room: SendRoom, grant: HeldGrant, failure: Failure) -> None:
        """The room fails for everybody; what else waits for this peer is refused."""
        self.counters.add("writes_failed")
        waiting = self._desk.distrust(grant.peer, self._now)
        self._answer(room, grant, grant.verdict or _refused(grant.frame, failure))
        self._fail(room, failure)
        for other in waiting:
            if other.state is GrantState.WAITING:
                other_room = self._rooms[other.frame.room]
                self._serve(other_room, other)
                self._settle(other_room)

    def _answer(self, room: SendRoom, grant: HeldGrant, answer: Answer) -> None:
        grant.state, grant.answer = GrantState.ANSWERED, answer
        self._desk.answered(grant)
        if isinstance(answer, Refused):
            self.counters.add("grants_refused")
        self._reply(grant.peer.route, grant.peer.incarnation, answer)

    def _reply(self, route: int, sender: int, answer: Answer) -> None:
        """Gives a final answer, and remembers it: the first one counts, whatever comes late."""
        key = (sender, answer.room, answer.grant)
        if key not in self._answers:
            self._answers.bury(key, answer, self._now)
        self._effects.append(Reply(route, sender, answer))

    def _refuse_stranger(self, event: FromPeer, frame: Grant, failure: Failure) -> None:
        """Refuses a grant that takes no part in its room."""
        self.counters.add("grants_refused")
        self._note(frame.room, failure)
        self._reply(event.route, event.sender, _refused(frame, failure))

    # --- rooms end --------------------------------------------------------------------

    def _on_ended(self, event: Ended) -> None:
        room = self._rooms.get(event.room)
        if room is None and event.room not in self._tombs:
            self._tombs.bury(event.room, Tombstone(event.failure), self._now)
        elif room is not None and room.state in (RoomState.ASKED, RoomState.CLAIMED):
            self._fail(room, event.failure)

    def _on_skipped(self, event: Skipped) -> None:
        room = self._rooms.get(event.room)
        if room is not None:
            self._fail(room, NOT_NEEDED)
        elif event.room not in self._tombs:
            self.counters.add("rooms_skipped")
            self._tombs.bury(event.room, Tombstone(NOT_NEEDED), self._now)

    def _on_tick(self) -> None:
        for number in self._deadlines.expired(self._now):
            self._fail(self._rooms[number], self._too_late(self._rooms[number]))
        for grant in self._desk.overdue(self._now):
            self._on_stalled(grant)
        for peer in self._desk.silent(self._now):
            self.counters.add("peers_lost")
            failure = Failure(
                Code.PEER_DEAD,
                f"prefill rank {peer.hello.rank} was silent for "
                f"{self.settings.peer_timeout_s} s (peer_timeout_s)",
            )
            for grant in self._desk.lose(peer):
                self._fail(self._rooms[grant.frame.room], failure)
        self._desk.forget_idle(self._now)
        self._tombs.forget(self._now)
        self._answers.forget(self._now)

    def _on_stalled(self, grant: HeldGrant) -> None:
        """A write takes too long: its room fails now, its region stays with the write."""
        failure = Failure(
            Code.TIMEOUT,
            f"a write of {grant.frame.nbytes} bytes has not ended in "
            f"{self.settings.write_timeout_s} s (write_timeout_s)",
        )
        self.counters.add("writes_late")
        self._desk.stall(grant, failure)
        self._fail(self._rooms[grant.frame.room], failure)

    def _on_stop(self) -> None:
        self._stopped = True
        for room in list(self._rooms.values()):
            self._fail(room, Failure(Code.SHUTDOWN, "the encode engine is shutting down"))

    def _fail(self, room: SendRoom, failure: Failure) -> None:
        """Fails ``room`` for every receiver; writes that are in flight are waited for."""
        if not self._move(room, RoomEvent.FAIL):
            return
        room.failure = failure
        self._deadlines.clear(room.room)
        skipped = failure.code is Code.CANCELLED
        self.counters.add("rooms_skipped" if skipped else "rooms_failed")
        if not skipped:
            self._note(room.room, failure)
        for grant in list(room.grants.values()):
            if grant.state is GrantState.WAITING:
                self._answer(room, grant, _refused(grant.frame, failure))
            elif grant.state is GrantState.WRITING:
                self._desk.stall(grant, failure)
        self._settle(room)

    def _settle(self, room: SendRoom) -> None:
        """Concludes ``room`` if nothing is left to be done for it."""
        if room.state is RoomState.DRAINING:
            if not room.writes_in_flight() and self._move(room, RoomEvent.DRAINED):
                self._conclude(room)
        elif room.all_answered() and self._move(room, RoomEvent.SERVED):
            answers = [grant.answer for grant in room.grants.values()]
            if room.copy is not None and all(isinstance(a, Landed) for a in answers):
                self.counters.add("items_landed")
                self.counters.add_duration(self._now - room.copy.encoded_at)
            self._conclude(room)

    def _settle_unasked(self, room: SendRoom) -> None:
        """A room that only a refused stranger asked for leaves nothing behind."""
        if room.state is RoomState.ASKED and not room.grants:
            del self._rooms[room.room]
            self._deadlines.clear(room.room)

    def _conclude(self, room: SendRoom) -> None:
        self.counters.add("rooms_concluded")
        del self._rooms[room.room]
        self._deadlines.clear(room.room)
        self._tombs.bury(room.room, Tombstone(room.failure), self._now)
        if room.copy is not None:
            self._copies.release(room.copy, room)

    # --- small parts ------------------------------------------------------------------

    def _move(self, room: SendRoom, event: RoomEvent) -> bool:
        """The one place that moves a room; False where the table has no such step."""
        target = ROOM_MOVES.get((room.state, event))
        if target is None:
            return False
        if room.state is RoomState.CLAIMED:
            del self._claims[room.hash][room.room]
            if not self._claims[room.hash]:
                del self._claims[room.hash]
        room.state = target
        return True

    def _new_room(self, number: int, state: RoomState) -> SendRoom | None:
        if self._stopped or len(self._rooms) >= self.settings.max_rooms:
            return None
        self.counters.add("rooms_opened")
        room = self._rooms[number] = SendRoom(number, state)
        return room

    def _overload(self) -> Failure:
        if self._stopped:
            return Failure(Code.SHUTDOWN, "the encode engine is shutting down")
        return Failure(
            Code.OVERLOADED,
            f"{len(self._rooms)} rooms are open, limit {self.settings.max_rooms} (max_rooms)",
        )

    def _too_late(self, room: SendRoom) -> Failure:
        limit = f"within {self.settings.offer_timeout_s} s (offer_timeout_s)"
        match room.state:
            case RoomState.ASKED:
                reason = f"no request of the encode engine claimed the room {limit}"
                return Failure(Code.NOT_OFFERED, reason)
            case RoomState.CLAIMED:
                return Failure(Code.TIMEOUT, f"the encode engine did not encode the item {limit}")
            case RoomState.STAGING:
                reason = f"no room in the send slab {limit}: raise send_slab_bytes"
                return Failure(Code.TIMEOUT, reason)
            case _:
                return Failure(Code.TIMEOUT, f"not every prefill rank asked for the rows {limit}")

    def _note(self, room: int, failure: Failure) -> None:
        self._effects.append(Noted(f"room {room:016x}", failure))


def _refused(frame: Grant, failure: Failure) -> Refused:
    return Refused(frame.room, frame.grant, failure)
