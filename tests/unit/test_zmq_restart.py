# SPDX-License-Identifier: Apache-2.0
"""The ZeroMQ link over broken connections and killed processes, and the one-shot client."""

import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epd_connector.errors import LinkError, RequestError
from epd_connector.link.client import ask
from epd_connector.link.zmq_link import ZmqLink
from tests.contract.link_cases import PATIENCE_S, Frames, gather, until

ANY_PORT = "tcp://127.0.0.1:0"

ECHO = """
import sys
from epd_connector.link.zmq_link import ZmqLink
link = ZmqLink()
print(link.listen(sys.argv[1]), flush=True)
while True:
    for peer, payload in link.wait(None):
        link.send(peer, sys.argv[2].encode() + payload)
"""


@pytest.fixture
def make() -> Iterator[Callable[..., ZmqLink]]:
    links: list[ZmqLink] = []

    def new(**limits: float) -> ZmqLink:
        links.append(ZmqLink(**limits))  # type: ignore[arg-type]
        return links[-1]

    yield new
    for link in links:
        link.close()


def test_identity_survives_a_broken_connection(make: Callable[..., ZmqLink]) -> None:
    server, client = make(), make()
    upstream = server.listen(ANY_PORT).removeprefix("tcp://").split(":")
    with socket.create_server(("127.0.0.1", 0)) as door:
        to_server = client.connect(f"tcp://127.0.0.1:{door.getsockname()[1]}")
        client.send(to_server, b"first")
        with _relay(door, (upstream[0], int(upstream[1]))):
            [(to_client, _)] = gather(server, 1)
        client.send(to_server, b"second")
        with _relay(door, (upstream[0], int(upstream[1]))):
            until(client, lambda: client.send(to_server, b"more") and server.wait(0.05))
            until(server, lambda: server.send(to_client, b"answer"))
            assert gather(client, 1)[0] == (to_server, b"answer")


@pytest.mark.parametrize("first", ["server", "client"])
def test_incoming_peer_that_dialed_again_is_not_gone_any_more(
    make: Callable[..., ZmqLink], first: str
) -> None:
    server, client = make(), make()
    upstream = server.listen(ANY_PORT).removeprefix("tcp://").split(":")
    with socket.create_server(("127.0.0.1", 0)) as door:
        to_server = client.connect(f"tcp://127.0.0.1:{door.getsockname()[1]}")
        client.send(to_server, b"only this once")
        with _relay(door, (upstream[0], int(upstream[1]))):
            [(to_client, _)] = gather(server, 1)
        until(server, lambda: not server.send(to_client, b"are you there"))
        assert server.gone(to_client)
        until(client, lambda: client.take_broken() == [to_server])
        assert not client.connected(to_server)
        with _relay(door, (upstream[0], int(upstream[1]))):
            until(client, lambda: client.connected(to_server))
            if first == "client":
                assert server.gone(to_client)
                client.send(to_server, b"back again")
                assert gather(server, 1) == [(to_client, b"back again")]
                assert not server.gone(to_client)
            until(server, lambda: server.send(to_client, b"welcome"))
            assert not server.gone(to_client)
            assert gather(client, 1) == [(to_server, b"welcome")]


class _relay:
    """Carries the next connection of ``door`` to ``upstream``, and cuts it at the end."""

    def __init__(self, door: socket.socket, upstream: tuple[str, int]) -> None:
        self._door, self._upstream = door, upstream
        self._pair: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> None:
        self._threads[0].start()

    def __exit__(self, *_: object) -> None:
        self._threads[0].join()
        for end in self._pair:
            end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for end in self._pair:
            end.close()

    def _accept(self) -> None:
        self._pair = [self._door.accept()[0], socket.create_connection(self._upstream)]
        for source, target in (self._pair, self._pair[::-1]):
            thread = threading.Thread(target=self._carry, args=(source, target))
            self._threads.append(thread)
            thread.start()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                target.sendall(data)
        except OSError:
            return  # the other end was cut first


def start_echo(endpoint: str, prefix: str) -> tuple["subprocess.Popen[str]", str]:
    process = subprocess.Popen(
        [sys.executable, "-c", ECHO, endpoint, prefix], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def fresh(scheme: str, folder: Path) -> str:
    """An endpoint to listen at that nobody has."""
    return {
        "tcp": ANY_PORT,
        "ipc": f"ipc://@epd-test-{secrets.token_hex(8)}",
        "ipc-path": f"ipc://{folder}/socket",
    }[scheme]


def end(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "ipc-path"])
def test_killed_process_that_comes_back_is_found(
    make: Callable[..., ZmqLink], scheme: str, tmp_path: Path
) -> None:
    process, endpoint = start_echo(fresh(scheme, tmp_path), "1")
    client = make()
    peer = client.connect(endpoint)
    client.send(peer, b"x")
    assert gather(client, 1) == [(peer, b"1x")]
    end(process)
    process, _ = start_echo(endpoint, "2")
    heard: Frames = []

    def answered() -> bool:
        client.send(peer, b"x")
        heard.extend(client.wait(0.05))
        return bool(heard)

    until(client, answered)
    end(process)
    assert set(heard) == {(peer, b"2x")}


@pytest.mark.parametrize("scheme", ["tcp", "ipc", "ipc-path"])
def test_killed_process_ends_a_wait_and_is_told_as_broken(
    make: Callable[..., ZmqLink], scheme: str, tmp_path: Path
) -> None:
    process, endpoint = start_echo(fresh(scheme, tmp_path), "1")
    client = make()
    peer = client.connect(endpoint)
    until(client, lambda: client.connected(peer))
    client.wait(0)
    process.send_signal(signal.SIGKILL)
    gave_up = threading.Event()

    def give_up() -> None:
        gave_up.set()
        client.wake()

    watchdog = threading.Timer(PATIENCE_S, give_up)
    watchdog.start()
    while client.connected(peer) and not gave_up.is_set():
        client.wait(None)
    watchdog.cancel()
    watchdog.join()
    process.communicate()
    assert not gave_up.is_set()
    assert client.take_broken() == [peer]
    process, _ = start_echo(endpoint, "2")
    until(client, lambda: client.connected(peer))
    assert client.take_broken() == []
    end(process)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_ask_gets_the_answer(host: str) -> None:
    listen_at = {"localhost": "127.0.0.1"}.get(host, host)
    process, endpoint = start_echo(f"tcp://{listen_at}:0", "answer to ")
    port = endpoint.rpartition(":")[2]
    assert ask(f"{host}:{port}", b"who are you", PATIENCE_S) == b"answer to who are you"
    end(process)


def test_ask_names_the_address_that_does_not_answer(make: Callable[..., ZmqLink]) -> None:
    silent = make().listen(ANY_PORT).removeprefix("tcp://")
    with pytest.raises(LinkError, match=f"{silent}.*0\\.01 s"):
        ask(silent, b"who are you", 0.01)


def test_ask_refuses_what_is_no_address() -> None:
    with pytest.raises(RequestError, match="nowhere"):
        ask("nowhere", b"who are you", 1.0)
