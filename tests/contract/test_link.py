# SPDX-License-Identifier: Apache-2.0
"""What every link promises, held against ZeroMQ over tcp and ipc and against the memory link."""

import itertools
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Protocol

import pytest

from epd_connector.errors import LinkError
from epd_connector.link.base import Link, PeerId
from epd_connector.link.zmq_link import ZmqLink
from epd_connector.testing.memory_link import MemoryNetwork
from tests.contract.link_cases import PATIENCE_S, Frames, gather, until


class World(Protocol):
    def link(
        self, *, max_frame_bytes: int = ..., send_queue: int = ..., max_peers: int = ...
    ) -> Link: ...

    def endpoint(self) -> str: ...

    def close(self) -> None: ...


class ZmqWorld:
    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._links: list[ZmqLink] = []

    def link(
        self, *, max_frame_bytes: int = 1 << 20, send_queue: int = 4096, max_peers: int = 4096
    ) -> ZmqLink:
        link = ZmqLink(max_frame_bytes, send_queue, max_peers)
        self._links.append(link)
        return link

    def endpoint(self) -> str:
        if self._scheme == "tcp":
            return "tcp://127.0.0.1:0"
        return f"ipc://@epd-test-{secrets.token_hex(8)}"

    def close(self) -> None:
        for link in self._links:
            link.close()


class MemoryWorld:
    def __init__(self) -> None:
        self._network = MemoryNetwork()

    def link(
        self, *, max_frame_bytes: int = 1 << 20, send_queue: int = 4096, max_peers: int = 4096
    ) -> Link:
        return self._network.link(
            max_frame_bytes=max_frame_bytes, send_queue=send_queue, max_peers=max_peers
        )

    def endpoint(self) -> str:
        return "tcp://127.0.0.1:0"

    def close(self) -> None:
        pass


