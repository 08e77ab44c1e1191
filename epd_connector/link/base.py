# SPDX-License-Identifier: Apache-2.0
"""What a link is, and how addresses are written. Pure: names no socket library.

Owns the ``Link`` contract and the one parser and printer of ``host:port`` addresses.
Does not own sockets (``zmq_link``), nor what the frames mean (``epd_connector.protocol``).
"""

import ipaddress
import re
from typing import NewType, Protocol

from epd_connector.errors import RequestError

PeerId = NewType("PeerId", int)

MAX_ADDRESS_CHARS = 300
"""Longest address accepted: a DNS name is at most 253 characters."""

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_DIGITS_AND_DOTS = re.compile(r"[0-9.]+")
_ZONE = re.compile(r"[A-Za-z0-9_.-]*")
_PORT = re.compile(r"[0-9]{1,5}")
_REMEDY = 'write "host:port", or "[address]:port" for IPv6, with a port from 1 to 65535'


class Link(Protocol):
    """Frames to and from peers, at most once each, in order per peer while it stays connected.

    A frame that was accepted may still be lost with its peer: retries belong to the machines
    above, and so does what a silence means. A link only tells what it sees of connections.

    A peer that connected to a listener gets its id with its first frame; a reply goes to that
    id. Each listener's table of such peers is bounded: the one that was idle longest is
    forgotten, and is a new peer when it sends again.

    Every method belongs to one thread, the owner's, except :meth:`wake`.
    """

    @property
    def dropped(self) -> int:
        """Incoming frames dropped because they were larger than ``max_frame_bytes``, or came as
        a message of more than one part, which no link sends."""
        ...

    def listen(self, endpoint: str) -> str:
        """Accept peers at ``tcp://host:port`` (port 0: any free one) or ``ipc://path``
        (``ipc://@name`` leaves no file behind); returns the endpoint with its real port.

        Raises :class:`~epd_connector.errors.LinkError` naming the endpoint and the remedy if it
        cannot be bound.
        """
        ...

    def connect(self, endpoint: str) -> PeerId:
        """Name the peer at ``endpoint``. Never blocks: the peer may come up later, or come back.

        The same endpoint gives the same id until it is disconnected.
        Raises :class:`~epd_connector.errors.LinkError` on a malformed endpoint, or when too many
        peers are connected.
        """
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Forget ``peer`` and what is queued for it. An unknown peer is ignored.

        An incoming peer that sends again afterwards is a new peer with a new id.
        """
        ...

    def send(self, peer: PeerId, payload: bytes) -> bool:
        """Queue one frame; never blocks. False: the queue is full, the frame is larger than
        ``max_frame_bytes``, or the peer is unknown, disconnected or known to be gone."""
        ...

    def connected(self, peer: PeerId) -> bool:
        """Whether the connection to a peer that this side dialed is up, as far as is known.
        False for any other peer."""
        ...

    def take_broken(self) -> list[PeerId]:
        """Dialed peers whose established connection broke since the last call, each once.

        A connection that breaks ends the current or the next :meth:`wait`. The link goes on
        dialing; what :meth:`disconnect` ends is not broken.
        """
        ...

    def gone(self, peer: PeerId) -> bool:
        """Whether the last :meth:`send` to an incoming peer found its connection gone, and it has
        not been heard since. False for any other peer."""
        ...

    def wait(self, timeout_s: float | None) -> list[tuple[PeerId, bytes]]:
        """Block until a frame, a :meth:`wake` or ``timeout_s`` (None: for ever; 0: only look).

        Returns a bounded batch, taken fairly over the peers; empty on time-out, and possibly
        empty on a wake or for no reason at all. What does not fit stays for the next call.
        """
        ...

    def wake(self) -> None:
        """Make the current or the next :meth:`wait` return. Any thread, at any time, also after
        :meth:`close`; cheap, and any number of calls may end a single wait."""
        ...

    def close(self) -> None:
        """Drop everything queued and free every socket. Idempotent; afterwards ``send`` answers
        False, ``wait`` an empty list at once, ``listen`` and ``connect`` raise ``LinkError``."""
        ...


def parse_address(text: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port`` into the host, without brackets, and the port.

    Raises :class:`~epd_connector.errors.RequestError` naming the value if it is anything else.
    """
    if len(text) > MAX_ADDRESS_CHARS:
        raise RequestError(
            f"address of {len(text)} characters, {text[:40]!r}..., is longer than the limit of "
            f"{MAX_ADDRESS_CHARS}: {_REMEDY}"
        )
    host, colon, port = text.rpartition(":")
    if not colon or not _PORT.fullmatch(port):
        raise RequestError(f"address {text!r} has no port: {_REMEDY}")
    if host.startswith("[") and host.endswith("]") and _is_v6(host[1:-1]):
        host = host[1:-1]
    elif not _is_v4_or_name(host):
        raise RequestError(f"address {text!r} has no valid host, but {host!r}: {_REMEDY}")
    return host, _checked_port(int(port), 1)


def format_address(host: str, port: int) -> str:
    """``host:port``, with the brackets that an IPv6 host needs; port 0 means any free one.

    Raises :class:`~epd_connector.errors.RequestError` naming the value that is wrong.
    """
    if _is_v6(host):
        host = f"[{host}]"
    elif not _is_v4_or_name(host):
        raise RequestError(f"host {host!r} is neither a name nor an IP address: {_REMEDY}")
    return f"{host}:{_checked_port(port, 0)}"


def endpoint(host: str, port: int) -> str:
    """``tcp://host:port`` for :meth:`Link.listen` and :meth:`Link.connect`; port 0 to listen
    only. Raises like :func:`format_address`."""
    return f"tcp://{format_address(host, port)}"


def _is_v6(host: str) -> bool:
    try:
        zone = ipaddress.IPv6Address(host).scope_id
    except ValueError:
        return False
    return zone is None or bool(_ZONE.fullmatch(zone))


def _is_v4_or_name(host: str) -> bool:
    # "10.0.0" and "300.1.1.1" would pass as names, and resolvers guess at them.
    if not _DIGITS_AND_DOTS.fullmatch(host):
        return len(host) <= 253 and bool(_HOST_NAME.fullmatch(host))
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _checked_port(port: int, lowest: int) -> int:
    if not lowest <= port <= 65535:
        raise RequestError(f"port {port} is outside {lowest} to 65535: {_REMEDY}")
    return port
