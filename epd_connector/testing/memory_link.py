# SPDX-License-Identifier: Apache-2.0
"""Links without sockets: one thread, one virtual clock, the same order in every run.

Owns a network of links, what befalls the frames on it, and crashes. Passes the same contract
tests as ``epd_connector.link.zmq_link``. Differs where a single thread must: ``wait`` never
blocks and never moves the clock; it hands out what has arrived by now.
"""

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable

from epd_connector.errors import LinkError
from epd_connector.link.base import PeerId
from epd_connector.link.peers import IncomingPeers
from epd_connector.testing.clock import ManualClock

BATCH = 256
_FIRST_FREE_PORT = 49152


@dataclasses.dataclass(frozen=True, slots=True)
class Fate:
    """What befalls one frame. The default: it arrives, once, at once and in order."""

    copies: int = 1
    """How often it arrives; 0: it is lost."""
    seconds: float = 0.0
    """It and all behind it on the same way arrive that many virtual seconds later."""
    deliveries: int = 0
    """It arrives after that many frames were delivered elsewhere or overtook it."""
    overtakes: bool = False
    """It arrives before all that is under way on the same way."""


DELIVER = Fate()
DROP = Fate(copies=0)
DUPLICATE = Fate(copies=2)
REORDER = Fate(overtakes=True)


def delay(*, seconds: float = 0.0, deliveries: int = 0) -> Fate:
    """Late by virtual seconds (what is behind it waits too), or by deliveries (it is overtaken)."""
    return Fate(seconds=seconds, deliveries=deliveries)


Fault = Callable[[str, str, bytes], Fate]
"""(name of the sender, name of the receiver, payload) -> fate. A link that listens goes by its
endpoint, any other by the name it was made with."""


@dataclasses.dataclass(slots=True)
class _Frame:
    payload: bytes
    due_s: float
    due_delivery: int


class _Way:
    """Frames under way in one direction of one connection."""

    def __init__(self) -> None:
        self.frames: deque[_Frame] = deque()

    def take(self, now_s: float, delivered: int) -> bytes | None:
        for index, frame in enumerate(self.frames):
            if frame.due_s > now_s:
                return None
            if frame.due_delivery <= delivered:
                del self.frames[index]
                return frame.payload
        return None


@dataclasses.dataclass(eq=False, slots=True)
class _Connection:
    """One link's connection to an endpoint; outlives whoever listens there."""

    client: "MemoryLink"
    endpoint: str
    peer: PeerId
    to_server: _Way = dataclasses.field(default_factory=_Way)
    to_client: _Way = dataclasses.field(default_factory=_Way)
    open: bool = True
    up: bool = False