@pytest.fixture(params=["zmq-tcp", "zmq-ipc", "memory"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made: World = (
        MemoryWorld() if request.param == "memory" else ZmqWorld(request.param.removeprefix("zmq-"))
    )
    yield made
    made.close()


def pair(world: World) -> tuple[Link, Link, PeerId, PeerId]:
    """A server and a client that have heard of each other, with each one's id for the other."""
    server, client = world.link(), world.link()
    to_server = client.connect(server.listen(world.endpoint()))
    assert client.send(to_server, b"hello")
    [(to_client, payload)] = gather(server, 1)
    assert payload == b"hello"
    return server, client, to_client, to_server


def test_answer_goes_back_to_who_asked(world: World) -> None:
    server, client, to_client, to_server = pair(world)
    other = world.link()
    to_server_too = other.connect(server.listen(world.endpoint()))
    assert other.send(to_server_too, b"me too")
    [(to_other, _)] = gather(server, 1)
    assert to_other != to_client
    assert server.send(to_client, b"one")
    assert server.send(to_other, b"two")
    assert gather(client, 1) == [(to_server, b"one")]
    assert gather(other, 1) == [(to_server_too, b"two")]


def test_a_peer_keeps_its_id(world: World) -> None:
    server, client, to_client, to_server = pair(world)
    for number in range(3):
        assert client.send(to_server, b"%d" % number)
        assert gather(server, 1) == [(to_client, b"%d" % number)]


def test_frames_keep_their_order_both_ways(world: World) -> None:
    server, client, to_client, to_server = pair(world)
    payloads = [b"%d" % number for number in range(1000)]
    for payload in payloads:
        assert client.send(to_server, payload)
        assert server.send(to_client, payload)
    assert gather(server, 1000) == [(to_client, payload) for payload in payloads]
    assert gather(client, 1000) == [(to_server, payload) for payload in payloads]


def test_empty_and_largest_frames_arrive(world: World) -> None:
    server, client = world.link(max_frame_bytes=5000), world.link(max_frame_bytes=5000)
    to_server = client.connect(server.listen(world.endpoint()))
    for payload in (b"", b"x" * 5000):
        assert client.send(to_server, payload)
    assert [payload for _, payload in gather(server, 2)] == [b"", b"x" * 5000]


def test_same_endpoint_is_the_same_peer_until_disconnected(world: World) -> None:
    server, client = world.link(), world.link()
    endpoint = server.listen(world.endpoint())
    first = client.connect(endpoint)
    assert client.connect(endpoint) == first
    client.disconnect(first)
    assert client.connect(endpoint) != first


def test_frames_wait_for_a_peer_that_is_not_up_yet(world: World) -> None:
    server = world.link()
    endpoint = server.listen(world.endpoint())
    server.close()
    client = world.link(send_queue=8)
    peer = client.connect(endpoint)
    accepted = 0
    while client.send(peer, b"%d" % accepted):
        accepted += 1
        assert accepted <= 8
    late = world.link()
    late.listen(endpoint)
    assert [payload for _, payload in gather(late, accepted)] == [b"%d" % n for n in range(8)]


def test_queue_of_a_peer_that_does_not_read_is_bounded(world: World) -> None:
    server, client, to_client, _ = pair(world)
    # libzmq and the kernel buffer some frames more than the queue holds, but not without end.
    for _ in range(20_000):
        if not server.send(to_client, b"x" * 10_000):
            break
    else:
        pytest.fail("a queue without a bound")
    assert client.wait(5)


def test_unknown_and_disconnected_peers_take_nothing(world: World) -> None:
    server, client, to_client, to_server = pair(world)
    assert not client.send(PeerId(999_999), b"x")
    client.disconnect(PeerId(999_999))
    server.disconnect(to_client)
    assert not server.send(to_client, b"x")
    client.disconnect(to_server)
    client.disconnect(to_server)
    assert not client.send(to_server, b"x")


def test_disconnected_incoming_peer_is_a_new_one_when_it_sends_again(world: World) -> None:
    server, client, to_client, to_server = pair(world)
    server.disconnect(to_client)
    assert client.send(to_server, b"again")
    [(renewed, _)] = gather(server, 1)
    assert renewed != to_client
    assert server.send(renewed, b"welcome")
    assert gather(client, 1) == [(to_server, b"welcome")]


def test_peer_that_left_takes_nothing(world: World) -> None:
    server, client, to_client, to_server = pair(world)
    client.disconnect(to_server)
    until(server, lambda: not server.send(to_client, b"x"))


def test_incoming_peers_are_bounded_and_the_longest_idle_goes(world: World) -> None:
    server = world.link(max_peers=2)
    endpoint = server.listen(world.endpoint())
    clients = [world.link() for _ in range(3)]
    ids: list[PeerId] = []
    for client in clients[:2]:
        client.send(client.connect(endpoint), b"hello")
        ids += [peer for peer, _ in gather(server, 1)]
    clients[0].send(clients[0].connect(endpoint), b"not idle")
    gather(server, 1)
    clients[2].send(clients[2].connect(endpoint), b"hello")
    [(third, _)] = gather(server, 1)
    assert server.send(ids[0], b"x")
    assert server.send(third, b"x")
    assert not server.send(ids[1], b"x")
    clients[1].send(clients[1].connect(endpoint), b"again")
    [(renewed, _)] = gather(server, 1)
    assert renewed not in {*ids, third}


def test_too_many_connections_are_refused(world: World) -> None:
    client = world.link(max_peers=1)
    first = client.connect("tcp://127.0.0.1:9")
    with pytest.raises(LinkError, match="limit"):
        client.connect("tcp://127.0.0.1:10")
    client.disconnect(first)
    client.connect("tcp://127.0.0.1:10")


def test_frame_that_is_too_large_is_not_sent(world: World) -> None:
    client = world.link(max_frame_bytes=1000)
    assert not client.send(client.connect("tcp://127.0.0.1:9"), b"x" * 1001)


def test_frame_that_is_too_large_is_dropped_alone(world: World) -> None:
    server, client = world.link(max_frame_bytes=1000), world.link(max_frame_bytes=100_000)
    to_server = client.connect(server.listen(world.endpoint()))
    for payload in (b"before", b"x" * 1001, b"after"):
        assert client.send(to_server, payload)
    (first, before), (second, after) = gather(server, 2)
    assert (before, after) == (b"before", b"after")
    assert first == second
    assert server.dropped == 1


def test_batches_are_bounded_and_complete(world: World) -> None:
    server = world.link()
    endpoint = server.listen(world.endpoint())
    clients = [world.link() for _ in range(3)]
    for client, number in itertools.product(clients, range(700)):
        assert client.send(client.connect(endpoint), b"%d" % number)
    got: dict[PeerId, list[int]] = {}
    deadline = time.monotonic() + PATIENCE_S
    while sum(map(len, got.values())) < 2100:
        assert time.monotonic() < deadline
        batch = server.wait(0.05)
        assert len(batch) <= 256
        for peer, payload in batch:
            got.setdefault(peer, []).append(int(payload))
    assert list(got.values()) == [list(range(700))] * 3


def test_wait_without_anything_to_hear_ends(world: World) -> None:
    link = world.link()
    link.listen(world.endpoint())
    for timeout_s in (0, 0.0001, 0.0025, -1.0):
        assert link.wait(timeout_s) == []


def test_wake_before_wait_ends_it(world: World) -> None:
    link = world.link()
    for _ in range(1000):
        link.wake()
    assert link.wait(None) == []


def test_wake_from_other_threads_ends_every_wait(world: World) -> None:
    link = world.link()
    rounds = 200
    turn = threading.Semaphore(0)

    def waker() -> None:
        for _ in range(rounds):
            turn.acquire()
            link.wake()

    thread = threading.Thread(target=waker)
    thread.start()
    for _ in range(rounds):
        turn.release()
        assert link.wait(None) == []
    thread.join()


def test_wake_takes_no_frame(world: World) -> None:
    server, client, to_client, to_server = pair(world)
    for number in range(100):
        client.send(to_server, b"%d" % number)
        server.wake()
    assert gather(server, 100) == [(to_client, b"%d" % number) for number in range(100)]


def test_peer_that_restarts_is_found_again_at_its_endpoint(world: World) -> None:
    server = world.link()
    endpoint = server.listen(world.endpoint())
    client = world.link()
    to_server = client.connect(endpoint)
    client.send(to_server, b"hello")
    gather(server, 1)
    server.close()
    reborn = world.link()
    reborn.listen(endpoint)
    heard: Frames = []

    def heard_again() -> bool:
        # A frame that was under way when the peer died may be lost: say it again.
        assert client.send(to_server, b"are you there")
        heard.extend(reborn.wait(0.05))
        return bool(heard)

    until(client, heard_again)
    assert reborn.send(heard[0][0], b"here")
    assert gather(client, 1) == [(to_server, b"here")]
    assert client.connect(endpoint) == to_server


def test_busy_endpoint_is_refused_with_the_remedy(world: World) -> None:
    first, second = world.link(), world.link()
    endpoint = first.listen(world.endpoint())
    with pytest.raises(LinkError, match="control_port") as caught:
        second.listen(endpoint)
    assert endpoint in str(caught.value)
    # The failure leaves both usable.
    client = world.link()
    assert client.send(client.connect(second.listen(world.endpoint())), b"x")
    assert gather(second, 1)


def test_one_link_listens_at_several_endpoints(world: World) -> None:
    server, client = world.link(), world.link()
    for number in range(3):
        peer = client.connect(server.listen(world.endpoint()))
        assert client.send(peer, b"%d" % number)
        [(back, payload)] = gather(server, 1)
        assert payload == b"%d" % number
        assert server.send(back, payload)
        assert gather(client, 1) == [(peer, payload)]


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:80", "http://127.0.0.1:80"])
def test_malformed_endpoints_are_refused(world: World, endpoint: str) -> None:
    link = world.link()
    with pytest.raises(LinkError):
        link.connect(endpoint)
    with pytest.raises(LinkError):
        link.listen(endpoint)


def test_closed_link_takes_and_gives_nothing(world: World) -> None:
    server, client, to_client, to_server = pair(world)
    for link, peer in ((client, to_server), (server, to_client)):
        link.close()
        link.close()
        link.wake()
        link.disconnect(peer)
        assert not link.send(peer, b"x")
        assert link.wait(None) == []
        with pytest.raises(LinkError, match="closed"):
            link.connect("tcp://127.0.0.1:9")
        with pytest.raises(LinkError, match="closed"):
            link.listen(world.endpoint())


# --- what is seen of connections ------------------------------------------------------------


def dialed(world: World) -> tuple[Link, Link, PeerId, str]:
    """A listener, a link that has dialed it and is connected, the listener's id and endpoint."""
    server, client = world.link(), world.link()
    where = server.listen(world.endpoint())
    peer = client.connect(where)
    until(client, lambda: client.connected(peer))
    return server, client, peer, where


def test_a_peer_is_connected_when_somebody_listens(world: World) -> None:
    server, client, peer, _ = dialed(world)
    assert client.send(peer, b"hello")
    ((incoming, _),) = gather(server, 1)
    assert client.take_broken() == []
    assert not server.connected(incoming)
    assert not client.connected(PeerId(999))


def test_a_broken_connection_is_told_once_and_mends(world: World) -> None:
    server, client, peer, where = dialed(world)
    server.close()
    until(client, lambda: not client.connected(peer))
    assert client.take_broken() == [peer]
    assert client.take_broken() == []
    assert not client.connected(peer)
    again = world.link()
    again.listen(where)
    until(client, lambda: client.connected(peer))
    assert client.take_broken() == []
    assert client.send(peer, b"hello again")
    assert [payload for _, payload in gather(again, 1)] == [b"hello again"]


def test_what_is_hung_up_is_not_broken(world: World) -> None:
    server, client, peer, _ = dialed(world)
    client.disconnect(peer)
    server.close()
    assert client.wait(0) == []
    assert client.take_broken() == []
    assert not client.connected(peer)


def test_nobody_is_connected_where_nobody_listens(world: World) -> None:
    server, client = world.link(), world.link()
    where = server.listen(world.endpoint())
    server.close()
    peer = client.connect(where)
    assert client.wait(0.05) == []
    assert not client.connected(peer)
    assert client.take_broken() == []


def test_an_incoming_peer_is_gone_when_a_frame_finds_its_connection_gone(world: World) -> None:
    server, client, peer, _ = dialed(world)
    client.send(peer, b"hello")
    ((incoming, _),) = gather(server, 1)
    assert server.send(incoming, b"welcome")
    assert not server.gone(incoming)
    client.close()
    until(server, lambda: not server.send(incoming, b"still there?"))
    assert server.gone(incoming)
    server.disconnect(incoming)
    assert not server.gone(incoming)


def test_a_full_queue_is_not_a_gone_peer(world: World) -> None:
    server, client = world.link(send_queue=1), world.link(send_queue=1)
    peer = client.connect(server.listen(world.endpoint()))
    client.send(peer, b"hello")
    ((incoming, _),) = gather(server, 1)
    until(server, lambda: not server.send(incoming, bytes(1 << 16)))
    assert not server.gone(incoming)


def test_each_listener_has_a_table_of_its_own(world: World) -> None:
    server = world.link(max_peers=2)
    doors = [server.listen(world.endpoint()) for _ in range(2)]
    own = world.link()
    own.send(own.connect(doors[0]), b"own")
    ((kept, _),) = gather(server, 1)
    strangers = [world.link() for _ in range(4)]
    for stranger in strangers:
        stranger.send(stranger.connect(doors[1]), b"stranger")
        gather(server, 1)
    assert server.send(kept, b"you are known")
    assert [payload for _, payload in gather(own, 1)] == [b"you are known"]
