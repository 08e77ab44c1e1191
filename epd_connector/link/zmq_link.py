# SPDX-License-Identifier: Apache-2.0
"""The link over ZeroMQ: one ROUTER per listener, one DEALER per peer that was connected to.

Owns the sockets, the wait over all of them and the ids of peers. Does not own socket options
(``sockets``), frames, heartbeats or retries.

What ZeroMQ does with large frames: one over ``max_frame_bytes`` is dropped and counted, and its
connection lives. One of more than twice that makes libzmq cut the connection before it takes the
bytes in; what was on its way over that connection is lost, the sender dials again by itself, and
other peers see nothing of it.
"""

import contextlib
import dataclasses
import enum
import itertools
import logging
import math
import os
import threading
import time

import zmq

from epd_connector.errors import LinkError
from epd_connector.link.base import PeerId
from epd_connector.link.monitor import Monitor
from epd_connector.link.peers import IncomingPeers
from epd_connector.link.sockets import (
    IO_THREADS,
    Limits,
    link_error,
    new_identity,
    open_dialer,
    open_listener,
    socket_files,
)
from epd_connector.link.waker import Waker

BATCH = 256
"""Messages that one wait() reads at most."""

_LONGEST_POLL_MS = 3_600_000
_SHORTEST_POLL_S = 0.001
_CLOSE_WAIT_S = 1.0
_SOCKETS_SPARE = 1024
# The one that dials and the two ends on which libzmq reports of its connection; as many again
# while those of a peer that was disconnected are still being closed, in the background.
_SOCKETS_PER_PEER = 6

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Dialed:
    """A peer that this side connected to."""

    endpoint: str
    identity: bytes
    socket: "zmq.Socket[bytes]"
    monitor: Monitor
    quiet_since: float
    unanswered: int = 0  # frames accepted since quiet_since


class _Sent(enum.Enum):
    """What became of a frame."""

    QUEUED = "queued"
    FULL = "full"
    GONE = "gone"


