# SPDX-License-Identifier: Apache-2.0
"""The prefill rank: grants regions to encode ranks and learns when nothing writes them.

Owns the rooms that one prefill rank is receiving. What is known of the encode ranks that
write to it is a part of its own (``receive_senders``). Does not own memory: its head places
every room, and hears of each exactly once that it landed or failed, and exactly once that
its region is safe again. Does no I/O. Used by one thread.

Evidence, not time, makes a region safe: the writer's answer to the grant, or that its
process is gone, and then the transport's fence.
"""

import math

from epd_connector.core.deadlines import Deadlines
from epd_connector.core.effects import Effect, TellHead
from epd_connector.core.receive_senders import IDLE_HANGUP_S, SenderDesk
from epd_connector.core.receive_state import (
    FIRST_RETRY_S,
    ROOM_MOVES,
    Abandoned,
    Broken,
    FromSender,
    Gone,
    Opened,
    Probed,
    ReceiveEvent,
    ReceiveRoom,
    ReceiveSettings,
    RoomEvent,
    RoomState,
    Sender,
    Stop,
    Tick,
)
from epd_connector.core.tombstones import Tombstones
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    AnyFrame,
    Cancel,
    Cancelled,
    Grant,
    Landed,
    Open,
    Pong,
    Refused,
    RoomFailed,
    RoomLanded,
    RoomReleased,
    SenderBack,
    SenderSilent,
    Stale,
    Stalled,
    Welcome,
)
from epd_connector.rows import landing_row, serving_rank, wanted_rows
from epd_connector.stats import Counters

__all__ = [
    "IDLE_HANGUP_S",
    "Abandoned",
    "Broken",
    "FromSender",
    "Gone",
    "Opened",
    "PrefillRank",
    "Probed",
    "ReceiveEvent",
    "ReceiveSettings",
    "Stop",
    "Tick",
]

FENCE_STEP_S = 0.25
"""Seconds after which a process that runs looks at its fences again: more does not count."""
_SHORTEST_STEP_S = 0.001
_LAST_RETRY_S = 16.0


