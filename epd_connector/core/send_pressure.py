# SPDX-License-Identifier: Apache-2.0
"""Whether the encode rank's head is to hold requests back, because rows wait for the send slab.

Owns that one state and the words to the head about it. A full slab is said again and again,
since a head that hears no more of it goes on. Rooms that are granted are named: peers hold
memory for them, so their rows must come however full it is. A part of ``send.EncodeRank``.
"""

from collections.abc import Iterable

from epd_connector.core.effects import Effect, TellHead
from epd_connector.core.send_state import RoomState, SendRoom
from epd_connector.identity_enum import IdentityEnum
from epd_connector.protocol.frames import MAX_ROOMS_NAMED, SlabFree, SlabFull
from epd_connector.stats import Counters

REPEAT_S = 0.5
"""Seconds after which a slab that is still full is said to be."""


class Pressure(IdentityEnum):
    """How many rows wait for the slab."""

    LOW = "low"
    HIGH = "high"


class PressureDesk:
    """The pressure on a slab of ``slab_nbytes`` bytes, as its head knows it."""

    def __init__(self, slab_nbytes: int, counters: Counters, effects: list[Effect]) -> None:
        self.state = Pressure.LOW
        self._high = slab_nbytes // 2
        self._low = slab_nbytes // 4
        self._counters = counters
        self._effects = effects
        self._repeat_at = 0.0

    def next_deadline(self) -> float | None:
        """When the head is to be told again, or None."""
        return self._repeat_at if self.state is Pressure.HIGH else None

    def weigh(self, waiting_nbytes: int, rooms: Iterable[SendRoom], now: float) -> None:
        """``waiting_nbytes`` bytes wait for the slab at monotonic time ``now``. ``rooms`` are
        looked at only where there is something to say."""
        if self.state is Pressure.LOW:
            if waiting_nbytes > self._high:
                self.state = Pressure.HIGH
                self._counters.add("slabs_filled")
                self._say(rooms, now)
        elif waiting_nbytes <= self._low:
            self.state = Pressure.LOW
            self._effects.append(TellHead(SlabFree()))
        elif now >= self._repeat_at:
            self._say(rooms, now)

    def granted(self, room: SendRoom) -> None:
        """A peer has set memory aside for ``room``."""
        if self.state is Pressure.HIGH and _lacks_rows(room):
            self._effects.append(TellHead(SlabFull((room.room,))))

    def _say(self, rooms: Iterable[SendRoom], now: float) -> None:
        self._repeat_at = now + REPEAT_S
        granted = [room.room for room in rooms if room.grants and _lacks_rows(room)]
        self._effects.append(TellHead(SlabFull(tuple(granted[:MAX_ROOMS_NAMED]))))


def _lacks_rows(room: SendRoom) -> bool:
    return room.state in (RoomState.ASKED, RoomState.CLAIMED)
