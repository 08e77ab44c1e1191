# SPDX-License-Identifier: Apache-2.0
"""A rank's runtime, turned by hand: its head, its peers, its transports, its staging threads."""

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from epd_connector.core.effects import DropRows, TellHead
from epd_connector.core.receive import PrefillRank, ReceiveSettings
from epd_connector.core.send import EncodeRank, SendSettings
from epd_connector.core.send_events import Claim, Encoded
from epd_connector.errors import Code, Failure
from epd_connector.link.base import PeerId
from epd_connector.memory.segment import Segment
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import (
    Abandon,
    AnyFrame,
    EndRoom,
    Envelope,
    Grant,
    HeadUp,
    Hello,
    Landed,
    Open,
    RankAddress,
    RankUp,
    Refused,
    RoomFailed,
    RoomLanded,
    RoomLoaded,
    RoomReceivers,
    RoomReleased,
    Tally,
    Welcome,
)
from epd_connector.rows import Layout
from epd_connector.runtime import rank as rank_module
from epd_connector.runtime.rank import Loaded, RankPlace, RankPost, RankRuntime
from epd_connector.testing.memory_link import MemoryNetwork
from epd_connector.testing.memory_transport import MemoryFabric, MemoryTransport
from epd_connector.transport.base import Span

TOKEN, ME, PEER = 77, 1000, 2000
HEAD, HERE, THERE = "ipc://@head", "tcp://here:1", "tcp://there:1"
CODEC = Codec()
SLAB = 1 << 20
ROWS, WIDTH = 4, 8
NBYTES = ROWS * WIDTH * 2
GRANT = Grant(1, 1, ROWS, 0, ROWS, WIDTH, "bfloat16", False, "memory", 256, NBYTES)


class Party:
    """A head or a peer."""

    def __init__(self, network: MemoryNetwork, incarnation: int, endpoint: str = "") -> None:
        self.link = network.link()
        self.incarnation = incarnation
        self.peers: list[PeerId] = []
        if endpoint:
            self.link.listen(endpoint)

    def say(self, frame: AnyFrame, addressee: int = ME, sender: int | None = None) -> None:
        payload = CODEC.encode(Envelope(sender or self.incarnation, addressee, frame))
        peer = self.peers[-1] if self.peers else self.link.connect(HERE)
        assert self.link.send(peer, payload)

    def hears(self) -> list[AnyFrame]:
        heard = self.link.wait(0)
        self.peers += [peer for peer, _ in heard]
        return [f for _, payload in heard for f in CODEC.decode(payload).frames()]


class Rows:
    """Rows that are bytes: token ``n`` is staged as the byte ``n``."""

    def __init__(self, slab: Segment) -> None:
        self.slab = slab
        self.broken: set[int] = set()
        self.gone: list[int] = []

    def stage(self, token: int, offset: int, nbytes: int) -> None:
        if token in self.broken:
            raise ValueError("no such memory")
        ctypes.memset(self.slab.address + offset, token, nbytes)
        self.gone.append(token)

    def lend(self, token: int) -> Segment:
        lent = Segment.create(SLAB, shared=False, owner_tag="test")
        ctypes.memset(lent.address, token, SLAB)
        return lent

    def drop(self, token: int) -> None:
        self.gone.append(token)