class PrefillRank:
    """The sans-IO machine of one prefill rank."""

    def __init__(self, settings: ReceiveSettings) -> None:
        self.settings = settings
        self.counters = Counters()
        self._effects: list[Effect] = []
        self._senders = SenderDesk(settings, self.counters, self._effects)
        self._rooms: dict[int, ReceiveRoom] = {}
        self._released: Tombstones[int, None] = Tombstones(settings.max_rooms, math.inf)
        self._retries: Deadlines[int] = Deadlines()
        # In seconds of ``_ran``, not of the clock.
        self._fences: Deadlines[int] = Deadlines()
        self._ran = 0.0
        self._grant_serial = 0
        self._now = 0.0

    def handle(self, event: ReceiveEvent, now: float) -> list[Effect]:
        """Takes one event at monotonic time ``now`` (seconds); returns what is to be done."""
        self._ran += min(max(now - self._now, 0.0), FENCE_STEP_S)
        self._now = self._senders.now = now
        match event:
            case Opened():
                self._on_opened(event)
            case Abandoned():
                self._on_abandoned(event.room)
            case FromSender():
                self._on_sender(event)
            case Broken(endpoint=endpoint):
                self._senders.broken(endpoint)
            case Probed(endpoint=endpoint, gone=gone):
                for sender in self._senders.probed(endpoint, gone):
                    self._bury(sender, Code.PEER_DEAD, "its process is gone")
            case Gone(host=host):
                for sender in self._senders.on_host(host):
                    self._bury(sender, Code.PEER_DEAD, "its host is said to be dead")
            case Tick():
                self._on_tick()
            case Stop():
                for room in list(self._rooms):
                    self._on_abandoned(room)
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due, or None while nothing waits for time to pass."""
        times = [self._retries.next(), self._next_fence(), self._senders.next_deadline()]
        return min((when for when in times if when is not None), default=None)

    def _next_fence(self) -> float | None:
        due = self._fences.next()
        if due is None or due <= self._ran:
            return None if due is None else self._now
        return self._now + min(max(due - self._ran, _SHORTEST_STEP_S), FENCE_STEP_S)

    def rooms(self) -> dict[int, RoomState]:
        """Open rooms and their states."""
        return {number: room.state for number, room in self._rooms.items()}

    def idle(self) -> bool:
        """Whether no region of this rank may be written to."""
        return not self._rooms

    def check(self) -> None:
        """Holds the invariants. Raises AssertionError."""
        fenced = {room for room in self._rooms.values() if room.state is RoomState.FENCED}
        of_senders = {room for sender in self._senders.all() for room in sender.rooms.values()}
        assert of_senders == set(self._rooms.values()) - fenced
        over = (RoomState.LANDED, RoomState.RELEASED)
        assert all(room.state not in over for room in self._rooms.values())

    # --- the head's wishes ------------------------------------------------------------

    def _on_opened(self, event: Opened) -> None:
        frame, settings = event.frame, self.settings
        if frame.room in self._rooms:
            return
        self._released.remove(frame.room)
        if event.transport is None:
            names = ", ".join(sorted(settings.sessions)) or "none"
            reason = f"this rank and the encode rank share no transport (here: {names})"
            self._reject(frame.room, Failure(Code.UNREACHABLE, reason))
            return
        if len(self._rooms) >= settings.max_rooms:
            reason = f"{len(self._rooms)} rooms are open, limit {settings.max_rooms} (max_rooms)"
            self._reject(frame.room, Failure(Code.OVERLOADED, reason))
            return
        address = frame.senders[serving_rank(settings.rank, settings.ranks, len(frame.senders))]
        if self._senders.is_dead(address.incarnation):
            reason = f"encode rank at {address.endpoint}: its process is gone"
            self._reject(frame.room, Failure(Code.STALE, reason))
            return
        sender = self._senders.greet(address.endpoint, address.incarnation)
        grant = self._grant(frame, event.transport)
        room = ReceiveRoom(frame, grant, sender, self._now, self._now)
        self._rooms[frame.room] = room
        sender.rooms[frame.room] = room
        self._senders.say(sender, room.grant)
        self._retries.set(frame.room, self._now + room.retry_s)

    def _grant(self, frame: Open, transport: str) -> Grant:
        settings, sharded = self.settings, frame.layout.sharded
        shard = wanted_rows(frame.rows, settings.ranks, settings.rank, sharded=sharded)
        row_nbytes = frame.width * frame.itemsize
        self._grant_serial += 1
        return Grant(
            room=frame.room,
            grant=self._grant_serial,
            rows=frame.rows,
            start=shard.start,
            count=shard.rows,
            width=frame.width,
            dtype=frame.dtype,
            sharded=sharded,
            transport=transport,
            offset=frame.offset + landing_row(shard, frame.layout) * row_nbytes,
            nbytes=shard.rows * row_nbytes,
        )

    def _reject(self, room: int, failure: Failure) -> None:
        self._tell(RoomFailed(room, failure))
        self._tell_released(room)

    def _on_abandoned(self, number: int) -> None:
        room = self._rooms.get(number)
        if room is None:
            self._tell_released(number)
        elif self._move(room, RoomEvent.ABANDON):
            self._senders.say(room.sender, Cancel(number, room.grant.grant))
            room.retry_s = FIRST_RETRY_S
            self._retries.set(number, self._now + room.retry_s)

    # --- what encode ranks say --------------------------------------------------------

    def _on_sender(self, event: FromSender) -> None:
        for other in self._senders.replaced(event):
            self._bury(other, Code.STALE, "it was restarted")
        sender = self._senders.hear(event)
        if sender is None:
            return
        if self._senders.returns(sender):
            self._on_return(sender)
        match event.frame:
            case Landed(room=number, grant=grant):
                self._on_answer(number, grant, RoomEvent.LANDED, None)
            case Refused(room=number, grant=grant, failure=failure):
                self._on_answer(number, grant, RoomEvent.REFUSED, failure)
            case Stalled(room=number, grant=grant, failure=failure):
                self._on_answer(number, grant, RoomEvent.STALLED, failure)
            case Cancelled(room=number, grant=grant):
                failure = Failure(Code.CANCELLED, "the encode rank gave the room up")
                self._on_answer(number, grant, RoomEvent.CANCELLED, failure)
            case Welcome() | Pong() | Stale():
                pass
            case _:
                self.counters.add("frames_malformed")

    def _on_answer(
        self, number: int, grant: int, event: RoomEvent, failure: Failure | None
    ) -> None:
        room = self._rooms.get(number)
        if room is None or room.grant.grant != grant:
            return
        self._end(room, event, failure)

    def _on_return(self, sender: Sender) -> None:
        """A network that was cut has healed: the regions it held back can be had again."""
        self._tell(SenderBack(sender.incarnation))
        self._senders.say_hello(sender)
        for room in list(sender.rooms.values()):
            if self._move(room, RoomEvent.RETURN):
                self._senders.say(sender, Cancel(room.frame.room, room.grant.grant))
                self._retries.set(room.frame.room, self._now + FIRST_RETRY_S)

    def _bury(self, sender: Sender, code: Code, what: str) -> None:
        """The process behind ``sender`` is gone: what it was granted is safe after the fence."""
        self._senders.bury(sender)
        for room in list(sender.rooms.values()):
            self._retries.clear(room.frame.room)
            self._fences.set(room.frame.room, self._ran + self._fence_s(room))
            failure = Failure(code, f"encode rank at {sender.endpoint}: {what}")
            if code is Code.STALE and sender.heard > room.granted:
                # It spoke after the grant, so it took the room with it: its successor does not
                # know of it. Had it been gone before, the successor may well.
                failure = Failure(Code.PEER_DEAD, failure.reason)
            self._end(room, RoomEvent.DEATH, failure)

    # --- time -------------------------------------------------------------------------

    def _on_tick(self) -> None:
        self._senders.tick(self._on_silence)
        for number in self._retries.expired(self._now):
            self._retry(self._rooms[number])
        self._tick_fences()

    def _tick_fences(self) -> None:
        """Frees what the dead can write to no more.

        A fence counts while this process runs: what a dead writer had sent may lie in this
        host's socket buffers, where it waits for a process that was stopped to go on.
        """
        for number in self._fences.expired(self._ran):
            self._end(self._rooms[number], RoomEvent.FENCE, None)

    def _fence_s(self, room: ReceiveRoom) -> float:
        """Seconds after the death of the room's writer that its writes can still land."""
        return self.settings.fences.get(room.grant.transport, 0.0)

    def _on_silence(self, sender: Sender) -> None:
        reason = (
            f"encode rank at {sender.endpoint} was silent for "
            f"{self.settings.peer_timeout_s} s (peer_timeout_s)"
        )
        failure = Failure(Code.PEER_DEAD, reason)
        self._tell(SenderSilent(sender.incarnation, failure))
        for room in list(sender.rooms.values()):
            self._retries.clear(room.frame.room)
            self._end(room, RoomEvent.SILENCE, failure)

    def _retry(self, room: ReceiveRoom) -> None:
        """Frames can be lost with a connection: ask again, ever more slowly."""
        self._senders.say_hello(room.sender)
        if room.state is RoomState.WITHDRAWING:
            self._senders.say(room.sender, Cancel(room.frame.room, room.grant.grant))
        else:
            self._senders.say(room.sender, room.grant)
        room.retry_s = min(2 * room.retry_s, _LAST_RETRY_S)
        self._retries.set(room.frame.room, self._now + room.retry_s)

    # --- small parts ------------------------------------------------------------------

    def _end(self, room: ReceiveRoom, event: RoomEvent, failure: Failure | None) -> None:
        """Moves ``room``, and tells the head what it has to know, each thing once."""
        before = room.state
        if not self._move(room, event):
            return
        if before is RoomState.GRANTED and room.state is not RoomState.LANDED:
            assert failure is not None
            self._tell(RoomFailed(room.frame.room, failure))
        if room.state is RoomState.LANDED:
            self.counters.add("bytes_landed", room.grant.nbytes)
            self._tell(RoomLanded(room.frame.room, room.grant.nbytes))
        elif room.state is RoomState.RELEASED:
            self._tell_released(room.frame.room)
        if room.state in (RoomState.LANDED, RoomState.RELEASED):
            self._forget(room)

    def _forget(self, room: ReceiveRoom) -> None:
        del self._rooms[room.frame.room]
        self._retries.clear(room.frame.room)
        self._fences.clear(room.frame.room)
        room.sender.rooms.pop(room.frame.room, None)

    def _move(self, room: ReceiveRoom, event: RoomEvent) -> bool:
        """The one place that moves a room; False where the table has no such step."""
        target = ROOM_MOVES.get((room.state, event))
        if target is None:
            return False
        room.state, room.since = target, self._now
        return True

    def _tell_released(self, room: int) -> None:
        """Once for each time the room was opened: the head may open it again afterwards."""
        if room not in self._released:
            self._released.bury(room, None, self._now)
            self._tell(RoomReleased(room))

    def _tell(self, frame: AnyFrame) -> None:
        self._effects.append(TellHead(frame))
