# SPDX-License-Identifier: Apache-2.0
"""The switchboard: connections are made when needed, kept, bounded and hung up."""

import logging

import pytest

from epd_connector.link.base import PeerId
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import (
    MAX_FRAMES,
    MAX_ROOMS_NAMED,
    AnyFrame,
    Envelope,
    Ping,
    Pong,
    SkipRooms,
)
from epd_connector.runtime import switchboard as switchboard_module
from epd_connector.runtime.switchboard import SWEEP_S, Switchboard
from epd_connector.stats import Counters
from epd_connector.testing.memory_link import MemoryLink, MemoryNetwork

ME = 7
CODEC = Codec()


class Side:
    """A switchboard, and links that listen at endpoints of their own."""

    def __init__(self, *, kept: str = "", send_queue: int = 4096, key: bytes | None = None) -> None:
        self.network = MemoryNetwork()
        self.link = self.network.link("here", send_queue=send_queue)
        self.counters = Counters()
        self.switch = Switchboard(self.link, Codec(key), ME, self.counters, kept=kept)

    def listener(self, endpoint: str) -> MemoryLink:
        link = self.network.link()
        link.listen(endpoint)
        return link

    def connected(self, *endpoints: str) -> list[bool]:
        """Whether each is connected to: an answer over that connection arrives."""
        return [bool(self._answers(endpoint)) for endpoint in endpoints]

    def _answers(self, endpoint: str) -> list[tuple[PeerId, bytes]]:
        listener = self.listener(endpoint)
        for peer, _ in listener.wait(0):
            listener.send(peer, b"answer")
        answers = self.link.wait(0)
        listener.close()
        return answers


def hears(listener: MemoryLink) -> list[tuple[AnyFrame, ...]]:
    """The frames of every message that has come."""
    return [CODEC.decode(payload).frames() for _, payload in listener.wait(0)]


def test_an_endpoint_is_connected_to_once_and_frames_carry_both_incarnations() -> None:
    side = Side()
    listener = side.listener("tcp://there:1")
    side.switch.send("tcp://there:1", 9, Ping())
    side.switch.flush()
    side.switch.send("tcp://there:1", 9, Pong())
    side.switch.flush()
    frames = listener.wait(0)
    assert [CODEC.decode(payload) for _, payload in frames] == [
        Envelope(ME, 9, Ping()),
        Envelope(ME, 9, Pong()),
    ]
    assert len({peer for peer, _ in frames}) == 1


def test_an_answer_is_of_the_endpoint_and_a_visitor_is_of_none() -> None:
    side = Side()
    listener, visitor = side.listener("tcp://there:1"), side.network.link()
    side.link.listen("tcp://here:1")
    side.switch.send("tcp://there:1", 0, Ping())
    side.switch.flush()
    ((peer, _),) = listener.wait(0)
    listener.send(peer, b"answer")
    visitor.send(visitor.connect("tcp://here:1"), b"question")
    sources = {payload: side.switch.endpoint_of(peer) for peer, payload in side.link.wait(0)}
    assert sources == {b"answer": "tcp://there:1", b"question": None}


def test_after_hanging_up_the_next_frame_connects_anew() -> None:
    side = Side()
    listener = side.listener("tcp://there:1")
    side.switch.send("tcp://there:1", 0, Ping())
    side.switch.flush()
    side.switch.hang_up("tcp://there:1")
    side.switch.hang_up("tcp://there:1")
    assert listener.wait(0) == []
    side.switch.send("tcp://there:1", 0, Pong())
    side.switch.flush()
    assert len(listener.wait(0)) == 1


def test_the_connection_used_longest_ago_is_hung_up_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(switchboard_module, "MAX_CONNECTIONS", 2)
    side = Side()
    for endpoint in ("tcp://a:1", "tcp://b:1", "tcp://a:1", "tcp://c:1"):
        side.switch.send(endpoint, 0, Ping())
        side.switch.flush()
    assert side.connected("tcp://a:1", "tcp://b:1", "tcp://c:1") == [True, False, True]


def test_hearing_from_a_peer_is_a_use_of_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard_module, "MAX_CONNECTIONS", 2)
    side = Side()
    side.switch.send("tcp://a:1", 0, Ping())
    side.switch.flush()
    side.switch.send("tcp://b:1", 0, Ping())
    side.switch.flush()
    side.switch.read(side.link.connect("tcp://a:1"), CODEC.encode(Envelope(1, ME, Pong())))
    side.switch.send("tcp://c:1", 0, Ping())
    side.switch.flush()
    assert side.connected("tcp://a:1", "tcp://b:1", "tcp://c:1") == [True, False, True]


