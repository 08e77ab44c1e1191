# SPDX-License-Identifier: Apache-2.0
"""Monitors of dialing sockets: reports that nobody reads, replaced sockets, no descriptors left."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import zmq

from epd_connector.errors import LinkError
from epd_connector.link.base import PeerId
from epd_connector.link.monitor import Monitor
from epd_connector.link.sockets import hard_limit
from epd_connector.link.zmq_link import ZmqLink
from tests.contract.link_cases import PATIENCE_S, until

# In processes of their own: where these go wrong, libzmq blocks with the interpreter's lock held.
FLOODED = """
import socket
import zmq
from epd_connector.link.monitor import Monitor

context = zmq.Context()
context.setsockopt(zmq.RCVHWM, 1)
dialer = context.socket(zmq.DEALER)
dialer.setsockopt(zmq.RECONNECT_IVL, 1)
monitor = Monitor(dialer)
with socket.create_server(("127.0.0.1", 0)) as door:
    dialer.connect("tcp://127.0.0.1:%d" % door.getsockname()[1])
    # Somebody who hangs up at once, until there is no more room for reports and libzmq waits.
    door.settimeout(1.0)
    calls = 0
    try:
        while calls < 100_000:
            door.accept()[0].close()
            calls += 1
    except TimeoutError:
        print("dialed", calls, flush=True)
monitor.close()
dialer.close(linger=0)
context.term()
print("closed")
"""

NO_DESCRIPTORS = """
import os
import resource
import secrets
import time
from epd_connector.errors import LinkError
from epd_connector.link.zmq_link import ZmqLink

def descriptors():
    return len(os.listdir("/proc/self/fd"))

link = ZmqLink()
link.listen("ipc://@epd-test-" + secrets.token_hex(8))
before = descriptors()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
refused = 0
for spare in range(16):
    holders = [os.dup(0)]
    while holders[-1] < 64:
        holders.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (holders[-1] + 1 + spare, hard))
    try:
        link.connect("tcp://127.0.0.1:10")
    except LinkError as error:
        assert "ulimit" in str(error), error
        refused += 1
    else:
        break
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for holder in holders:
            os.close(holder)
    # Sockets are closed in the background.
    deadline = time.monotonic() + 10.0
    while descriptors() > before:
        assert time.monotonic() < deadline, "descriptors are left behind"
print("refused", refused)
link.close()
"""


def script(source: str) -> list[str]:
    """What a process of its own prints."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", source],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    return ended.stdout.splitlines()


def test_reports_that_nobody_read_do_not_keep_a_monitor_from_closing() -> None:
    dialed, closed = script(FLOODED)
    assert int(dialed.split()[1]) >= 100
    assert closed == "closed"


def test_connecting_without_descriptors_is_refused_with_the_remedy() -> None:
    # One each for the socket and both ends of its monitor.
    assert script(NO_DESCRIPTORS) == ["refused 3"]


def test_dialing_and_hanging_up_at_the_limit_of_peers_goes_on() -> None:
    link = ZmqLink(max_peers=1)
    # libzmq closes sockets in the background, and is still at it when the next one is wanted.
    for _ in range(300):
        link.disconnect(link.connect("tcp://127.0.0.1:9"))
    link.close()


