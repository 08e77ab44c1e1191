# SPDX-License-Identifier: Apache-2.0
"""Skips that a prefill head has said and that were not answered yet. Pure.

Owns which rooms each encode engine is to be told of, and when it is told again: a skip that is
lost leaves rows in a send slab until ``offer_timeout_s``. Does not own the sending.

After ``TRIES`` a skip is given up: the encode engine's own deadline ends the room.
"""

from epd_connector.core.deadlines import Deadlines
from epd_connector.protocol.frames import SkipRooms

TRIES = 4
FIRST_RETRY_S = 1.0
"""Seconds until a skip is repeated for the first time; then twice as long, each time."""
MAX_PER_FRAME = 4096


class Skips:
    """Rooms by encode address; at most ``limit`` in all are remembered."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._fresh: dict[str, list[int]] = {}
        self._tries: dict[tuple[str, int], int] = {}
        self._deaf: set[str] = set()
        self._retries: Deadlines[tuple[str, int]] = Deadlines()

    def __len__(self) -> int:
        return len(self._tries)

    def add(self, address: str, room: int) -> None:
        """The engine at ``address`` is to be told that ``room`` is not needed."""
        self._fresh.setdefault(address, []).append(room)

    def heard(self, address: str, rooms: tuple[int, ...]) -> None:
        """The engine at ``address`` has answered for ``rooms``."""
        for room in rooms:
            self._forget((address, room))

    def give_up(self, address: str) -> None:
        """Nobody is at ``address``."""
        for key in [key for key in self._tries if key[0] == address]:
            self._forget(key)

    def take(self, now: float) -> list[tuple[str, SkipRooms]]:
        """What is to be said now: new skips, and those that are due again."""
        if not self._fresh and not self._tries:
            return []
        for address, room in self._retries.expired(now):
            if self._tries[address, room] < TRIES:
                self._fresh.setdefault(address, []).append(room)
            else:
                self._forget((address, room))
                self._deaf.add(address)
        fresh, self._fresh = self._fresh, {}
        said = []
        for address, rooms in fresh.items():
            for room in rooms:
                self._note(address, room, now)
            for first in range(0, len(rooms), MAX_PER_FRAME):
                said.append((address, SkipRooms(tuple(rooms[first : first + MAX_PER_FRAME]))))
        return said

    def take_deaf(self) -> set[str]:
        """Addresses that did not answer for a skip, since the last call."""
        deaf, self._deaf = self._deaf, set()
        return deaf

    def next_deadline(self) -> float | None:
        """When a skip is due again, or None."""
        return self._retries.next()

    def _note(self, address: str, room: int, now: float) -> None:
        key = (address, room)
        if key not in self._tries and len(self._tries) >= self._limit:
            return
        tries = self._tries[key] = self._tries.get(key, 0) + 1
        self._retries.set(key, now + FIRST_RETRY_S * 2 ** (tries - 1))

    def _forget(self, key: tuple[str, int]) -> None:
        self._tries.pop(key, None)
        self._retries.clear(key)
