# SPDX-License-Identifier: Apache-2.0
"""The encode rank: matches offers with grants, stages rows once, writes them, answers.

Owns what the engine says: claims, rows, ends; and when a room has taken too long. Its parts
own the rest: the table of rooms (``send_rooms``), grants and how rooms end by them
(``send_grants``), peers and writes (``send_peers``), staged copies (``send_copies``), whether
requests are to be held back (``send_pressure``). Does no I/O: the runtime stages, writes and
sends what ``handle`` returns and reports back. Used by one thread.

A grant is answered exactly once (repeats get the same answer again), a room concludes
exactly once, and the bytes of a copy are freed only when no write can read them.
"""

from epd_connector.core.effects import DropRows, Effect
from epd_connector.core.send_copies import CopyDesk
from epd_connector.core.send_events import (
    Claim,
    Encoded,
    Ended,
    FromPeer,
    Receivers,
    SendEvent,
    Skipped,
    Staged,
    Stop,
    Tick,
    Wrote,
)
from epd_connector.core.send_grants import GrantDesk
from epd_connector.core.send_pressure import PressureDesk
from epd_connector.core.send_rooms import RoomTable
from epd_connector.core.send_state import (
    CopyState,
    RoomEvent,
    RoomState,
    SendRoom,
    SendSettings,
    StagedCopy,
)
from epd_connector.errors import Code, Failure
from epd_connector.memory.slab import Balance
from epd_connector.rows import served_ranks
from epd_connector.stats import Counters

__all__ = ["EncodeRank", "SendSettings"]

NOT_NEEDED = Failure(Code.CANCELLED, "the prefill side does not need this room")


