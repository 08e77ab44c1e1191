# SPDX-License-Identifier: Apache-2.0
"""Deadlines of many keys, of which the earliest is known at once. Pure.

A machine sets, moves and clears deadlines by key; ``expired`` hands out those that have
passed. Moving one is cheap: the old entry is left in the heap and ignored later.
"""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """At most one deadline per key, in seconds of the caller's monotonic clock."""

    def __init__(self) -> None:
        self._when: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._when)

    def set(self, key: K, when: float) -> None:
        """Gives ``key`` the deadline ``when`` in place of any earlier one."""
        if self._when.get(key) == when:
            return
        self._when[key] = when
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, key))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._when):
            self._compact()

    def clear(self, key: K) -> None:
        """Forgets the deadline of ``key``, if it has one."""
        self._when.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        while self._heap:
            when, _, key = self._heap[0]
            if self._when.get(key) == when:
                return when
            heapq.heappop(self._heap)
        return None

    def expired(self, now: float) -> list[K]:
        """Keys whose deadline is not after ``now``; each is forgotten."""
        keys = []
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[2]
            del self._when[key]
            keys.append(key)
        return keys

    def _compact(self) -> None:
        live = [entry for entry in self._heap if self._when.get(entry[2]) == entry[0]]
        heapq.heapify(live)
        self._heap = live