class ZmqLink:
    """A :class:`~epd_connector.link.base.Link` over tcp and ipc. One owner thread but for wake().

    ``max_frame_bytes``: largest frame sent or received. ``send_queue``: frames that wait for one
    peer, in each direction. ``max_peers``: incoming peers remembered, and peers connected to.
    ``deaf_after_s``: seconds without a frame from a peer after which a socket that takes nothing
    for it may be taken for dead.
    """

    def __init__(
        self,
        max_frame_bytes: int = 1 << 20,
        send_queue: int = 4096,
        max_peers: int = 4096,
        deaf_after_s: float = 1.0,
    ) -> None:
        self._deaf_after_s = deaf_after_s
        self._limits = Limits(max_frame_bytes, send_queue)
        self._max_peers = max_peers
        self._dropped = 0
        self._closed = False
        self._turn = 0
        self._ids = itertools.count(1)
        self._waker: Waker | None = Waker()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(IO_THREADS)
        self._context.set(zmq.MAX_SOCKETS, _SOCKETS_PER_PEER * max_peers + _SOCKETS_SPARE)
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._waker_fd = self._waker.fd
        self._files: list[str] = []
        # A table per listener: strangers at one cannot push out the own ranks at another.
        self._listeners: dict[zmq.Socket[bytes], IncomingPeers[bytes]] = {}
        self._dialed: dict[PeerId, _Dialed] = {}
        self._by_endpoint: dict[str, PeerId] = {}
        self._by_socket: dict[zmq.Socket[bytes], PeerId] = {}
        self._by_monitor: dict[zmq.Socket[bytes], PeerId] = {}
        self._broken: dict[PeerId, None] = {}

    @property
    def dropped(self) -> int:
        """Incoming frames dropped for their size or for being of several parts."""
        return self._dropped

    def listen(self, endpoint: str) -> str:
        """See :meth:`Link.listen`. ipc listeners accept processes of the same user only.

        A host name is looked up here, once, and that may block.
        """
        self._must_be_open(endpoint)
        listener, bound = open_listener(self._context, endpoint, self._limits)
        self._listeners[listener] = IncomingPeers(self._max_peers, self._new_id)
        self._files += socket_files(bound)
        self._poller.register(listener, zmq.POLLIN)
        return bound

    def connect(self, endpoint: str) -> PeerId:
        """See :meth:`Link.connect`. A host name is looked up in the background, at every attempt;
        its IPv4 address is taken, so a host that has none is named by its address."""
        self._must_be_open(endpoint)
        known = self._by_endpoint.get(endpoint)
        if known is not None:
            return known
        if len(self._dialed) >= self._max_peers:
            raise LinkError(
                f"cannot connect to {endpoint!r}: {self._max_peers} peers are connected, which is "
                "the limit; disconnect those that are gone"
            )
        identity = new_identity()
        dialer, monitor = self._dial(endpoint, identity)
        peer = self._new_id()
        self._dialed[peer] = _Dialed(endpoint, identity, dialer, monitor, time.monotonic())
        self._by_endpoint[endpoint] = peer
        self._watch(peer, self._dialed[peer])
        return peer

    def disconnect(self, peer: PeerId) -> None:
        """See :meth:`Link.disconnect`."""
        for table in self._listeners.values():
            table.forget(peer)
        dialed = self._dialed.pop(peer, None)
        if dialed is not None:
            del self._by_endpoint[dialed.endpoint]
            self._broken.pop(peer, None)
            self._unwatch(dialed)

    def send(self, peer: PeerId, payload: bytes) -> bool:
        """See :meth:`Link.send`. An incoming peer that is gone keeps its id, and can be reached
        by it again once it has dialed again, as long as the table remembers it."""
        if len(payload) > self._limits.max_frame_bytes:
            return False
        dialed = self._dialed.get(peer)
        if dialed is not None:
            return self._send_dialed(peer, dialed, payload)
        for listener, table in self._listeners.items():
            identity = table.key(peer)
            if identity is None:
                continue
            sent = _try_send(listener, [identity, payload])
            table.found(peer, gone=sent is _Sent.GONE)
            return sent is _Sent.QUEUED
        return False

    def connected(self, peer: PeerId) -> bool:
        """See :meth:`Link.connected`. As of the last :meth:`wait`."""
        dialed = self._dialed.get(peer)
        return dialed is not None and dialed.monitor.up

    def take_broken(self) -> list[PeerId]:
        """See :meth:`Link.take_broken`."""
        broken, self._broken = list(self._broken), {}
        return broken

    def gone(self, peer: PeerId) -> bool:
        """See :meth:`Link.gone`."""
        return any(table.is_gone(peer) for table in self._listeners.values())

    def wait(self, timeout_s: float | None) -> list[tuple[PeerId, bytes]]:
        """See :meth:`Link.wait`. The deadline is kept to well under a millisecond; in the last
        millisecond before it a frame or a wake is seen at the deadline only."""
        if self._closed:
            return []
        ready = self._poll(math.inf if timeout_s is None else timeout_s)
        frames: list[tuple[PeerId, bytes]] = []
        budget = BATCH
        # A rotating start: with more sockets ready than the budget, none is always last.
        start = self._turn % len(ready) if ready else 0
        self._turn += 1
        ready = ready[start:] + ready[:start]
        while ready and budget > 0:
            turn, ready = ready[:budget], ready[budget:]
            budget -= len(turn)
            ready += [source for source in turn if self._read(source, frames)]
        return frames

    def wake(self) -> None:
        """See :meth:`Link.wake`."""
        waker = self._waker
        if waker is not None:
            waker.set()

    def close(self) -> None:
        """See :meth:`Link.close`. Takes at most about a second."""
        if self._closed:
            return
        self._closed = True
        self._poller = zmq.Poller()
        self._waker = None
        # libzmq leaves them behind. Before closing: afterwards another process may own the path.
        for path in self._files:
            with contextlib.suppress(OSError):
                os.unlink(path)
        for dialed in self._dialed.values():
            dialed.monitor.close()
        for opened in [*self._listeners, *self._by_socket]:
            opened.close(linger=0)
        for table in (self._dialed, self._by_endpoint, self._by_socket, self._by_monitor):
            table.clear()
        self._listeners.clear()
        self._broken.clear()
        # Terminating joins the I/O threads, and one of them may be stuck in a name look-up.
        term = threading.Thread(target=self._context.term, name="epd-link-close", daemon=True)
        term.start()
        term.join(_CLOSE_WAIT_S)
        if term.is_alive():
            _log.warning("link: a name look-up still runs; its thread is left to end by itself")

    def _new_id(self) -> PeerId:
        return PeerId(next(self._ids))

    def _must_be_open(self, endpoint: str) -> None:
        if self._closed:
            raise LinkError(f"cannot use {endpoint!r}: this link is closed")

    def _dial(self, endpoint: str, identity: bytes) -> tuple["zmq.Socket[bytes]", Monitor]:
        dialer = open_dialer(self._context, endpoint, identity, self._limits)
        monitor: Monitor | None = None
        try:
            monitor = Monitor(dialer)
            dialer.connect(endpoint)
        except zmq.ZMQError as error:
            if monitor is not None:
                monitor.close()
            dialer.close(linger=0)
            raise link_error("connect", endpoint, error) from error
        return dialer, monitor

    def _watch(self, peer: PeerId, dialed: _Dialed) -> None:
        self._by_socket[dialed.socket] = peer
        self._by_monitor[dialed.monitor.socket] = peer
        for source in (dialed.socket, dialed.monitor.socket):
            self._poller.register(source, zmq.POLLIN)

    def _unwatch(self, dialed: _Dialed) -> None:
        del self._by_socket[dialed.socket], self._by_monitor[dialed.monitor.socket]
        for source in (dialed.socket, dialed.monitor.socket):
            self._poller.unregister(source)
        dialed.monitor.close()
        dialed.socket.close(linger=0)

    def _send_dialed(self, peer: PeerId, dialed: _Dialed, payload: bytes) -> bool:
        sent = _Sent.GONE if dialed.monitor.given_up else _try_send(dialed.socket, [payload])
        if sent is not _Sent.QUEUED and self._revived(peer, dialed):
            sent = _try_send(dialed.socket, [payload])
        if sent is not _Sent.QUEUED:
            return False
        dialed.unanswered += 1
        return True

    def _revived(self, peer: PeerId, dialed: _Dialed) -> bool:
        """Dial anew if this socket is dead rather than full.

        libzmq never dials again after a peer broke the protocol (another kind of socket at that
        port, a frame far too large): such a socket takes no frame any more, for ever, or its
        monitor says so. A full queue looks the same from outside, but holds at least half of
        ``send_queue`` frames.
        """
        now = time.monotonic()
        full = not dialed.monitor.given_up and dialed.unanswered >= max(
            1, self._limits.send_queue // 2
        )
        if full or now - dialed.quiet_since < self._deaf_after_s:
            return False
        try:
            dialer, monitor = self._dial(dialed.endpoint, dialed.identity)
        except LinkError as error:
            _log.warning("link: cannot dial anew: %s", error)
            dialed.quiet_since = now
            return False
        if dialed.monitor.read() or dialed.monitor.up:
            # Its monitor goes before any wait has read it.
            self._broken[peer] = None
            self.wake()
        self._unwatch(dialed)
        dialed.socket, dialed.monitor = dialer, monitor
        dialed.quiet_since, dialed.unanswered = now, 0
        self._watch(peer, dialed)
        return True

    def _poll(self, timeout_s: float) -> list["zmq.Socket[bytes]"]:
        """Sockets with something to read; empty on a wake or at the deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            # poll() knows whole milliseconds: rounded up it would be late, rounded down a spin.
            longest_ms = min(left_s * 1000, _LONGEST_POLL_MS)
            ready = self._look(max(0, int(longest_ms)))
            if ready is not None:
                return ready
            if left_s < _SHORTEST_POLL_S:
                time.sleep(max(0.0, deadline - time.monotonic()))
                return self._look(0) or []

    def _look(self, timeout_ms: int) -> list["zmq.Socket[bytes]"] | None:
        events = self._poller.poll(timeout_ms)
        if not events:
            return None
        ready: list[zmq.Socket[bytes]] = []
        for source, _ in events:
            if source in self._by_monitor:
                self._hear_of(self._by_monitor[source])
            elif isinstance(source, zmq.Socket):
                ready.append(source)
            elif self._waker is not None:
                self._waker.clear()
        return ready

    def _hear_of(self, peer: PeerId) -> None:
        if self._dialed[peer].monitor.read():
            self._broken[peer] = None

    def _read(self, source: "zmq.Socket[bytes]", frames: list[tuple[PeerId, bytes]]) -> bool:
        """Take one message of ``source``; False if it has none."""
        routed = source in self._listeners
        try:
            identity = source.recv(zmq.NOBLOCK) if routed else b""
            payload = source.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        several = source.getsockopt(zmq.RCVMORE)
        while source.getsockopt(zmq.RCVMORE):
            source.recv(zmq.NOBLOCK)
        if several or len(payload) > self._limits.max_frame_bytes:
            self._dropped += 1
            return True
        peer = self._listeners[source].heard(identity) if routed else self._answered(source)
        frames.append((peer, payload))
        return True

    def _answered(self, dialer: "zmq.Socket[bytes]") -> PeerId:
        peer = self._by_socket[dialer]
        dialed = self._dialed[peer]
        dialed.quiet_since = time.monotonic()
        dialed.unanswered = 0
        return peer


def _try_send(target: "zmq.Socket[bytes]", parts: list[bytes]) -> _Sent:
    try:
        target.send_multipart(parts, zmq.NOBLOCK)
    except zmq.Again:
        return _Sent.FULL
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return _Sent.GONE
    return _Sent.QUEUED