class EncodeRank:
    """The sans-IO machine of one encode rank."""

    def __init__(self, settings: SendSettings) -> None:
        self.settings = settings
        self.counters = Counters()
        self._effects: list[Effect] = []
        self._rooms = RoomTable(settings, self.counters, self._effects)
        self._copies = CopyDesk(
            settings.slab_nbytes, settings.ahead_rows, self.counters, self._effects
        )
        self._grants = GrantDesk(settings, self.counters, self._effects, self._rooms, self._copies)
        self._pressure = PressureDesk(settings.slab_nbytes, self.counters, self._effects)
        self._now = 0.0

    def handle(self, event: SendEvent, now: float) -> list[Effect]:
        """Takes one event at monotonic time ``now`` (seconds); returns what is to be done."""
        self._now = self._rooms.now = self._grants.now = now
        match event:
            case FromPeer():
                room = self._grants.hear(event)
                if room is not None:
                    self._on_granted(room)
            case Claim():
                self._on_claim(event)
            case Encoded():
                self._on_encoded(event)
            case Staged():
                self._on_staged(event)
            case Wrote():
                self._grants.wrote(event)
            case Ended():
                self._on_ended(event)
            case Skipped():
                self._on_skipped(event)
            case Receivers():
                self._on_receivers(event)
            case Tick():
                self._on_tick()
            case Stop():
                self._on_stop()
        if self._copies.newly_lent:
            self._offer_lent()
        self._pressure.weigh(self._copies.waiting_nbytes, self._rooms, now)
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due, or None while nothing waits for time to pass."""
        desks = (self._rooms, self._grants, self._pressure)
        times = [desk.next_deadline() for desk in desks]
        return min((when for when in times if when is not None), default=None)

    def rooms(self) -> dict[int, RoomState]:
        """Open rooms and their states."""
        return {room.room: room.state for room in self._rooms}

    def idle(self) -> bool:
        """Whether nothing is open: no room, no copy, no write."""
        return not self._rooms and self._copies.idle() and not self._grants.writing()

    def balance(self) -> Balance:
        """Bytes of the send slab by state."""
        return self._copies.slab.balance()

    def check(self) -> None:
        """Holds the invariants. Raises AssertionError."""
        self._copies.check()
        self._rooms.check()

    # --- rooms begin ------------------------------------------------------------------

    def _on_claim(self, event: Claim) -> None:
        if self._rooms.tomb(event.room) is not None:
            return
        room = self._rooms.find(event.room)
        if room is None:
            room = self._rooms.make(event.room, RoomState.CLAIMED)
            if room is None:
                self._rooms.note(event.room, self._rooms.overload())
                return
        elif room.state is RoomState.ASKED:
            self._rooms.move(room, RoomEvent.CLAIM)
        else:
            return
        self._rooms.claim(room, event.hash, event.rows)
        copy = self._copies.find(event.hash)
        if copy is not None:
            self._use(room, copy)

    def _on_granted(self, room: SendRoom) -> None:
        """A peer has memory for the rows of ``room``: they go first, or are called for."""
        if room.copy is not None:
            self._copies.grant(room.copy)
        self._pressure.granted(room)

    def _on_encoded(self, event: Encoded) -> None:
        waiting = self._rooms.claimed(event.hash)
        if self._copies.find(event.hash) is not None or not waiting:
            self._effects.append(DropRows(event.token))
            return
        refusal = self._copies.refusal(event, any(room.grants for room in waiting))
        if refusal is not None:
            self._effects.append(DropRows(event.token))
            for room in waiting:
                self._grants.fail(room, refusal)
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
            self._grants.fail(room, failure)
            return
        room.copy = copy
        copy.users[room.room] = room
        self._rooms.move(room, RoomEvent.ROWS)
        if room.grants:
            self._copies.grant(copy)
        if copy.state is CopyState.READY:
            self._grants.offer(room)
        elif copy.state is CopyState.LENT:
            self._copies.newly_lent.append(copy)

    def _offer_lent(self) -> None:
        """Rooms whose rows are lent are served last: that may make room for others to be."""
        while self._copies.newly_lent:
            copy = self._copies.newly_lent.popleft()
            for room in list(copy.users.values()):
                if room.state is RoomState.STAGING:
                    self._grants.offer(room)

    def _on_staged(self, event: Staged) -> None:
        copy = self._copies.landed(event.copy)
        if copy is None:
            return
        if event.failure is not None:
            for room in list(copy.users.values()):
                self._grants.fail(room, event.failure)
        elif copy.users:
            self._copies.ready(copy)
            for room in list(copy.users.values()):
                self._grants.offer(room)
        self._copies.release(copy)

    # --- rooms end --------------------------------------------------------------------

    def _on_ended(self, event: Ended) -> None:
        room = self._rooms.find(event.room)
        if room is None and self._rooms.tomb(event.room) is None:
            self._rooms.bury(event.room, event.failure)
        elif room is not None and room.state in (RoomState.ASKED, RoomState.CLAIMED):
            self._grants.fail(room, event.failure)

    def _on_skipped(self, event: Skipped) -> None:
        room = self._rooms.find(event.room)
        if room is not None:
            self._grants.fail(room, NOT_NEEDED)
        elif self._rooms.tomb(event.room) is None:
            self.counters.add("rooms_skipped")
            self._rooms.bury(event.room, NOT_NEEDED)

    def _on_receivers(self, event: Receivers) -> None:
        """A rank that serves nobody is done with the room, whether it has come up yet or not."""
        settings = self.settings
        if served_ranks(settings.rank, settings.ranks, event.ranks):
            return
        nobody = Failure(
            Code.MISMATCH,
            f"an engine of {event.ranks} ranks receives this room, and encode rank "
            f"{settings.rank} of {settings.ranks} serves none of them",
        )
        room = self._rooms.find(event.room)
        if room is not None:
            self._grants.unserved(room, nobody)
        elif self._rooms.tomb(event.room) is None:
            self._rooms.bury(event.room, nobody)

    def _on_tick(self) -> None:
        for room, failure in self._rooms.out_of_time():
            self._grants.fail(room, failure)
        self._grants.tick()
        self._rooms.forget()

    def _on_stop(self) -> None:
        self._rooms.stopped = True
        for room in self._rooms:
            self._grants.fail(room, Failure(Code.SHUTDOWN, "the encode engine is shutting down"))
