# SPDX-License-Identifier: Apache-2.0
"""Writes between processes of one host: a copy into the peer's shared-memory segment.

Owns the mappings of peers' segments and the threads that copy. Does not create segments
(`memory.segment`) and does not reach beyond this host and user.
"""

import ctypes
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from epd_connector.errors import TransportError
from epd_connector.memory.segment import SHARED_DIRECTORY, Segment
from epd_connector.transport.base import (
    Completion,
    SlabBuffer,
    Span,
    TransportOptions,
    span_error,
)
from epd_connector.transport.ledger import WriteLedger
from epd_connector.transport.workers import Job, Workers

_SESSION = re.compile(r"(?P<name>[^/]{1,100})/(?P<nbytes>[1-9]\d{0,17})/(?P<host>[^/]{1,100})")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_PEERS = 256
_MAX_BACKLOG = 65536
_PIECE_NBYTES = 1 << 20
_CLOSE_WAIT_S = 3.0


class ShmTransport:
    """Copies with `write_threads` threads, without the GIL; large spans in several pieces, since
    one core does not fill the memory's bandwidth."""

    name = "shm"
    poll_interval_s: float | None = None
    reads_anywhere = True

    def __init__(self, options: TransportOptions) -> None:
        """Raises TransportError where this host has no shared memory."""
        reason = self.probe()
        if reason is not None:
            raise TransportError(reason)
        self._host_key = _host_key()
        self._source: SlabBuffer | None = None
        self._session: str | None = None
        self._ledger = WriteLedger()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._threads = options.write_threads
        self._workers = Workers("epd-shm", threads=options.write_threads, backlog=_MAX_BACKLOG)
        self._quiet = False

    @classmethod
    def probe(cls) -> str | None:
        """None where shared memory can be used, else the reason and the remedy."""
        if not os.access(SHARED_DIRECTORY, os.W_OK | os.X_OK):
            return f"{SHARED_DIRECTORY} is not writable; mount a tmpfs there, or use mooncake"
        if not _BOOT_ID.exists():
            return f"{_BOOT_ID} is missing, so this host cannot be told from others; use mooncake"
        return None

    def register_source(self, buffer: SlabBuffer) -> None:
        if self._source is not None:
            raise TransportError("shm: a source slab is registered already")
        self._source = buffer

    def register_destination(self, buffer: SlabBuffer) -> str:
        if self._session is not None:
            raise TransportError("shm: a destination slab is registered already")
        if buffer.path is None:
            raise TransportError(
                "shm: the receive slab is private memory, which no peer can map; create it shared"
            )
        self._session = f"{Path(buffer.path).name}/{buffer.nbytes}/{self._host_key}"
        return self._session

    def advert(self) -> str:
        return self._host_key

    def reaches(self, advert: str) -> bool:
        return advert == self._host_key

    def write(self, session: str, spans: Sequence[Span], source: SlabBuffer | None = None) -> int:
        handle = self._ledger.open(sum(span.nbytes for span in spans))
        failure = self._start(handle, session, tuple(spans), source or self._source)
        if failure is not None:
            self._ledger.finish(handle, failure)
        return handle

    def poll(self) -> list[Completion]:
        return self._ledger.drain()

    def in_flight(self) -> int:
        return self._ledger.in_flight()

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._ledger.set_waker(wake)

    def forget(self, session: str) -> None:
        peer = self._peers.pop(session, None)
        if peer is not None:
            peer.retire()

    def fence_s(self) -> float:
        # The copy is done by the writer's own threads: they end with it.
        return 0.0

    def bytes_written(self) -> int:
        return self._ledger.bytes_written()

    def close(self) -> None:
        self._quiet = self._workers.close(_CLOSE_WAIT_S)
        for session in list(self._peers):
            self.forget(session)

    def quiet(self) -> bool:
        return self._quiet

    def _start(
        self, handle: int, session: str, spans: tuple[Span, ...], source: SlabBuffer | None
    ) -> str | None:
        """Queue the copy, or say why not."""
        if source is None:
            return "shm: no source slab is registered"
        match = _SESSION.fullmatch(session)
        if match is None:
            return f"shm: {session[:200]!r} is not a session of this transport"
        if match["host"] != self._host_key:
            return f"shm: the peer is on another host ({match['host']}, here {self._host_key})"
        nbytes = int(match["nbytes"])
        outside = span_error(spans, source_nbytes=source.nbytes, destination_nbytes=nbytes)
        if outside is not None:
            return f"shm: {outside}"
        peer = self._peer(session, str(SHARED_DIRECTORY / match["name"]), nbytes)
        pieces = _pieces(spans, self._threads)
        copy = _Copy(len(pieces), partial(self._ledger.finish, handle))
        for number, piece in enumerate(pieces):
            job = Job(
                run=partial(self._copy, copy, peer, source, piece),
                abandon=partial(copy.ended, "shm: the transport was closed"),
            )
            # A lane of its own for each piece: all of them may be copied side by side.
            if not self._workers.submit((handle, number), job):
                copy.ended(f"shm: closed, or {_MAX_BACKLOG} copies are waiting already")
        return None

    def _peer(self, session: str, path: str, nbytes: int) -> "_Peer":
        peer = self._peers.get(session)
        if peer is None:
            peer = self._peers[session] = _Peer(path, nbytes)
        self._peers.move_to_end(session)
        if len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)[1].retire()
        return peer

    def _copy(
        self, copy: "_Copy", peer: "_Peer", source: SlabBuffer, spans: tuple[Span, ...]
    ) -> None:
        try:
            destination = peer.acquire()
        except TransportError as error:
            copy.ended(f"shm: {error}")
            return
        for span in spans:
            start = source.address + span.source
            ctypes.memmove(destination + span.destination, start, span.nbytes)
        peer.release()
        copy.ended()