class Bench:
    """One rank with its head and one peer. The loop's thread is the test's."""

    def __init__(
        self, *, sends: bool = False, auto: bool = True, rank: int = 0, ranks: int = 1
    ) -> None:
        self.network = MemoryNetwork()
        self.head = Party(self.network, TOKEN, HEAD)
        self.peer = Party(self.network, PEER, "" if sends else THERE)
        self.fabric = MemoryFabric()
        self.transport = MemoryTransport(self.fabric, auto=auto)
        self.slab = Segment.create(SLAB, shared=False, owner_tag="test")
        self.rows = Rows(self.slab)
        link = self.network.link()
        link.listen(HERE)
        send = SendSettings(ME, rank, ranks, SLAB, 0, 120.0, 30.0, 5.0, 30.0, 4, 64, 300.0)
        sessions = {}
        if sends:
            self.transport.register_source(self.slab)
        else:
            sessions = {"memory": self.transport.register_destination(self.slab)}
        receive = ReceiveSettings(ME, 0, 1, SLAB, sessions, {"memory": 0.0}, 1.0, 5.0, 64)
        self.rank = RankRuntime(
            RankPlace(rank, ME, TOKEN, HEAD, HERE, "here"),
            link,
            CODEC,
            {"memory": self.transport},
            sender=EncodeRank(send) if sends else None,
            receiver=None if sends else PrefillRank(receive),
            rows=self.rows,
            staging_threads=2,
        )
        self.told: list[AnyFrame] = []

    def turn(self) -> None:
        self.rank._loop.turn()
        self.told += self.head.hears()

    def post(self, *posts: RankPost) -> None:
        for post in posts:
            assert self.rank.post(post)
        self.turn()

    def until(self, done: Callable[[], bool]) -> None:
        """Turns until a staging thread has done its work."""
        end = time.monotonic() + 30
        while not done():
            assert time.monotonic() < end
            self.turn()
            threading.Event().wait(0.001)

    def introduced(self) -> str:
        """The peer has shown its slab; its session."""
        destination = Segment.create(SLAB, shared=False, owner_tag="peer")
        self.destination = destination
        session = self.fabric.announce(destination)
        self.peer.say(Hello(0, 1, SLAB, {"memory": session}))
        self.turn()
        assert self.peer.hears() == [Welcome()]
        return session

    def of(self, kind: type[AnyFrame]) -> list[AnyFrame]:
        return [frame for frame in self.told if isinstance(frame, kind)]

    def close(self) -> None:
        self.rank.close(0)
        self.slab.close()


def encoded(token: int, hash: str = "item") -> Encoded:
    return Encoded(hash, token, ROWS, WIDTH, "bfloat16", NBYTES)


def opening(room: int = 1, adverts: dict[str, str] | None = None) -> Open:
    sender = RankAddress(THERE, PEER, {"memory": "fabric"} if adverts is None else adverts)
    return Open(room, ROWS, WIDTH, "bfloat16", 2, Layout.WHOLE, 256, (sender,))


# --- the head -------------------------------------------------------------------------------


def test_a_rank_announces_itself_until_its_head_has_heard_and_now_and_then_after() -> None:
    bench = Bench()
    up = RankUp(0, "", {"memory": "fabric"}, SLAB)
    for now in (100.0, 100.1, 100.3):
        bench.rank.on_turn(now)
    assert bench.head.hears() == [up, up]
    payload = CODEC.encode(Envelope(TOKEN, ME, HeadUp()))
    bench.rank.on_frame(bench.rank._link.connect(HEAD), payload, 100.4)
    assert bench.rank.next_wait(100.4) == pytest.approx(rank_module.KEEP_S)
    bench.rank.on_turn(100.4 + rank_module.KEEP_S - 0.1)
    assert bench.head.hears() == []
    bench.rank.on_turn(100.4 + rank_module.KEEP_S)
    assert bench.head.hears() == [up]


def test_the_head_is_heard_only_with_its_token() -> None:
    bench = Bench()
    bench.turn()
    bench.head.say(opening(), sender=TOKEN + 1)
    bench.turn()
    assert bench.peer.hears() == []
    assert bench.rank.counters.frames_stale == 1
    bench.head.say(Landed(1, 1))
    bench.turn()
    assert bench.rank.counters.frames_malformed == 1


def test_a_load_that_was_carried_out_is_told() -> None:
    bench = Bench()
    bench.post(Loaded(5))
    assert bench.of(RoomLoaded) == [RoomLoaded(5)]


# --- receiving ------------------------------------------------------------------------------


