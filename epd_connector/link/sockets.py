# SPDX-License-Identifier: Apache-2.0
"""ZeroMQ sockets as a link needs them: every option, and errors that a person can act on.

Owns how a listening and a dialing socket are made. Does not own when they are read or written
(``zmq_link``).
"""

import errno
import ipaddress
import os
import secrets
import socket
import stat
from typing import NamedTuple

import zmq

from epd_connector.errors import LinkError

# I/O threads of a context, as bits of ZMQ_AFFINITY. libzmq looks a host name up inside the I/O
# thread, anew for every connection attempt, and blocks everything else in that thread while the
# name server does not answer. So peers that are called by name get a thread of their own.
IO_THREADS = 2
_FOR_ADDRESSES = 1
_FOR_NAMES = 2

_RECONNECT_FIRST_MS = 50
_RECONNECT_LONGEST_MS = 1000
_CONNECT_TIMEOUT_MS = 2000
_UNACKNOWLEDGED_MS = 15_000
_KEEPALIVE_IDLE_S = 15
_KEEPALIVE_INTERVAL_S = 5
_KEEPALIVE_PROBES = 3

_REMEDIES = {
    errno.EADDRINUSE: "it is in use: stop the other process or choose another control_port",
    errno.EADDRNOTAVAIL: "it is no address of this machine: set bind_host to one that is",
    errno.ENODEV: "it is no address of this machine: set bind_host to one that is",
    errno.EACCES: "this user may not: choose a control_port above 1023",
    errno.EMFILE: "this process has too many open files: raise `ulimit -n`",
    errno.EINVAL: 'write "tcp://host:port", "tcp://[address]:port" or "ipc://path"; '
    "check control_host, bind_host and control_port",
    errno.ENAMETOOLONG: "a path for ipc has at most 107 characters: set TMPDIR to a shorter one",
}


class Limits(NamedTuple):
    """Bounds of one socket: bytes of a frame, and frames queued per peer and direction."""

    max_frame_bytes: int
    send_queue: int


def open_listener(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, limits: Limits
) -> tuple["zmq.Socket[bytes]", str]:
    """A bound ROUTER and the endpoint with its real port. Raises LinkError if it cannot bind."""
    _refuse_live_path(endpoint)
    where = _resolved(endpoint)
    listener = _open(context, zmq.ROUTER, endpoint, limits)
    try:
        # Without mandatory, frames for a peer that left vanish without a word. With handover, a
        # peer that dials again while its old connection is not known to be dead keeps its
        # identity; without it, libzmq would ignore that peer for good.
        listener.setsockopt(zmq.ROUTER_MANDATORY, 1)
        listener.setsockopt(zmq.ROUTER_HANDOVER, 1)
        listener.setsockopt(zmq.IPV6, int(_is_v6(where) or where.startswith("tcp://*")))
        if endpoint.startswith("ipc://"):
            # An abstract name has no file mode that keeps other users out.
            listener.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        listener.bind(where)
    except zmq.ZMQError as error:
        listener.close(linger=0)
        raise link_error("listen", endpoint, error) from error
    if not endpoint.startswith("tcp://"):
        return listener, endpoint
    port = listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return listener, f"{endpoint.rpartition(':')[0]}:{port}"


def open_dialer(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoint: str, identity: bytes, limits: Limits
) -> "zmq.Socket[bytes]":
    """A DEALER that, once connected to ``endpoint``, keeps dialing it and queues meanwhile.

    Not connected yet, so that a monitor sees all of it. LinkError if a socket cannot be had.
    ``identity``, of :func:`new_identity`, is what the listener knows this peer by.
    """
    dialer = _open(context, zmq.DEALER, endpoint, limits)
    try:
        dialer.setsockopt(zmq.ROUTING_ID, identity)
        dialer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_FIRST_MS)
        dialer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_LONGEST_MS)
        dialer.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        # Only for IPv6 addresses: with it libzmq tries nothing but the IPv6 address of a name
        # that has both, though its listener may have only the IPv4 one.
        dialer.setsockopt(zmq.IPV6, int(_is_v6(endpoint)))
    except zmq.ZMQError as error:
        dialer.close(linger=0)
        raise link_error("connect", endpoint, error) from error
    return dialer


def new_identity() -> bytes:
    """Lets a listener know a peer again after a broken connection; random, so that nobody else
    can pass for it. libzmq keeps identities that begin with a zero for itself."""
    return b"\x01" + secrets.token_bytes(16)


def _open(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str, limits: Limits
) -> "zmq.Socket[bytes]":
    try:
        opened = context.socket(kind)
    except zmq.ZMQError as error:
        raise link_error("open", endpoint, error) from error
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.SNDHWM, limits.send_queue)
    opened.setsockopt(zmq.RCVHWM, limits.send_queue)
    opened.setsockopt(zmq.MAXMSGSIZE, hard_limit(limits.max_frame_bytes))
    named = kind == zmq.DEALER and _is_name(endpoint)
    opened.setsockopt(zmq.AFFINITY, _FOR_NAMES if named else _FOR_ADDRESSES)
    opened.setsockopt(zmq.TCP_KEEPALIVE, 1)
    opened.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
    opened.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_INTERVAL_S)
    opened.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_PROBES)
    # After a cut network TCP waits ever longer between attempts; a new connection is sooner.
    opened.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
    return opened


def socket_files(endpoint: str) -> list[str]:
    """The file that a listener at ``endpoint`` makes: none for tcp and for abstract names."""
    path = endpoint.removeprefix("ipc://")
    return [] if path == endpoint or path.startswith("@") else [path]


def hard_limit(max_frame_bytes: int) -> int:
    """Bytes from which on libzmq cuts the connection that a frame comes over.

    Above ``max_frame_bytes``, so that a frame that is only too large is dropped and counted
    alone; and never below what the handshake itself needs.
    """
    return 2 * max_frame_bytes + 4096


def link_error(verb: str, endpoint: str, error: zmq.ZMQError) -> LinkError:
    """What went wrong at ``endpoint``, and what a person can do about it."""
    remedy = _REMEDIES.get(error.errno or 0, "check control_host, bind_host and control_port")
    return LinkError(f"cannot {verb} at {endpoint!r} ({error.strerror}): {remedy}")


def _host(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def _is_v6(endpoint: str) -> bool:
    return endpoint.startswith("tcp://[")


def _is_name(endpoint: str) -> bool:
    if not endpoint.startswith("tcp://") or _is_v6(endpoint):
        return False
    host = _host(endpoint)
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return host != "*"
    return False


def _resolved(endpoint: str) -> str:
    """The endpoint with an address instead of a name: libzmq binds to no names.

    IPv4 first, as for :func:`open_dialer`. What cannot be resolved is left as it is: the name of
    a network interface can be bound to, and for anything else libzmq's error will do.
    """
    if not _is_name(endpoint):
        return endpoint
    host, port = _host(endpoint), endpoint.rpartition(":")[2]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return endpoint
    address = min(found, key=lambda info: info[0] != socket.AF_INET)[4][0]
    return f"tcp://[{address}]:{port}" if ":" in str(address) else f"tcp://{address}:{port}"


def _refuse_live_path(endpoint: str) -> None:
    # libzmq unlinks whatever lies at the path and binds anew: the process that listens there
    # would live on and hear from nobody.
    for path in filter(_is_socket, socket_files(endpoint)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            result = probe.connect_ex(path)
        if result in (0, errno.EAGAIN):
            raise LinkError(f"cannot listen at {endpoint!r}: another process listens there")


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False