class _Copy:
    """One write in pieces: it has ended when all of them have. Thread-safe."""

    def __init__(self, pieces: int, finish: Callable[[str | None], None]) -> None:
        self._lock = threading.Lock()
        self._left = pieces
        self._failure: str | None = None
        self._finish = finish

    def ended(self, failure: str | None = None) -> None:
        """One piece has, well or not."""
        with self._lock:
            self._left -= 1
            self._failure = self._failure or failure
            last = self._left == 0
        if last:
            self._finish(self._failure)


def _pieces(spans: tuple[Span, ...], threads: int) -> list[tuple[Span, ...]]:
    """What `threads` threads are given: a large span in as many pieces, the rest as it is."""
    nbytes = sum(span.nbytes for span in spans)
    size = max(_PIECE_NBYTES, -(-nbytes // threads))
    if len(spans) > 1 or nbytes <= size:
        return [spans]
    (span,) = spans
    return [
        (Span(span.source + at, span.destination + at, min(size, nbytes - at)),)
        for at in range(0, nbytes, size)
    ]


class _Peer:
    """A peer's segment, mapped at its first use and unmapped after its last.

    The first use is on a copying thread, since mapping a large segment takes its time.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        self._path = path
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._users = 0
        self._retired = False

    def acquire(self) -> int:
        """The segment's address, valid until `release`. Raises TransportError."""
        with self._lock:
            if self._segment is None:
                self._segment = Segment.attach(self._path, self._nbytes)
            self._users += 1
            return self._segment.address

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            self._close_if_unused()

    def retire(self) -> None:
        """No new write will use it: unmap when the running copies have ended."""
        with self._lock:
            self._retired = True
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and self._users == 0 and self._segment is not None:
            self._segment.close()
            self._segment = None


def _host_key() -> str:
    """Equal in two processes exactly where they see one /dev/shm as one user."""
    boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    return f"{boot_id}.{os.stat(SHARED_DIRECTORY).st_dev}.{os.geteuid()}"