def test_the_kept_connection_never_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switchboard_module, "MAX_CONNECTIONS", 2)
    side = Side(kept="ipc://@head")
    for endpoint in ("ipc://@head", "tcp://a:1", "tcp://b:1", "tcp://c:1"):
        side.switch.send(endpoint, 0, Ping())
        side.switch.flush()
    assert side.connected("ipc://@head", "tcp://a:1", "tcp://b:1", "tcp://c:1") == [
        True,
        False,
        False,
        True,
    ]


def test_who_does_not_answer_and_is_not_used_is_hung_up_on() -> None:
    side = Side(kept="ipc://@head")
    side.listener("tcp://well:1")
    assert side.switch.next_sweep(0.0) is None

    def dialed() -> set[str]:
        return {connection.endpoint for connection in side.network._connections}

    everybody = {"ipc://@head", "tcp://well:1", "tcp://dead:1", "tcp://slow:1"}
    for endpoint in everybody:
        side.switch.send(endpoint, 0, Ping())
        side.switch.flush()
    side.switch.sweep(0.0)
    side.switch.sweep(SWEEP_S - 1)
    assert side.switch.next_sweep(SWEEP_S - 1) == 1
    assert dialed() == everybody
    side.switch.send("tcp://slow:1", 0, Ping())
    side.switch.flush()
    side.switch.sweep(SWEEP_S)
    assert dialed() == everybody - {"tcp://dead:1"}
    side.switch.sweep(2 * SWEEP_S)
    assert dialed() == {"ipc://@head", "tcp://well:1"}


def test_what_cannot_be_queued_is_told_and_counted() -> None:
    side = Side(send_queue=1)
    peer = side.link.connect("tcp://there:1")
    assert side.switch.deliver(peer, 0, [Ping()])
    assert not side.switch.deliver(peer, 0, [Ping(), Pong()])
    assert side.counters.frames_dropped == 2


def test_what_is_said_in_one_turn_leaves_in_one_piece_for_each_addressee() -> None:
    side = Side()
    listener = side.listener("tcp://there:1")
    for room in range(1, 4):
        side.switch.send("tcp://there:1", 9, SkipRooms((room,)))
    side.switch.send("tcp://there:1", 8, Ping())
    side.switch.send("tcp://there:1", 9, SkipRooms((4,)))
    assert listener.wait(0) == []
    side.switch.flush()
    side.switch.flush()
    heard = [CODEC.decode(payload) for _, payload in listener.wait(0)]
    by_addressee = {envelope.addressee: envelope.frames() for envelope in heard}
    assert len(heard) == 2
    assert by_addressee == {8: (Ping(),), 9: tuple(SkipRooms((room,)) for room in range(1, 5))}


def test_a_batch_is_bounded_in_frames_and_in_bytes() -> None:
    side = Side()
    listener = side.listener("tcp://there:1")
    for _ in range(MAX_FRAMES + 1):
        side.switch.send("tcp://there:1", 9, Ping())
    assert [len(frames) for frames in hears(listener)] == [MAX_FRAMES]
    side.switch.flush()
    assert [len(frames) for frames in hears(listener)] == [1]
    large = SkipRooms(((1 << 63) - 1,) * MAX_ROOMS_NAMED)
    for _ in range(MAX_FRAMES):
        side.switch.send("tcp://there:1", 9, large)
    heard = hears(listener)
    assert len(heard) > 1
    assert [frame for frames in heard for frame in frames] == [large] * MAX_FRAMES


def test_a_frame_that_cannot_be_encoded_costs_itself_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = Side()
    listener = side.listener("tcp://there:1")
    for room in (1, 1 << 70, 2):
        side.switch.send("tcp://there:1", 9, SkipRooms((room,)))
    side.switch.flush()
    assert hears(listener) == [(SkipRooms((1,)),), (SkipRooms((2,)),)]
    assert side.counters.errors_internal == 1
    assert "SkipRooms" in caplog.text


def test_an_endpoint_that_is_none_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    side = Side()
    side.switch.send("carrier-pigeon", 0, Ping())
    side.switch.flush()
    assert side.counters.frames_dropped == 1
    assert "carrier-pigeon" in caplog.text


def test_malformed_frames_are_dropped_counted_and_logged_a_few_times(
    caplog: pytest.LogCaptureFixture,
) -> None:
    side = Side(key=b"sixteen bytes or more")
    peer = side.link.connect("tcp://there:1")
    side.switch.send("tcp://there:1", 0, Ping())
    side.switch.flush()
    unsigned = CODEC.encode(Envelope(1, ME, Ping()))
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            assert side.switch.read(peer, unsigned) is None
    assert side.counters.frames_malformed == 50
    assert len(caplog.records) == 10
    assert "tcp://there:1" in caplog.text
    assert "auth_key" in caplog.text
