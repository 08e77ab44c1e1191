# SPDX-License-Identifier: Apache-2.0
"""Monitors of dialing sockets: reports that nobody reads, replaced sockets, no descriptors left."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import zmq

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
    assert int(dialed.split()[1]) >= 1000
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
