# SPDX-License-Identifier: Apache-2.0
"""What only the ZeroMQ link has: real endpoints, foreign peers, dying processes, descriptors."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from epd_connector.errors import LinkError
from epd_connector.link.sockets import hard_limit
from epd_connector.link.zmq_link import BATCH, ZmqLink
from tests.contract.link_cases import PATIENCE_S, Frames, gather, until

ANY_PORT = "tcp://127.0.0.1:0"


@pytest.fixture
def make() -> Iterator[Callable[..., ZmqLink]]:
    links: list[ZmqLink] = []

    def new(**limits: float) -> ZmqLink:
        links.append(ZmqLink(**limits))  # type: ignore[arg-type]
        return links[-1]

    yield new
    for link in links:
        link.close()


Foreign = Callable[[int], "zmq.Socket[bytes]"]


@pytest.fixture
def foreign() -> Iterator[Foreign]:
    """Sockets of a program that is not this one."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []

    def new(kind: int) -> "zmq.Socket[bytes]":
        opened.append(context.socket(kind))
        return opened[-1]

    yield new
    for each in opened:
        each.close(linger=0)
    # Monitors that a failed test left open, too: terminating would wait for them for ever.
    context.destroy(linger=0)


def assert_serves(server: ZmqLink, endpoint: str, client: ZmqLink) -> None:
    """A new peer gets through to ``server`` and back."""
    word = secrets.token_bytes(8)
    peer = client.connect(endpoint)
    assert client.send(peer, word)
    frames: Frames = []
    # What strangers sent may come first.
    deadline = time.monotonic() + PATIENCE_S
    while not (back := [who for who, heard in frames if heard == word]):
        assert time.monotonic() < deadline, "the new peer was not heard"
        frames += server.wait(0.05)
    assert server.send(back[0], word)
    assert gather(client, 1) == [(peer, word)]


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://localhost:0", "tcp://0.0.0.0:0", "tcp://[::]:0"],
)
def test_any_port_becomes_a_real_one(make: Callable[..., ZmqLink], endpoint: str) -> None:
    server = make()
    bound = server.listen(endpoint)
    host, _, port = bound.rpartition(":")
    assert host == endpoint.removesuffix(":0")
    assert 0 < int(port) < 65536
    reachable = {"tcp://0.0.0.0": "tcp://127.0.0.1", "tcp://[::]": "tcp://[::1]"}.get(host, host)
    assert_serves(server, f"{reachable}:{port}", make())


def test_listening_on_every_ipv6_address_takes_ipv4_too(make: Callable[..., ZmqLink]) -> None:
    server = make()
    port = server.listen("tcp://[::]:0").rpartition(":")[2]
    assert_serves(server, f"tcp://127.0.0.1:{port}", make())


def test_name_is_looked_up_to_connect(make: Callable[..., ZmqLink]) -> None:
    server = make()
    port = server.listen(ANY_PORT).rpartition(":")[2]
    assert_serves(server, f"tcp://localhost:{port}", make())


def test_foreign_address_is_refused_with_the_remedy(make: Callable[..., ZmqLink]) -> None:
    for endpoint in ("tcp://192.0.2.1:0", "tcp://no-such-host.invalid:0"):
        with pytest.raises(LinkError, match="bind_host") as caught:
            make().listen(endpoint)
        assert endpoint in str(caught.value)


def test_name_that_does_not_exist_harms_nobody(make: Callable[..., ZmqLink]) -> None:
    server, client = make(), make()
    lost = client.connect("tcp://no-such-host.invalid:14579")
    assert client.send(lost, b"x")
    assert_serves(server, server.listen(ANY_PORT), client)