class MemoryNetwork:
    """The world of :class:`MemoryLink`. ``fault`` decides what befalls each frame when sent."""

    def __init__(self, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.fault: Fault = lambda source, destination, payload: DELIVER
        self.delivered = 0
        self._listening: dict[str, MemoryLink] = {}
        self._connections: list[_Connection] = []
        self._ports = itertools.count(_FIRST_FREE_PORT)
        self._names = itertools.count(1)

    def link(
        self,
        name: str = "",
        *,
        max_frame_bytes: int = 1 << 20,
        send_queue: int = 4096,
        max_peers: int = 4096,
    ) -> "MemoryLink":
        """A new link of this network, with the limits of ``ZmqLink``."""
        name = name or f"link-{next(self._names)}"
        return MemoryLink(self, name, max_frame_bytes, send_queue, max_peers)

    def crash(self, endpoint: str) -> None:
        """End whoever listens at ``endpoint``: its link closes, frames to and from it are lost.

        What is sent there from now on is queued for the next one. KeyError if nobody listens.
        """
        self._listening[endpoint].close()

    def restart(self, endpoint: str) -> "MemoryLink":
        """A new link that listens at ``endpoint``, as a process that came back would."""
        link = self.link()
        link.listen(endpoint)
        return link

    def in_flight(self) -> int:
        """Frames that were sent and neither delivered nor lost, delayed ones included."""
        return sum(len(way.frames) for way in self._ways())

    def next_due_s(self) -> float | None:
        """Clock time of the next frame that only waits for the clock; None if there is none."""
        now_s = self.clock.now()
        due = [frame.due_s for way in self._ways() for frame in way.frames]
        return min((due_s for due_s in due if due_s > now_s), default=None)

    def _ways(self) -> list[_Way]:
        return [way for c in self._connections for way in (c.to_server, c.to_client)]

    def _bind(self, endpoint: str, link: "MemoryLink") -> str:
        if endpoint.startswith("tcp://") and endpoint.endswith(":0"):
            endpoint = f"{endpoint[:-1]}{next(self._ports)}"
        if endpoint in self._listening:
            raise LinkError(
                f"cannot listen at {endpoint!r}: it is in use: choose another control_port"
            )
        self._listening[endpoint] = link
        for connection in self._connections:
            if connection.endpoint == endpoint:
                connection.up = True
        return endpoint

    def _put(self, way: _Way, source: str, destination: str, payload: bytes) -> None:
        fate = self.fault(source, destination, payload)
        frame = _Frame(payload, self.clock.now() + fate.seconds, self.delivered + fate.deliveries)
        if fate.seconds == 0.0:
            frame.due_s = -math.inf
        for _ in range(fate.copies):
            if fate.overtakes:
                way.frames.appendleft(frame)
            else:
                way.frames.append(frame)

    def _take(self, way: _Way) -> bytes | None:
        payload = way.take(self.clock.now(), self.delivered)
        if payload is not None:
            self.delivered += 1
        return payload

    def _gone(self, link: "MemoryLink") -> None:
        for endpoint in [e for e, owner in self._listening.items() if owner is link]:
            del self._listening[endpoint]
            for connection in self._connections:
                if connection.endpoint == endpoint:
                    connection.to_server.frames.clear()
                    connection.to_client.frames.clear()
                    connection.up = False
                    connection.client._broken[connection.peer] = None
        for connection in [c for c in self._connections if c.client is link]:
            self._hang_up(connection)

    def _hang_up(self, connection: _Connection) -> None:
        connection.open = False
        self._connections.remove(connection)

    def _toward(self, link: "MemoryLink") -> list[tuple[_Connection, _Way]]:
        found: list[tuple[_Connection, _Way]] = []
        for connection in self._connections:
            if self._listening.get(connection.endpoint) is link:
                found.append((connection, connection.to_server))
            if connection.client is link:
                found.append((connection, connection.to_client))
        return found


class MemoryLink:
    """A :class:`~epd_connector.link.base.Link` of a :class:`MemoryNetwork`. Never blocks."""

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        max_frame_bytes: int,
        send_queue: int,
        max_peers: int,
    ) -> None:
        self.name = name
        self._network = network
        self._max_frame_bytes = max_frame_bytes
        self._send_queue = send_queue
        self._max_peers = max_peers
        self._dropped = 0
        self._closed = False
        self._turn = 0
        self._ids = itertools.count(1)
        self._incoming: dict[str, IncomingPeers[_Connection]] = {}
        self._broken: dict[PeerId, None] = {}
        self._dialed: dict[PeerId, _Connection] = {}

    @property
    def dropped(self) -> int:
        """Incoming frames dropped because they were larger than ``max_frame_bytes``."""
        return self._dropped

    def listen(self, endpoint: str) -> str:
        """See :meth:`Link.listen`. The first endpoint becomes the name of this link."""
        self._check(endpoint)
        first = not any(owner is self for owner in self._network._listening.values())
        bound = self._network._bind(endpoint, self)
        if first:
            self.name = bound
        self._incoming[bound] = IncomingPeers(self._max_peers, self._new_id)
        return bound

    def connect(self, endpoint: str) -> PeerId:
        """See :meth:`Link.connect`."""
        self._check(endpoint)
        for peer, connection in self._dialed.items():
            if connection.endpoint == endpoint:
                return peer
        if len(self._dialed) >= self._max_peers:
            raise LinkError(f"cannot connect to {endpoint!r}: the limit is {self._max_peers} peers")
        peer = self._new_id()
        self._dialed[peer] = _Connection(self, endpoint, peer)
        self._dialed[peer].up = endpoint in self._network._listening
        self._network._connections.append(self._dialed[peer])
        return peer

    def disconnect(self, peer: PeerId) -> None:
        """See :meth:`Link.disconnect`."""
        for table in self._incoming.values():
            table.forget(peer)
        self._broken.pop(peer, None)
        connection = self._dialed.pop(peer, None)
        if connection is not None:
            self._network._hang_up(connection)

    def send(self, peer: PeerId, payload: bytes) -> bool:
        """See :meth:`Link.send`."""
        dialed = self._dialed.get(peer)
        connection = dialed or self._served(peer)
        if connection is None or len(payload) > self._max_frame_bytes:
            return False
        if not connection.open:
            self._incoming[connection.endpoint].found(peer, gone=True)
            return False
        way = connection.to_server if dialed else connection.to_client
        if len(way.frames) >= self._send_queue:
            return False
        destination = connection.endpoint if dialed else connection.client.name
        source = self.name if dialed else connection.endpoint
        self._network._put(way, source, destination, payload)
        return True

    def connected(self, peer: PeerId) -> bool:
        """See :meth:`Link.connected`."""
        connection = self._dialed.get(peer)
        return connection is not None and connection.up

    def take_broken(self) -> list[PeerId]:
        """See :meth:`Link.take_broken`."""
        broken, self._broken = list(self._broken), {}
        return broken

    def gone(self, peer: PeerId) -> bool:
        """See :meth:`Link.gone`."""
        return any(table.is_gone(peer) for table in self._incoming.values())

    def wait(self, timeout_s: float | None) -> list[tuple[PeerId, bytes]]:
        """What has arrived by now, at most a batch; never blocks, whatever ``timeout_s`` is."""
        frames: list[tuple[PeerId, bytes]] = []
        if self._closed:
            return frames
        ready = self._network._toward(self)
        start = self._turn % len(ready) if ready else 0
        self._turn += 1
        ready = ready[start:] + ready[:start]
        budget = BATCH
        while ready and budget > 0:
            turn, ready = ready[:budget], ready[budget:]
            budget -= len(turn)
            ready += [source for source in turn if self._read(*source, frames)]
        return frames

    def wake(self) -> None:
        """See :meth:`Link.wake`. Nothing to do: no wait lasts."""

    def close(self) -> None:
        """See :meth:`Link.close`."""
        if self._closed:
            return
        self._closed = True
        self._network._gone(self)
        self._dialed.clear()
        self._incoming.clear()
        self._broken.clear()

    def _served(self, peer: PeerId) -> _Connection | None:
        """The connection of an incoming peer, if it is known."""
        found = (table.key(peer) for table in self._incoming.values())
        return next((connection for connection in found if connection is not None), None)

    def _new_id(self) -> PeerId:
        return PeerId(next(self._ids))

    def _check(self, endpoint: str) -> None:
        if self._closed:
            raise LinkError(f"cannot use {endpoint!r}: this link is closed")
        if not endpoint.startswith(("tcp://", "ipc://")):
            raise LinkError(f"cannot use {endpoint!r}: it is neither tcp:// nor ipc://")

    def _read(self, connection: _Connection, way: _Way, frames: list[tuple[PeerId, bytes]]) -> bool:
        payload = self._network._take(way)
        if payload is None:
            return False
        if len(payload) > self._max_frame_bytes:
            self._dropped += 1
            return True
        if way is connection.to_server:
            frames.append((self._incoming[connection.endpoint].heard(connection), payload))
        else:
            frames.append((connection.peer, payload))
        return True
