# SPDX-License-Identifier: Apache-2.0
"""Which peers of a transfer engine answered when they were asked.

Owns what is known of each. Does not own the engine, or when a peer is asked.
"""

import threading
import time
from typing import Protocol

MAX_CONTACTS = 4096


class Prober(Protocol):
    """What is used of a transfer engine."""

    def send_probe(self, target: str, /) -> int: ...


class Contacts:
    """Which peers answered. Thread-safe.

    The engine opens a peer under a lock that every submission needs, and waits there for a
    minute for a peer that is up but silent. A probe beforehand waits outside that lock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered: set[str] = set()
        self._silent_at: dict[str, float] = {}

    def reach(self, engine: Prober, target: str, queued_at: float) -> bool:
        """Whether `target` answers. Blocks while it is asked; what was queued before it last
        failed to answer (monotonic seconds) is not worth asking again."""
        with self._lock:
            if target in self._answered:
                return True
            if queued_at <= self._silent_at.get(target, float("-inf")):
                return False
        answers = engine.send_probe(target) == 0
        with self._lock:
            if len(self._answered) + len(self._silent_at) >= MAX_CONTACTS:
                self._answered.clear()
                self._silent_at.clear()
            if answers:
                self._answered.add(target)
            else:
                self._silent_at[target] = time.monotonic()
        return answers

    def known(self, target: str) -> bool:
        """Whether `target` has answered."""
        with self._lock:
            return target in self._answered

    def forget(self, target: str) -> None:
        with self._lock:
            self._answered.discard(target)
            self._silent_at.pop(target, None)
