# SPDX-License-Identifier: Apache-2.0
"""A deterministic transport inside one process, for tests of whatever drives a transport.

Owns writes that end only when the test says so, and the registry of sessions that its
transports share. Passes the same contract tests as the real transports.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

from epd_connector.errors import TransportError
from epd_connector.transport.base import (
    Completion,
    SlabBuffer,
    Span,
    span_error,
)
from epd_connector.transport.ledger import WriteLedger


class MemoryFabric:
    """The sessions that its transports can write to. Every test makes its own."""

    def __init__(self, name: str = "fabric") -> None:
        self.name = name
        self._slabs: dict[str, SlabBuffer] = {}
        self._made = 0

    def announce(self, buffer: SlabBuffer) -> str:
        """Make `buffer` reachable; returns its session, never used before."""
        self._made += 1
        session = f"{self.name}/{self._made}/{buffer.nbytes}"
        self._slabs[session] = buffer
        return session

    def remove(self, session: str) -> None:
        """The peer of `session` is gone: writes to it fail from now on. Idempotent."""
        self._slabs.pop(session, None)

    def slab(self, session: str) -> SlabBuffer | None:
        return self._slabs.get(session)


class PendingWrite(NamedTuple):
    handle: int
    session: str
    spans: tuple[Span, ...]
    source: SlabBuffer | None


class MemoryTransport:
    """Bytes appear in the destination when a write is completed, not before.

    auto: writes complete inside `write`. Else the test calls `complete` or `fail`, in any order.
    """

    name = "memory"
    poll_interval_s: float | None = None
    reads_anywhere = True

    def __init__(self, fabric: MemoryFabric, *, auto: bool = True, fence_s: float = 0.0) -> None:
        self.auto = auto
        self.writes_started = 0
        self._fabric = fabric
        self._fence_s = fence_s
        self._source: SlabBuffer | None = None
        self._session: str | None = None
        self._ledger = WriteLedger()
        self._pending: dict[int, PendingWrite] = {}
        self._forgotten: list[str] = []
        self._closed = False

    def pending(self) -> list[PendingWrite]:
        """Writes that wait for `complete` or `fail`, oldest first."""
        return list(self._pending.values())

    def forgotten(self) -> list[str]:
        """Sessions passed to `forget`, in order."""
        return list(self._forgotten)

    def complete(self, handle: int) -> None:
        """Land the bytes of a pending write and end it; FAILED if its peer is gone meanwhile.
        Raises KeyError for a handle that is not pending."""
        write = self._pending.pop(handle)
        destination = self._fabric.slab(write.session)
        if destination is None or write.source is None:
            self._ledger.finish(handle, f"memory: the peer {write.session} is gone")
            return
        for span in write.spans:
            ctypes.memmove(
                destination.address + span.destination,
                write.source.address + span.source,
                span.nbytes,
            )
        self._ledger.finish(handle)

    def fail(self, handle: int, reason: str) -> None:
        """End a pending write as FAILED; nothing of it lands. Raises KeyError."""
        del self._pending[handle]
        self._ledger.finish(handle, reason)

    def register_source(self, buffer: SlabBuffer) -> None:
        if self._source is not None:
            raise TransportError("memory: a source slab is registered already")
        self._source = buffer

    def register_destination(self, buffer: SlabBuffer) -> str:
        if self._session is not None:
            raise TransportError("memory: a destination slab is registered already")
        self._session = self._fabric.announce(buffer)
        return self._session

    def advert(self) -> str:
        return self._fabric.name

    def reaches(self, advert: str) -> bool:
        return advert == self._fabric.name

    def write(self, session: str, spans: Sequence[Span], source: SlabBuffer | None = None) -> int:
        handle = self._ledger.open(sum(span.nbytes for span in spans))
        self.writes_started += 1
        source = source or self._source
        failure = self._refusal(session, spans, source)
        if failure is not None:
            self._ledger.finish(handle, f"memory: {failure}")
            return handle
        self._pending[handle] = PendingWrite(handle, session, tuple(spans), source)
        if self.auto or not spans:
            self.complete(handle)
        return handle

    def poll(self) -> list[Completion]:
        return self._ledger.drain()

    def in_flight(self) -> int:
        return self._ledger.in_flight()

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._ledger.set_waker(wake)

    def forget(self, session: str) -> None:
        self._forgotten.append(session)

    def fence_s(self) -> float:
        return self._fence_s

    def bytes_written(self) -> int:
        return self._ledger.bytes_written()

    def close(self) -> None:
        self._closed = True
        for handle in list(self._pending):
            self.fail(handle, "memory: the transport was closed")
        if self._session is not None:
            self._fabric.remove(self._session)

    def quiet(self) -> bool:
        return self._closed

    def _refusal(
        self, session: str, spans: Sequence[Span], source: SlabBuffer | None
    ) -> str | None:
        if self._closed:
            return "the transport was closed"
        if source is None:
            return "no source slab is registered"
        destination = self._fabric.slab(session)
        if destination is None:
            return f"{session[:200]!r} is not a session of {self._fabric.name}"
        return span_error(spans, source_nbytes=source.nbytes, destination_nbytes=destination.nbytes)
