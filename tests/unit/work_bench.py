# SPDX-License-Identifier: Apache-2.0
"""An encode engine and a prefill engine on one thread, and counts of what they do.

Machines, runtimes, codec and frames are real; links and the transport are those in memory,
so that everything that is counted is the same in every run.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from epd_connector.core import admission_state as admission
from epd_connector.core.admission import AdmissionSettings, PrefillHead
from epd_connector.core.admission_state import ItemSpec, RequestState
from epd_connector.core.encode_head import EncodeHead, EncodeHeadSettings
from epd_connector.core.receive import PrefillRank, ReceiveSettings
from epd_connector.core.send import EncodeRank, SendSettings
from epd_connector.core.send_events import Claim, Encoded
from epd_connector.core.topology import Expected
from epd_connector.memory.segment import Segment
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import HeadUp, Ping, Pong, RankUp, Tally
from epd_connector.runtime.describing import HeadPlace
from epd_connector.runtime.head import HeadRuntime
from epd_connector.runtime.rank import Loaded, RankPlace, RankRuntime
from epd_connector.testing.memory_link import MemoryLink, MemoryNetwork
from epd_connector.testing.memory_transport import MemoryFabric, MemoryTransport

SLAB = 1 << 20
ROWS, WIDTH, ITEMSIZE = 4, 8, 2
NBYTES = ROWS * WIDTH * ITEMSIZE
WRITE_PARALLELISM = 4
MODEL = "model/a"
CODEC = Codec()
ENCODE, PREFILL = 1, 2
ENCODE_ADDRESS = "encode:1"
NOT_FOR_ITEMS = (HeadUp, Ping, Pong, RankUp, Tally)
"""What is said as time passes, whatever the items."""


class CountedLink:
    """A link of ``network``, whose frames, messages and wake-ups are counted."""

    def __init__(self, network: MemoryNetwork, work: "Work") -> None:
        self._link: MemoryLink = network.link()
        self._work = work
        for name in ("listen", "connect", "disconnect", "wait", "connected", "take_broken", "gone"):
            setattr(self, name, getattr(self._link, name))
        self.close = self._link.close

    def send(self, peer: int, payload: bytes) -> bool:
        frames = [f for f in CODEC.decode(payload).frames() if not isinstance(f, NOT_FOR_ITEMS)]
        self._work.frames.update(type(frame).__name__ for frame in frames)
        self._work.messages += bool(frames)
        return self._link.send(peer, payload)  # type: ignore[arg-type]

    def wake(self) -> None:
        self._work.wakes += 1
        self._link.wake()


class Work:
    """What was done since the last ``clear``."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.frames: Counter[str] = Counter()
        self.messages = 0
        self.wakes = 0


class Rows:
    """Rows of towers: every one of them is the same bytes."""

    def __init__(self, slab: Segment) -> None:
        self._slab = slab
        self._tower = Segment.create(NBYTES, shared=False, owner_tag="tower")
        self.copied_nbytes = 0
        self.held: set[int] = set()

    def stage(self, token: int, offset: int, nbytes: int) -> None:
        self._slab.buffer[offset : offset + nbytes] = self._tower.buffer[:nbytes]
        self.copied_nbytes += nbytes
        self.held.remove(token)

    def lend(self, token: int) -> Segment:
        assert token in self.held
        return self._tower

    def drop(self, token: int) -> None:
        self.held.remove(token)