@pytest.fixture
def rude() -> Iterator["zmq.Socket[bytes]"]:
    """A listener that is not one of ours."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    yield router
    router.close(linger=0)
    # A monitor that a failed test left open, too: terminating would wait for it for ever.
    context.destroy(linger=0)


def test_break_is_told_though_a_send_replaced_the_socket_before_anybody_waited(
    rude: "zmq.Socket[bytes]",
) -> None:
    cut = rude.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    port = rude.bind_to_random_port("tcp://127.0.0.1")
    client = ZmqLink(max_frame_bytes=1000, deaf_after_s=0.0)
    peer = client.connect(f"tcp://127.0.0.1:{port}")
    until(client, lambda: client.connected(peer))
    assert client.send(peer, b"hello")
    identity, _ = rude.recv_multipart()
    rude.send_multipart([identity, b"x" * (hard_limit(1000) + 1)])
    assert cut.poll(int(PATIENCE_S * 1000))
    rude.disable_monitor()
    cut.close(linger=0)
    # A first frame may still fall into the dead socket; nobody waits at the link meanwhile.
    deadline = time.monotonic() + PATIENCE_S
    while not rude.poll(20):
        assert time.monotonic() < deadline, "the socket was not replaced"
        client.send(peer, b"again")
    assert client.take_broken() == [peer]
    until(client, lambda: client.connected(peer))
    assert client.take_broken() == []
    client.close()


@pytest.fixture
def watched() -> Iterator[Callable[[str], Monitor]]:
    """The monitor of a new socket that dials."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened: list[tuple[zmq.Socket[bytes], Monitor]] = []

    def dial(endpoint: str) -> Monitor:
        dialer = context.socket(zmq.DEALER)
        opened.append((dialer, Monitor(dialer)))
        dialer.connect(endpoint)
        return opened[-1][1]

    yield dial
    for dialer, monitor in opened:
        monitor.close()
        dialer.close(linger=0)
    context.term()


@pytest.fixture
def stranger() -> Iterator["zmq.Socket[bytes]"]:
    """A socket of a kind that does not go with ours, at a port of this machine."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.bind("tcp://127.0.0.1:*")
    yield publisher
    publisher.close(linger=0)
    # Its monitor, too: terminating would wait for it for ever.
    context.destroy(linger=0)


@pytest.fixture
def link() -> Iterator[Callable[..., ZmqLink]]:
    links: list[ZmqLink] = []

    def new(**limits: float) -> ZmqLink:
        links.append(ZmqLink(**limits))  # type: ignore[arg-type]
        return links[-1]

    yield new
    for each in links:
        each.close()


def where(bound: "zmq.Socket[bytes]") -> str:
    return bound.getsockopt_string(zmq.LAST_ENDPOINT)


def reported(monitor: Monitor, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it was never reported"
        monitor.socket.poll(20)
        assert not monitor.read()


def test_another_kind_of_socket_makes_libzmq_give_up(
    watched: Callable[[str], Monitor], stranger: "zmq.Socket[bytes]"
) -> None:
    monitor = watched(where(stranger))
    assert not monitor.given_up
    reported(monitor, lambda: monitor.given_up)
    assert not monitor.up


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_who_hangs_up_before_the_handshake_is_dialed_again(
    watched: Callable[[str], Monitor], answer: bytes
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(PATIENCE_S)
        monitor = watched(f"tcp://127.0.0.1:{door.getsockname()[1]}")
        for _ in range(3):
            caller, _ = door.accept()
            caller.sendall(answer)
            caller.close()
        assert not monitor.read()
        assert not monitor.given_up


def test_frames_for_another_kind_of_socket_are_refused_and_not_swallowed(
    link: Callable[..., ZmqLink], stranger: "zmq.Socket[bytes]"
) -> None:
    client = link(deaf_after_s=3600.0)
    cut = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    # How libzmq gives up is a race inside it; in one outcome it takes frames for ever.
    for _ in range(20):
        peer = client.connect(where(stranger))
        assert cut.poll(int(PATIENCE_S * 1000))
        cut.recv_multipart()
        until(client, partial(refused, client, peer))
        client.disconnect(peer)


def test_full_queue_for_another_kind_of_socket_is_given_up_with_it(
    link: Callable[..., ZmqLink], stranger: "zmq.Socket[bytes]"
) -> None:
    client, server = link(send_queue=4, deaf_after_s=0.0), link()
    cut = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    endpoint = where(stranger)
    peer = client.connect(endpoint)
    for _ in range(4):
        client.send(peer, b"lost")
    assert cut.poll(int(PATIENCE_S * 1000))
    stranger.close(linger=0)
    until(client, lambda: listens(server, endpoint))
    until(client, lambda: client.send(peer, b"hello") and server.wait(0.05))


def refused(client: ZmqLink, peer: PeerId) -> bool:
    return not client.send(peer, b"x")


def listens(server: ZmqLink, endpoint: str) -> bool:
    try:
        server.listen(endpoint)
    except LinkError:
        return False
    return True
