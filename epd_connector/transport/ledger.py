# SPDX-License-Identifier: Apache-2.0
"""The life of write handles, shared by all transports: opened, ended once, reported once.

Owns handle numbers, terminal states, the count of bytes moved and the waker. Does not own
how a write is carried out.
"""

import threading
from collections.abc import Callable

from epd_connector.transport.base import Completion, WriteState


class WriteLedger:
    """Thread-safe. `finish` may be called from any thread, the rest from the loop thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._pending: dict[int, int] = {}
        self._ended: list[Completion] = []
        self._last_handle = 0
        self._bytes_written = 0
        self._wake: Callable[[], None] | None = None

    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called after every `finish`, from the thread that called it."""
        with self._condition:
            self._wake = wake

    def open(self, nbytes: int) -> int:
        """A new pending write of `nbytes` bytes; returns its handle."""
        with self._condition:
            self._last_handle += 1
            self._pending[self._last_handle] = nbytes
            return self._last_handle

    def finish(self, handle: int, failure: str | None = None) -> None:
        """End a pending write: DONE, or FAILED with the reason `failure`.

        Raises ValueError for a handle that is not pending: a write must not end twice.
        """
        with self._condition:
            if handle not in self._pending:
                raise ValueError(f"write {handle} is not pending")
            nbytes = self._pending.pop(handle)
            if failure is None:
                self._bytes_written += nbytes
                completion = Completion(handle, WriteState.DONE, "")
            else:
                completion = Completion(handle, WriteState.FAILED, failure)
            self._ended.append(completion)
            wake = self._wake
            self._condition.notify_all()
        if wake is not None:
            wake()

    def drain(self) -> list[Completion]:
        """Completions since the last call, in the order of their ends."""
        with self._condition:
            ended, self._ended = self._ended, []
            return ended

    def pending(self) -> int:
        """Writes that have not ended."""
        with self._condition:
            return len(self._pending)

    def in_flight(self) -> int:
        """Writes that `drain` has not reported."""
        with self._condition:
            return len(self._pending) + len(self._ended)

    def bytes_written(self) -> int:
        with self._condition:
            return self._bytes_written