def test_a_room_is_granted_and_lands() -> None:
    bench = Bench()
    bench.turn()
    bench.head.say(opening())
    bench.turn()
    hello, grant = bench.peer.hears()
    assert isinstance(hello, Hello)
    assert isinstance(grant, Grant)
    assert (grant.room, grant.offset, grant.nbytes, grant.transport) == (1, 256, NBYTES, "memory")
    bench.peer.say(Landed(1, grant.grant))
    bench.turn()
    assert bench.of(RoomLanded) == [RoomLanded(1, NBYTES)]


@pytest.mark.parametrize("adverts", [{}, {"memory": "another fabric"}, {"shm": "fabric"}])
def test_a_room_of_an_engine_that_no_transport_reaches_fails_at_once(
    adverts: dict[str, str],
) -> None:
    bench = Bench()
    bench.turn()
    bench.head.say(opening(adverts=adverts))
    bench.turn()
    assert bench.peer.hears() == []
    (failed,) = bench.of(RoomFailed)
    assert isinstance(failed, RoomFailed)
    assert failed.failure.code is Code.UNREACHABLE
    assert bench.of(RoomReleased) == [RoomReleased(1)]


def test_an_abandoned_room_is_told_safe_when_its_writer_has_answered() -> None:
    bench = Bench()
    bench.turn()
    bench.head.say(opening())
    bench.head.say(Abandon(1))
    bench.turn()
    grant = next(frame for frame in bench.peer.hears() if isinstance(frame, Grant))
    assert bench.of(RoomReleased) == []
    bench.peer.say(Refused(1, grant.grant, Failure(Code.CANCELLED, "not needed")))
    bench.turn()
    assert bench.of(RoomReleased) == [RoomReleased(1)]


# --- sending --------------------------------------------------------------------------------


def test_rows_are_staged_written_and_answered_for() -> None:
    bench = Bench(sends=True)
    bench.introduced()
    bench.post(Claim(1, "item", ROWS), encoded(9))
    bench.peer.say(GRANT)
    answers: list[AnyFrame] = []

    def answered() -> bool:
        answers.extend(bench.peer.hears())
        return bool(answers)

    bench.until(answered)
    assert answers == [Landed(1, 1)]
    assert ctypes.string_at(bench.destination.address + 256, NBYTES) == b"\x09" * NBYTES
    assert bench.rows.gone == [9]
    bench.until(lambda: bool(bench.of(Tally)))
    (tally,) = bench.of(Tally)
    assert isinstance(tally, Tally)
    assert tally.counters["bytes_sent"] == NBYTES
    assert len(tally.encoded_to_landed_s) == 1
    bench.close()


def test_an_item_whose_staging_fails_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(sends=True)
    bench.introduced()
    bench.rows.broken.add(9)
    bench.post(Claim(1, "item", ROWS), encoded(9), Claim(2, "other", ROWS))
    bench.post(Encoded("other", 10, ROWS, WIDTH, "bfloat16", NBYTES))
    answers: dict[int, AnyFrame] = {}
    bench.peer.say(GRANT)
    bench.peer.say(Grant(2, 2, ROWS, 0, ROWS, WIDTH, "bfloat16", False, "memory", 512, NBYTES))

    def answered() -> bool:
        for frame in bench.peer.hears():
            assert isinstance(frame, Landed | Refused)
            answers[frame.room] = frame
        return len(answers) == 2

    bench.until(answered)
    assert answers[2] == Landed(2, 2)
    refused = answers[1]
    assert isinstance(refused, Refused)
    assert refused.failure.code is Code.ENCODE_FAILED
    assert "no such memory" in refused.failure.reason
    assert "staging 64 bytes failed" in caplog.text
    bench.close()


def test_rows_that_nobody_claims_are_dropped_at_once() -> None:
    bench = Bench(sends=True)
    bench.post(encoded(9))
    assert bench.rows.gone == [9]
    bench.close()


