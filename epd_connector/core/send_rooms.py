# SPDX-License-Identifier: Apache-2.0
"""The encode rank's table of rooms: which are open, who claimed them, how they ended.

Owns the records of rooms and their tombstones, the one place where a room moves, and the
time a room may take. A part of ``send.EncodeRank``; does not own grants or copies, and
appends to the machine's effects only what people may want to read.
"""

from collections.abc import Iterator

from epd_connector.core.deadlines import Deadlines
from epd_connector.core.effects import Effect, Noted
from epd_connector.core.send_state import (
    ROOM_MOVES,
    RoomEvent,
    RoomState,
    SendRoom,
    SendSettings,
    Tombstone,
)
from epd_connector.core.tombstones import Tombstones
from epd_connector.errors import Code, Failure
from epd_connector.stats import Counters


class RoomTable:
    """Rooms by number, and those that wait for rows by item hash.

    ``now``: monotonic seconds, set by the machine. ``stopped``: no new rooms are taken.
    """

    def __init__(self, settings: SendSettings, counters: Counters, effects: list[Effect]) -> None:
        self.now = 0.0
        self.stopped = False
        self._settings = settings
        self._counters = counters
        self._effects = effects
        self._rooms: dict[int, SendRoom] = {}
        self._claims: dict[str, dict[int, SendRoom]] = {}
        self._deadlines: Deadlines[int] = Deadlines()
        self._tombs: Tombstones[int, Tombstone] = Tombstones(
            settings.max_rooms, settings.tombstone_s
        )

    def __len__(self) -> int:
        return len(self._rooms)

    def __iter__(self) -> Iterator[SendRoom]:
        """Every open room, as of now: rooms may end while they are looked at."""
        return iter(list(self._rooms.values()))

    def find(self, number: int) -> SendRoom | None:
        """The open room of this number, or None."""
        return self._rooms.get(number)

    def tomb(self, number: int) -> Tombstone | None:
        """How the room of this number ended, if that is remembered."""
        return self._tombs.find(number)

    def claimed(self, hash: str) -> list[SendRoom]:
        """Rooms whose requests wait for the rows of item ``hash``."""
        return list(self._claims.get(hash, {}).values())

    def make(self, number: int, state: RoomState) -> SendRoom | None:
        """A new room; None where there may be no more (``overload``)."""
        if self.stopped or len(self._rooms) >= self._settings.max_rooms:
            return None
        self._counters.add("rooms_opened")
        room = self._rooms[number] = SendRoom(number, state, self.now, self.now)
        return room

    def claim(self, room: SendRoom, hash: str, rows: int) -> None:
        """A request of this engine brings ``room`` the item ``hash``."""
        room.hash, room.rows = hash, rows
        self._claims.setdefault(hash, {})[room.room] = room
        self.give_time(room)

    def give_time(self, room: SendRoom) -> None:
        """``room`` may take ``offer_timeout_s`` from now."""
        self._deadlines.set(room.room, self.now + self._settings.offer_timeout_s)

    def move(self, room: SendRoom, event: RoomEvent) -> bool:
        """The one place that moves a room; False where the table has no such step."""
        target = ROOM_MOVES.get((room.state, event))
        if target is None:
            return False
        if room.state is RoomState.CLAIMED:
            del self._claims[room.hash][room.room]
            if not self._claims[room.hash]:
                del self._claims[room.hash]
        room.state, room.since = target, self.now
        return True

    def out_of_time(self) -> list[tuple[SendRoom, Failure]]:
        """Rooms that have taken too long, each once, and what for."""
        late = [self._rooms[number] for number in self._deadlines.expired(self.now)]
        return [(room, self._too_late(room)) for room in late]

    def no_deadline(self, room: SendRoom) -> None:
        """``room`` has failed: it ends when it can."""
        self._deadlines.clear(room.room)

    def remove(self, room: SendRoom) -> None:
        """``room`` is not open any more."""
        del self._rooms[room.room]
        self._deadlines.clear(room.room)

    def bury(self, number: int, failure: Failure | None) -> None:
        """Remembers for a while how a room ended."""
        self._tombs.bury(number, Tombstone(failure), self.now)

    def forget(self) -> None:
        """Drops the memory of rooms that ended long ago."""
        self._tombs.forget(self.now)

    def next_deadline(self) -> float | None:
        """When some room has taken too long, or None."""
        return self._deadlines.next()

    def overload(self) -> Failure:
        """Why no room can be made."""
        if self.stopped:
            return Failure(Code.SHUTDOWN, "the encode engine is shutting down")
        return Failure(
            Code.OVERLOADED,
            f"{len(self._rooms)} rooms are open, limit {self._settings.max_rooms} (max_rooms)",
        )

    def _too_late(self, room: SendRoom) -> Failure:
        limit = f"within {self._settings.offer_timeout_s} s (offer_timeout_s)"
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

    def note(self, number: int, failure: Failure) -> None:
        """Lets people know why a room, or a grant for it, failed."""
        self._effects.append(Noted(f"room {number:016x}", failure))

    def check(self) -> None:
        """Holds the invariants. Raises AssertionError."""
        claimed = {room for rooms in self._claims.values() for room in rooms.values()}
        for room in self._rooms.values():
            assert room.state is not RoomState.CONCLUDED
            assert (room.state is RoomState.CLAIMED) == (room in claimed)
