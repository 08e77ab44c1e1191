# SPDX-License-Identifier: Apache-2.0
"""The transport contract: one-sided writes from a registered slab into a peer's slab.

Owns the words of the contract (span, session, handle, completion) and the bounds check that
every transport shares. Does not own memory, sockets, retries or deadlines: a write that takes
too long is the caller's business, because only a terminal state ends a write.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable


class SlabBuffer(Protocol):
    """Memory that a transport can register, or read: `nbytes` bytes from `address`.

    `path` names the shared-memory file behind it, or is None where no other process can map it.
    """

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def path(self) -> str | None: ...


class Span(NamedTuple):
    """One contiguous copy, in bytes: `source` counts from the start of the registered source
    slab, `destination` from the start of the peer's slab."""

    source: int
    destination: int
    nbytes: int


class WriteState(enum.Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Completion(NamedTuple):
    """The end of one write. `state` is DONE or FAILED; `reason` is empty when DONE."""

    handle: int
    state: WriteState
    reason: str


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """What every transport may need to start; each uses what applies to it.

    host: address at which peers reach this process (IPv6 without brackets).
    protocol: "tcp" or "rdma"; device_name: RDMA devices, comma-separated, empty for all.
    write_threads: copies or submissions that run at the same time.
    """

    host: str = "127.0.0.1"
    protocol: str = "tcp"
    device_name: str = ""
    write_threads: int = 4


@runtime_checkable
class Transport(Protocol):
    """Moves bytes. Every method is called from one thread, the rank's loop.

    A handle reaches exactly one terminal state and is reported exactly once, by `poll`. Until
    then the destination belongs to the writer, however long that takes.
    """

    name: str
    reads_anywhere: bool
    """Whether writes can read memory of this process that was not registered."""

    @property
    def poll_interval_s(self) -> float | None:
        """None: terminal writes call the waker. Else: poll this often while writes are in flight.

        It may change whenever the waker is called.
        """
        ...

    def register_source(self, buffer: SlabBuffer) -> None:
        """Make `buffer` the slab that writes read from. Once. Raises TransportError."""

    def register_destination(self, buffer: SlabBuffer) -> str:
        """Make `buffer` the slab that peers write into; returns its session, the string by
        which peers address it. Once. Raises TransportError."""
        ...

    def advert(self) -> str:
        """What this process tells peers, so that they can tell whether they reach it."""
        ...

    def reaches(self, advert: str) -> bool:
        """Whether this process and the one of `advert` can use this transport together.
        False, never an exception, for text that is no advert."""
        ...

    def write(self, session: str, spans: Sequence[Span], source: SlabBuffer | None = None) -> int:
        """Start one write and return its handle (> 0) without blocking.

        It reads the registered source slab, or `source` where `reads_anywhere`: the transport
        keeps the object until nothing reads its memory any more. Sources of spans count from
        the start of whichever it is.

        Never raises for what a peer can cause: a bad session, a span out of bounds or a refused
        submission become a FAILED completion of the handle. A failed write may have moved some
        of its bytes, but moves none after its completion. No spans: DONE, nothing written.
        """
        ...

    def poll(self) -> list[Completion]:
        """Writes that became terminal since the last call. Never blocks."""
        ...

    def in_flight(self) -> int:
        """Writes whose completion `poll` has not returned yet."""
        ...

    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, after a write became terminal (only where
        `poll_interval_s` is None). It must not block."""

    def forget(self, session: str) -> None:
        """The peer is gone: drop what is cached for it. Its writes in flight still complete, and
        a later write to the same session starts afresh."""

    def fence_s(self) -> float:
        """Seconds after which no write of a *dead* writer process can land any more."""
        ...

    def bytes_written(self) -> int:
        """Bytes of all writes that ended DONE."""
        ...

    def close(self) -> None:
        """Stop: writes not yet started fail, those under way are waited for, within a bound.
        Idempotent."""

    def quiet(self) -> bool:
        """Whether nothing this process started can still read its source slab. Only when this is
        True, after `close`, may the slab be unmapped."""
        ...


class TransportClass(Protocol):
    """A transport's class. An entry point of the group `epd_connector.transports` names a function
    without arguments that returns one."""

    def __call__(self, options: TransportOptions) -> Transport:
        """Start the transport in this process. Raises TransportError with the remedy."""
        ...

    def probe(self) -> str | None:
        """None where this process can use the transport, else why not, and the remedy. May load
        the transport's libraries for good."""
        ...


def span_error(spans: Sequence[Span], *, source_nbytes: int, destination_nbytes: int) -> str | None:
    """Why `spans` may not be written, or None where each lies inside both slabs."""
    for span in spans:
        if span.nbytes < 0 or span.source < 0 or span.destination < 0:
            return f"span {tuple(span)} has a negative member"
        if span.source + span.nbytes > source_nbytes:
            return (
                f"span of {span.nbytes} bytes at source offset {span.source} "
                f"leaves the source slab of {source_nbytes} bytes"
            )
        if span.destination + span.nbytes > destination_nbytes:
            return (
                f"span of {span.nbytes} bytes at destination offset {span.destination} "
                f"leaves the peer's slab of {destination_nbytes} bytes"
            )
    return None