def test_rows_that_wait_when_the_staging_threads_are_closed_are_dropped() -> None:
    bench = Bench(sends=True)
    bench.rank._staging.close(10)
    bench.introduced()
    bench.post(Claim(1, "item", ROWS), encoded(9))
    bench.peer.say(GRANT)
    bench.turn()
    bench.turn()
    (refused,) = bench.peer.hears()
    assert isinstance(refused, Refused)
    assert refused.failure.code is Code.OVERLOADED
    assert bench.rows.gone == [9]
    bench.close()


def test_a_grant_over_a_transport_that_is_not_here_is_refused_with_those_that_are() -> None:
    bench = Bench(sends=True)
    bench.peer.say(Hello(0, 1, SLAB, {"pigeon": "x"}))
    bench.post(Claim(1, "item", ROWS), encoded(9))
    bench.peer.say(Grant(1, 1, ROWS, 0, ROWS, WIDTH, "bfloat16", False, "pigeon", 256, NBYTES))
    answers: list[AnyFrame] = []

    def refused() -> bool:
        answers.extend(frame for frame in bench.peer.hears() if isinstance(frame, Refused))
        return bool(answers)

    bench.until(refused)
    (answer,) = answers
    assert isinstance(answer, Refused)
    assert answer.failure.code is Code.WRITE_FAILED
    assert "'pigeon'" in answer.failure.reason
    assert "memory" in answer.failure.reason
    bench.close()


def test_a_room_that_ended_without_rows_is_refused() -> None:
    bench = Bench(sends=True)
    bench.introduced()
    bench.post(Claim(1, "item", ROWS))
    bench.head.say(EndRoom(1, Failure(Code.ENCODE_FAILED, "aborted")))
    bench.turn()
    bench.peer.peers.clear()
    bench.peer.say(GRANT)
    bench.turn()
    (refused,) = bench.peer.hears()
    assert isinstance(refused, Refused)
    assert "aborted" in refused.failure.reason
    bench.close()


def test_a_room_whose_receivers_this_rank_does_not_serve_is_not_staged() -> None:
    bench = Bench(sends=True, ranks=2, rank=1)
    for room in (1, 2):
        bench.post(Claim(room, f"item-{room}", ROWS))
    bench.head.say(RoomReceivers(1, 1))
    bench.head.say(RoomReceivers(2, 2))
    bench.turn()
    bench.post(encoded(7, "item-1"), encoded(8, "item-2"))
    bench.until(lambda: bench.rows.gone == [7, 8])
    assert ctypes.string_at(bench.slab.address, NBYTES) == b"\x08" * NBYTES
    bench.close()


def test_an_effect_that_cannot_be_carried_out_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(sends=True)

    def broken(token: int) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(bench.rows, "drop", broken)
    with pytest.raises(RuntimeError):
        bench.rank._decided([DropRows(9), TellHead(RoomLoaded(5))], 0.0)
    assert bench.rank.next_wait(0.0) == 0.0
    bench.turn()
    assert bench.of(RoomLoaded) == [RoomLoaded(5)]
    bench.close()


# --- the end --------------------------------------------------------------------------------


def test_closing_with_a_write_under_way_is_bounded_and_starts_no_new_one() -> None:
    bench = Bench(sends=True, auto=False)
    session = bench.introduced()
    bench.post(Claim(1, "item", ROWS), encoded(9))
    bench.peer.say(GRANT)
    bench.until(lambda: bool(bench.transport.pending()))
    (write,) = bench.transport.pending()
    assert (write.session, write.spans[0].destination) == (session, 256)
    assert isinstance(write.spans[0], Span)
    bench.rank.close(0.05)
    bench.rank.close(0.05)
    assert bench.transport.writes_started == 1
    assert not bench.rank.post(Loaded(1))
    assert not [t for t in threading.enumerate() if t.name.startswith("epd-")]


def test_making_a_rank_starts_nothing() -> None:
    before = threading.enumerate()
    bench = Bench(sends=True)
    assert threading.enumerate() == before
    assert bench.head.hears() == []
    bench.close()
