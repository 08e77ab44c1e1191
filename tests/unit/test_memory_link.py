# SPDX-License-Identifier: Apache-2.0
"""The fates, crashes and determinism of the memory network."""

import random

import pytest

from epd_connector.errors import LinkError
from epd_connector.testing.clock import ManualClock
from epd_connector.testing.memory_link import (
    DELIVER,
    DROP,
    DUPLICATE,
    REORDER,
    Fate,
    MemoryLink,
    MemoryNetwork,
    delay,
)

SERVER = "tcp://server:1"


def send_all(fates: list[Fate]) -> tuple[MemoryNetwork, MemoryLink]:
    """Frame b"0" with the first fate, b"1" with the second, and so on, to a new server."""
    network = MemoryNetwork()
    server, client = network.link(), network.link("client")
    server.listen(SERVER)
    network.fault = lambda source, destination, payload: fates[int(payload)]
    peer = client.connect(SERVER)
    for number in range(len(fates)):
        assert client.send(peer, b"%d" % number)
    return network, server


def payloads(link: MemoryLink) -> list[bytes]:
    return [payload for _, payload in link.wait(0)]


@pytest.mark.parametrize(
    ("fates", "arriving"),
    [
        ([DELIVER, DELIVER], [b"0", b"1"]),
        ([DROP, DELIVER], [b"1"]),
        ([DUPLICATE, DELIVER], [b"0", b"0", b"1"]),
        ([DELIVER, DELIVER, REORDER], [b"2", b"0", b"1"]),
        ([delay(deliveries=1), DELIVER, DELIVER], [b"1", b"0", b"2"]),
        ([delay(deliveries=2), DELIVER, DELIVER], [b"1", b"2", b"0"]),
    ],
)
def test_fates(fates: list[Fate], arriving: list[bytes]) -> None:
    network, server = send_all(fates)
    assert payloads(server) == arriving
    assert network.in_flight() == 0
    assert network.delivered == len(arriving)


def test_delay_in_seconds_holds_what_is_behind_it_too() -> None:
    network, server = send_all([DELIVER, delay(seconds=2.5), DELIVER])
    assert payloads(server) == [b"0"]
    assert network.in_flight() == 2
    assert network.next_due_s() == 2.5
    network.clock.advance(2.0)
    assert payloads(server) == []
    network.clock.advance(0.5)
    assert payloads(server) == [b"1", b"2"]
    assert network.next_due_s() is None


def test_delay_in_deliveries_counts_those_elsewhere() -> None:
    network, server = send_all([delay(deliveries=1)])
    assert payloads(server) == []
    network.fault = lambda source, destination, payload: DELIVER
    other = network.link()
    other.listen("tcp://other:1")
    client = network.link()
    client.send(client.connect("tcp://other:1"), b"x")
    assert payloads(other) == [b"x"]
    assert payloads(server) == [b"0"]


def test_fault_sees_who_sends_to_whom() -> None:
    network = MemoryNetwork()
    seen: list[tuple[str, str, bytes]] = []

    def watch(source: str, destination: str, payload: bytes) -> Fate:
        seen.append((source, destination, payload))
        return DELIVER

    network.fault = watch
    server, client = network.link(), network.link("client")
    server.listen(SERVER)
    client.send(client.connect(SERVER), b"question")
    [(peer, _)] = server.wait(0)
    server.send(peer, b"answer")
    client.listen("tcp://client:1")
    client.send(client.connect(SERVER), b"named by its endpoint now")
    assert seen == [
        ("client", SERVER, b"question"),
        (SERVER, "client", b"answer"),
        ("tcp://client:1", SERVER, b"named by its endpoint now"),
    ]


def test_crash_loses_what_is_under_way_and_restart_hears_what_came_later() -> None:
    network = MemoryNetwork()
    server, client = network.link(), network.link()
    server.listen(SERVER)
    peer = client.connect(SERVER)
    client.send(peer, b"hello")
    [(to_client, _)] = server.wait(0)
    client.send(peer, b"lost")
    server.send(to_client, b"lost too")
    network.crash(SERVER)
    assert network.in_flight() == 0
    assert not server.send(to_client, b"x")
    assert client.send(peer, b"queued")
    reborn = network.restart(SERVER)
    assert payloads(reborn) == [b"queued"]
    assert client.wait(0) == []


def test_crash_of_a_client_is_seen_by_a_send() -> None:
    network = MemoryNetwork()
    server, client = network.link(), network.link()
    server.listen(SERVER)
    client.listen("tcp://client:1")
    client.send(client.connect(SERVER), b"hello")
    [(to_client, _)] = server.wait(0)
    network.crash("tcp://client:1")
    assert not server.send(to_client, b"x")


def test_crash_where_nobody_listens_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        MemoryNetwork().crash(SERVER)


def test_closed_listener_frees_its_endpoint() -> None:
    network = MemoryNetwork()
    server = network.link()
    server.listen(SERVER)
    with pytest.raises(LinkError, match="in use"):
        network.restart(SERVER)
    server.close()
    network.restart(SERVER)


def test_peer_that_floods_does_not_starve_another() -> None:
    network = MemoryNetwork()
    server, flood, quiet = network.link(), network.link(), network.link()
    server.listen(SERVER)
    for _ in range(2000):
        flood.send(flood.connect(SERVER), b"flood")
    quiet.send(quiet.connect(SERVER), b"quiet")
    assert b"quiet" in payloads(server)


def run(seed: int) -> list[bytes]:
    """Everything a server hears of 300 frames over a bad network."""
    dice = random.Random(seed)
    network = MemoryNetwork()
    fates = [DELIVER, DROP, DUPLICATE, REORDER, delay(seconds=1), delay(deliveries=3)]
    network.fault = lambda source, destination, payload: dice.choice(fates)
    server, client = network.link(), network.link()
    server.listen(SERVER)
    heard: list[bytes] = []
    for number in range(300):
        client.send(client.connect(SERVER), b"%d" % number)
        if dice.random() < 0.3:
            heard += payloads(server)
            network.clock.advance(0.25)
    return heard


def test_same_seed_same_history() -> None:
    assert run(1) == run(1)
    assert run(1) != run(2)


def test_clock_moves_only_forward_and_only_when_told() -> None:
    clock = ManualClock(10.0)
    assert clock.now() == 10.0
    clock.advance(0.5)
    clock.advance(0)
    assert clock.now() == 10.5
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="monotonic"):
            clock.advance(wrong)
