# SPDX-License-Identifier: Apache-2.0
"""A prefill engine: its ranks' machines, their memory, and the link to a head.

The head is any object with ``hear``; ``ScriptedHead`` decides as little as a head can.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from epd_connector.core.effects import Effect, Hangup, Send, TellHead
from epd_connector.core.receive import (
    Abandoned,
    FromSender,
    Opened,
    PrefillRank,
    ReceiveEvent,
    ReceiveSettings,
    Tick,
)
from epd_connector.memory.slab import Region, RegionState, Slab
from epd_connector.protocol.frames import (
    AnyFrame,
    Grant,
    Open,
    RankAddress,
    RoomFailed,
    RoomLanded,
    RoomReleased,
)
from epd_connector.rows import largest_shard, wanted_rows
from tests.sim.memory import (
    DTYPE,
    FENCE_S,
    ITEMSIZE,
    ROW_NBYTES,
    WIDTH,
    Owner,
    ReceiveMemory,
    rows_bytes,
)

if TYPE_CHECKING:
    from tests.sim.world import World

RECEIVE_SLAB = 2048


class Head(Protocol):
    """What a prefill engine needs of whatever plays its head."""

    def hear(self, rank: int, frame: AnyFrame) -> None: ...


class PrefillProcess:
    """One prefill rank: a process with a machine and a receive slab."""

    def __init__(self, world: "World", engine: "PrefillEngine", rank: int, ranks: int) -> None:
        self.world = world
        self.engine = engine
        self.rank = rank
        self.incarnation = world.new_id()
        self.memory = ReceiveMemory(RECEIVE_SLAB)
        session = f"slab-{self.incarnation}"
        world.fabric.slabs[session] = self.memory
        self.machine = PrefillRank(
            ReceiveSettings(
                incarnation=self.incarnation,
                rank=rank,
                ranks=ranks,
                slab_nbytes=RECEIVE_SLAB,
                sessions={"shm": session},
                fences={"shm": FENCE_S},
                heartbeat_s=1.0,
                peer_timeout_s=5.0,
                max_rooms=1000,
            )
        )
        self._offsets: dict[int, int] = {}
        self._wake_at: float | None = None

    def hear(self, endpoint: str, sender: int, addressee: int, frame: AnyFrame) -> None:
        self.tell(FromSender(endpoint, sender, addressee, frame))

    def tell(self, event: ReceiveEvent) -> None:
        if not self.memory.alive:
            return
        for effect in self.machine.handle(event, self.world.now):
            self._carry_out(effect)
        self.machine.check()
        self._sleep()

    def kill(self) -> None:
        self.memory.alive = False
        self.world.network.kill(self.incarnation)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(frame=frame):
                if isinstance(frame, Grant):
                    owner = Owner(effect.addressee, frame.room, frame.grant, frame.nbytes)
                    self.memory.owners[frame.offset] = owner
                    self._offsets[frame.room] = frame.offset
                self.world.to_encode(self, effect)
            case TellHead(frame=frame):
                if isinstance(frame, RoomLanded | RoomReleased):
                    self.memory.owners.pop(self._offsets.pop(frame.room, -1), None)
                self.engine.to_head(self.rank, frame)
            case Hangup():
                pass
            case _:
                raise AssertionError(f"a prefill rank does not ask for {effect}")

    def _sleep(self) -> None:
        due = self.machine.next_deadline()
        if due is not None and (self._wake_at is None or due < self._wake_at):
            self._wake_at = due
            self.world.timeline.at(due, lambda: self._wake(due))

    def _wake(self, due: float) -> None:
        if self._wake_at == due:
            self._wake_at = None
            self.tell(Tick())


class PrefillEngine:
    """The ranks of one prefill engine, and a link to its head that is slow but keeps order."""

    def __init__(self, world: "World", ranks: int) -> None:
        self.world = world
        self.ranks = [PrefillProcess(world, self, rank, ranks) for rank in range(ranks)]
        self.head: Head = ScriptedHead(world, self)
        self._links: dict[tuple[str, int], float] = {}

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()

    def to_head(self, rank: int, frame: AnyFrame) -> None:
        self._in_order(("up", rank), lambda: self.head.hear(rank, frame))

    def to_ranks(self, event: ReceiveEvent) -> None:
        for process in self.ranks:
            self._in_order(
                ("down", process.rank),
                partial(process.tell, event),
            )

    def _in_order(self, link: tuple[str, int], act: Callable[[], None]) -> None:
        when = self.world.now + self.world.rng.uniform(0.0, 0.01)
        when = self._links[link] = max(when, self._links.get(link, 0.0) + 1e-9)
        self.world.timeline.at(when, act)


@dataclass(slots=True, eq=False)
class Receipt:
    """One room as a head knows it. ``told``: what each rank said of it, and how often."""

    room: int
    hash: str
    rows: int
    sharded: bool
    region: Region | None = None
    abandoned: bool = False
    ready: bool = False
    told: dict[int, Counter[str]] = field(default_factory=dict)

    def ranks_that(self, said: str) -> int:
        return sum(1 for counter in self.told.values() if counter[said])


class ScriptedHead:
    """Opens every room as soon as there is memory, and gives each a time to land."""

    def __init__(self, world: "World", engine: PrefillEngine) -> None:
        self.world = world
        self.engine = engine
        self.slab = Slab(RECEIVE_SLAB)
        self.receipts: dict[int, Receipt] = {}
        self._queue: deque[Receipt] = deque()

    def want(self, room: int, hash: str, rows: int) -> None:
        """Receive this item through this room."""
        receipt = Receipt(room, hash, rows, sharded=self.world.rng.random() < 0.5)
        self._queue.append(receipt)
        self._advance()

    def give_up(self, receipt: Receipt) -> None:
        """Not wanted any more, or too late."""
        if receipt.ready or receipt.abandoned:
            return
        receipt.abandoned = True
        assert receipt.region is not None
        self.slab.move(receipt.region, RegionState.QUARANTINED)
        self.engine.to_ranks(Abandoned(receipt.room))
        self.world.skip(receipt.room)

    def hear(self, rank: int, frame: AnyFrame) -> None:
        assert isinstance(frame, RoomLanded | RoomFailed | RoomReleased)
        receipt = self.receipts[frame.room]
        receipt.told[rank][type(frame).__name__] += 1
        match frame:
            case RoomFailed():
                self.give_up(receipt)
            case RoomLanded() if receipt.ranks_that("RoomLanded") == len(self.engine.ranks):
                self._landed(receipt)
        everybody = receipt.ranks_that("RoomReleased") == len(self.engine.ranks)
        if everybody and receipt.region is not None:
            self._free(receipt)

    def assert_at_rest(self) -> None:
        assert not self._queue
        assert self.slab.balance().free == self.slab.capacity, self.slab.balance()
        for receipt in self.receipts.values():
            for rank, told in receipt.told.items():
                where = f"room {receipt.room}, rank {rank}: {told}"
                assert max(told.values(), default=0) <= 1, where
                assert told["RoomLanded"] + told["RoomFailed"] <= 1, where
                assert receipt.ready == (not told["RoomReleased"]), where
                assert receipt.ready <= told["RoomLanded"], where

    def _advance(self) -> None:
        ranks = len(self.engine.ranks)
        while self._queue:
            receipt = self._queue[0]
            largest = largest_shard(receipt.rows, ranks, sharded=receipt.sharded)
            receipt.region = self.slab.lease(largest * ROW_NBYTES)
            if receipt.region is None:
                return
            self._queue.popleft()
            self._open(receipt, receipt.region)

    def _open(self, receipt: Receipt, region: Region) -> None:
        self.receipts[receipt.room] = receipt
        receipt.told = {rank: Counter() for rank in range(len(self.engine.ranks))}
        frame = Open(
            room=receipt.room,
            rows=receipt.rows,
            width=WIDTH,
            dtype=DTYPE,
            itemsize=ITEMSIZE,
            sharded=receipt.sharded,
            offset=region.offset,
            senders=self._senders(),
        )
        self.engine.to_ranks(Opened(frame, "shm"))
        patience = 30.0
        if self.world.unlucky(0.2):
            patience = self.world.rng.uniform(0.0, 3.0)
        self.world.timeline.after(patience, lambda: self.give_up(receipt))

    def _senders(self) -> tuple[RankAddress, ...]:
        """Who the encode engine is, or, now and then, who it was."""
        past = self.world.encode.past
        if past and self.world.unlucky(0.2):
            return past[-1]
        return self.world.encode.addresses()

    def _landed(self, receipt: Receipt) -> None:
        if receipt.abandoned:
            return
        receipt.ready = True
        self.world.landed += 1
        assert receipt.region is not None
        self.slab.move(receipt.region, RegionState.LANDED)
        self._assert_published(receipt, receipt.region)
        self.world.skip(receipt.room)
        self.world.timeline.after(self.world.rng.uniform(0.0, 2.0), lambda: self._used(receipt))

    def _used(self, receipt: Receipt) -> None:
        assert receipt.region is not None
        self._assert_published(receipt, receipt.region)
        self._free(receipt)

    def _free(self, receipt: Receipt) -> None:
        assert receipt.region is not None
        self.slab.free(receipt.region)
        receipt.region = None
        self._advance()

    def _assert_published(self, receipt: Receipt, region: Region) -> None:
        """Every rank holds its rows, and nothing else was written over them."""
        ranks = len(self.engine.ranks)
        for process in self.engine.ranks:
            shard = wanted_rows(receipt.rows, ranks, process.rank, sharded=receipt.sharded)
            end = region.offset + shard.rows * ROW_NBYTES
            found = bytes(process.memory.data[region.offset : end])
            assert found == rows_bytes(receipt.hash, *shard), f"{receipt}, rank {process.rank}"