class World:
    """Both engines. ``turn`` is the turn of every loop, until nothing is under way."""

    def __init__(self) -> None:
        self.work = Work()
        self.network = MemoryNetwork()
        self.transport = MemoryTransport(MemoryFabric())
        receiving = MemoryTransport(self.transport._fabric)
        slabs = [Segment.create(SLAB, shared=False, owner_tag="test") for _ in range(2)]
        self.transport.register_source(slabs[0])
        sessions = {"memory": receiving.register_destination(slabs[1])}
        self.rows = Rows(slabs[0])
        send = SendSettings(
            ENCODE, 0, 1, SLAB, 0, 120.0, 30.0, 5.0, 30.0, WRITE_PARALLELISM, 4096, 300.0
        )
        receive = ReceiveSettings(PREFILL, 0, 1, SLAB, sessions, {"memory": 0.0}, 1.0, 5.0, 4096)
        self.sender = EncodeRank(send)
        self.encode_rank = self._rank("encode", ENCODE, self.transport, sender=self.sender)
        self.prefill_rank = self._rank("prefill", PREFILL, receiving, receiver=PrefillRank(receive))
        encode = EncodeHead(EncodeHeadSettings(1, MODEL, "bfloat16", ITEMSIZE, {"image": WIDTH}))
        self.encode_head = self._head("encode", encode=encode)
        self.head = self._head("prefill", prefill=PrefillHead(_admission()))
        self._loops = [
            runtime._loop
            for runtime in (self.encode_rank, self.encode_head, self.prefill_rank, self.head)
        ]

    def _rank(
        self,
        name: str,
        incarnation: int,
        transport: MemoryTransport,
        *,
        sender: EncodeRank | None = None,
        receiver: PrefillRank | None = None,
    ) -> RankRuntime:
        link = CountedLink(self.network, self.work)
        place = RankPlace(
            0, incarnation, 10 + incarnation, f"ipc://{name}", f"tcp://{name}:2", name
        )
        runtime = RankRuntime(
            place,
            link,  # type: ignore[arg-type]
            CODEC,
            {"memory": transport},
            sender=sender,
            receiver=receiver,
            rows=self.rows if sender else None,
            staging_threads=1,
        )
        if sender is not None:
            runtime._endpoint = link.listen(place.listen)  # type: ignore[attr-defined]
        transport.set_waker(runtime._loop.wake)
        return runtime

    def _head(
        self, name: str, encode: EncodeHead | None = None, prefill: PrefillHead | None = None
    ) -> HeadRuntime:
        link = CountedLink(self.network, self.work)
        rank = ENCODE if encode else PREFILL
        place = HeadPlace(
            "role", MODEL, 20 + rank, 10 + rank, 1, f"tcp://{name}:1", f"ipc://{name}"
        )
        for where in (place.control, place.link):
            link.listen(where)  # type: ignore[attr-defined]
        return HeadRuntime(place, link, CODEC, encode=encode, prefill=prefill)  # type: ignore[arg-type]

    def turn(self, done: Callable[[], bool]) -> None:
        """Turns until ``done``; AssertionError if that takes too many."""
        for _ in range(200):
            if done():
                return
            for loop in self._loops:
                loop.turn()
        raise AssertionError("it did not come about")

    def up(self) -> None:
        """The ranks have announced themselves to their heads."""
        self.turn(lambda: self.head.ranks_up() == self.encode_head.ranks_up() == 1)

    def send(self, rooms: Iterable[int]) -> None:
        """An item of its own for each of ``rooms``, from the tower to the end of its request. All
        are granted before the first of their rows is there."""
        rooms = list(rooms)
        for room in rooms:
            item = ItemSpec(f"item-{room}", ROWS, "image", room, ENCODE_ADDRESS)
            self.head.tell(admission.Joined(f"r{room}", (item,)))
            self.head.tell(admission.Needed(f"r{room}", (item.hash,)))
            assert self.encode_rank.post(Claim(room, item.hash, ROWS))
        self.turn(lambda: set(rooms) <= {r.room for r in self.sender._rooms if r.grants})
        for room in rooms:
            self.rows.held.add(room)
            rows = Encoded(f"item-{room}", room, ROWS, WIDTH, "bfloat16", NBYTES, True)
            assert self.encode_rank.post(rows)
        self.turn(lambda: all(self._ready(room) for room in rooms))
        for room in rooms:
            assert self.head.promise(f"item-{room}")
            self.head.tell(admission.Loading(f"r{room}", f"item-{room}"))
        self.head.tell(admission.PassEnded())
        for room in rooms:
            assert self.prefill_rank.post(Loaded(room))
        for room in rooms:
            self.head.tell(admission.Left(f"r{room}"))
        self.turn(self._at_rest)

    def _ready(self, room: int) -> bool:
        return self.head.ask(f"r{room}") is RequestState.READY

    def _at_rest(self) -> bool:
        balance = self.head._prefill.balance()  # type: ignore[union-attr]
        busy = balance.leased + balance.landed + balance.quarantined
        return not busy and self.sender.idle()


def _admission() -> AdmissionSettings:
    return AdmissionSettings(
        ranks=1,
        slab_nbytes=SLAB,
        shares_slab=False,
        shard_min_bytes=None,
        receive_timeout_s=60.0,
        resolve_timeout_s=5.0,
        failed_peer_s=30.0,
        encode_locally=False,
        max_rooms=4096,
        expected=Expected(MODEL, "bfloat16", WIDTH),
    )
