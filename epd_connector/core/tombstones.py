# SPDX-License-Identifier: Apache-2.0
"""How things ended, remembered for a while and in a bounded number. Pure."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Tombstones(Generic[K, V]):
    """Keeps at most ``limit`` entries, each for ``keep_s`` seconds; the oldest go first."""

    def __init__(self, limit: int, keep_s: float) -> None:
        self._limit = limit
        self._keep_s = keep_s
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def bury(self, key: K, value: V, now: float) -> None:
        """Remembers that ``key`` ended as ``value``."""
        self._entries[key] = (now + self._keep_s, value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def find(self, key: K) -> V | None:
        """How ``key`` ended, if that is remembered."""
        entry = self._entries.get(key)
        return None if entry is None else entry[1]

    def current(self, key: K, now: float) -> V | None:
        """How ``key`` ended, unless that is ``keep_s`` ago. Changes nothing."""
        entry = self._entries.get(key)
        return None if entry is None or entry[0] <= now else entry[1]

    def remove(self, key: K) -> None:
        """Forgets ``key``, if it is remembered."""
        self._entries.pop(key, None)

    def forget(self, now: float) -> None:
        """Drops what is older than ``keep_s``."""
        while self._entries:
            key, (until, _) = next(iter(self._entries.items()))
            if until > now:
                return
            del self._entries[key]