def test_abstract_ipc_leaves_no_file(
    make: Callable[..., ZmqLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    server = make()
    assert_serves(server, server.listen(f"ipc://@epd-test-{secrets.token_hex(8)}"), make())
    assert not list(tmp_path.iterdir())


def test_ipc_path_is_removed_at_close_and_taken_over_from_the_dead(
    make: Callable[..., ZmqLink], tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = make()
    assert_serves(server, server.listen(f"ipc://{path}"), make())
    server.close()
    assert not path.exists()


def test_ipc_path_of_a_living_process_is_not_taken(
    make: Callable[..., ZmqLink], tmp_path: Path
) -> None:
    server, endpoint = make(), f"ipc://{tmp_path}/socket"
    server.listen(endpoint)
    with pytest.raises(LinkError, match="another process"):
        make().listen(endpoint)
    assert_serves(server, endpoint, make())


def test_ipc_path_that_is_too_long_names_the_limit(make: Callable[..., ZmqLink]) -> None:
    with pytest.raises(LinkError, match="107"):
        make().listen(f"ipc:///tmp/{'x' * 200}")


def test_far_too_large_frame_costs_its_sender_the_connection_and_nobody_else(
    make: Callable[..., ZmqLink], foreign: Foreign
) -> None:
    server, good = make(max_frame_bytes=1000), make()
    endpoint = server.listen(ANY_PORT)
    assert_serves(server, endpoint, good)
    rude = foreign(zmq.DEALER)
    rude.connect(endpoint)
    rude.send(b"x" * (hard_limit(1000) + 1))
    assert_serves(server, endpoint, good)
    # The rude one dials again by itself.
    heard: Frames = []
    deadline = time.monotonic() + PATIENCE_S
    while not heard:
        assert time.monotonic() < deadline
        rude.send(b"sorry")
        heard = server.wait(0.05)
    assert heard[0][1] == b"sorry"
    assert server.dropped == 0


def test_connection_that_the_peer_broke_for_good_is_made_anew(
    make: Callable[..., ZmqLink], foreign: Foreign
) -> None:
    rude = foreign(zmq.ROUTER)
    rude.setsockopt(zmq.ROUTER_HANDOVER, 1)
    port = rude.bind_to_random_port("tcp://127.0.0.1")
    client = make(max_frame_bytes=1000, deaf_after_s=0.0)
    peer = client.connect(f"tcp://127.0.0.1:{port}")
    assert client.send(peer, b"hello")
    identity, _ = rude.recv_multipart()
    rude.send_multipart([identity, b"x" * (hard_limit(1000) + 1)])
    answers: Frames = []

    def answered() -> bool:
        assert client.send(peer, b"again")
        if rude.poll(20):
            # Known again by the listener.
            assert rude.recv_multipart() == [identity, b"again"]
            rude.send_multipart([identity, b"answer"])
        answers.extend(client.wait(0.02))
        return bool(answers)

    until(client, answered)
    assert answers[0] == (peer, b"answer")


def test_port_that_first_was_another_service_is_found(
    make: Callable[..., ZmqLink], foreign: Foreign
) -> None:
    publisher = foreign(zmq.PUB)
    monitor = publisher.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    client = make(deaf_after_s=0.0)
    endpoint = f"tcp://127.0.0.1:{port}"
    peer = client.connect(endpoint)
    assert monitor.poll(int(PATIENCE_S * 1000))
    publisher.disable_monitor()
    monitor.close(linger=0)
    publisher.close(linger=0)
    server = make()
    until(client, lambda: _listens(server, endpoint))
    until(client, lambda: client.send(peer, b"hello") and server.wait(0.05))


def _listens(server: ZmqLink, endpoint: str) -> bool:
    try:
        server.listen(endpoint)
    except LinkError:
        return False
    return True


def test_full_queue_is_not_mistaken_for_a_broken_connection(
    make: Callable[..., ZmqLink],
) -> None:
    server, client = make(), make(send_queue=4, deaf_after_s=0.0)
    endpoint = server.listen(ANY_PORT)
    server.close()
    peer = client.connect(endpoint)
    assert [client.send(peer, b"%d" % number) for number in range(6)] == [True] * 4 + [False] * 2
    late = make()
    late.listen(endpoint)
    assert [payload for _, payload in gather(late, 4)] == [b"0", b"1", b"2", b"3"]


def test_foreign_framing_is_dropped_and_counted(
    make: Callable[..., ZmqLink], foreign: Foreign
) -> None:
    server = make()
    endpoint = server.listen(ANY_PORT)
    requester = foreign(zmq.REQ)
    requester.connect(endpoint)
    requester.send(b"with an empty part before it")
    many = foreign(zmq.DEALER)
    many.connect(endpoint)
    many.send_multipart([b"part"] * 1000)
    many.send(b"one part")
    until_two = gather(server, 1)
    assert [payload for _, payload in until_two] == [b"one part"]
    until(server, lambda: server.dropped == 2)
    assert_serves(server, endpoint, make())


def test_what_is_no_zeromq_at_all_is_ignored(make: Callable[..., ZmqLink]) -> None:
    server = make()
    endpoint = server.listen(ANY_PORT)
    port = int(endpoint.rpartition(":")[2])
    for greeting in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 100,
        b"\xff" * 100,
        secrets.token_bytes(999),
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
    assert_serves(server, endpoint, make())


def test_peer_that_floods_does_not_starve_another(make: Callable[..., ZmqLink]) -> None:
    server, quiet = make(), make()
    endpoint = server.listen(ANY_PORT)
    stop = threading.Event()

    def flood() -> None:
        link = ZmqLink()
        peer = link.connect(endpoint)
        while not stop.is_set():
            if not link.send(peer, b"flood"):
                link.wait(0.001)
        link.close()

    thread = threading.Thread(target=flood)
    thread.start()
    gather(server, BATCH)
    peer = quiet.connect(endpoint)
    quiet.send(peer, b"quiet")
    heard: set[bytes] = set()

    def heard_quiet() -> bool:
        heard.update(payload for _, payload in server.wait(0.05))
        return b"quiet" in heard

    until(quiet, heard_quiet)
    stop.set()
    thread.join()


def test_no_descriptor_is_left_behind() -> None:
    def round_trip() -> None:
        server, client = ZmqLink(), ZmqLink()
        endpoint = server.listen(ANY_PORT)
        server.listen(f"ipc://@epd-test-{secrets.token_hex(8)}")
        assert_serves(server, endpoint, client)
        client.connect("tcp://127.0.0.1:9")
        client.disconnect(client.connect(endpoint))
        client.close()
        server.close()

    round_trip()
    before = os.listdir("/proc/self/fd")
    for _ in range(50):
        round_trip()
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_wake_races_with_close(make: Callable[..., ZmqLink]) -> None:
    link = make()
    started, stop = threading.Event(), threading.Event()

    def wake() -> None:
        while not stop.is_set():
            link.wake()
            started.set()

    thread = threading.Thread(target=wake)
    thread.start()
    started.wait()
    link.close()
    stop.set()
    thread.join()
    assert link.wait(None) == []


def test_dialing_and_hanging_up_leaves_no_descriptor() -> None:
    server, client = ZmqLink(), ZmqLink()
    where = server.listen("tcp://127.0.0.1:0")

    def once() -> None:
        peer = client.connect(where)
        until(client, lambda: client.connected(peer))
        client.disconnect(peer)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    once()
    until(server, lambda: True)
    before = descriptors()
    for _ in range(200):
        once()
    until(server, lambda: descriptors() <= before + 2)
    client.close()
    server.close()
