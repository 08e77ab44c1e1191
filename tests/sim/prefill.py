# SPDX-License-Identifier: Apache-2.0
"""A prefill engine: its ranks' machines, their memory, and the link to a head.

Does not own the head: ``scripted`` has one that decides as little as a head can, ``heads``
the real one.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from epd_connector.core.effects import Effect, Hangup, Probe, Send, TellHead
from epd_connector.core.receive import (
    Broken,
    FromSender,
    PrefillRank,
    Probed,
    ReceiveEvent,
    ReceiveSettings,
    Tick,
)
from epd_connector.protocol.frames import (
    AnyFrame,
    Grant,
    RoomLanded,
    RoomReleased,
)
from epd_connector.rows import Layout, Shard, wanted_rows
from tests.sim.memory import (
    FENCE_S,
    ROW_NBYTES,
    Owner,
    ReceiveMemory,
    rows_bytes,
)
from tests.sim.network import Alarm

if TYPE_CHECKING:
    from tests.sim.ground import Ground


class Head(Protocol):
    """What a prefill engine needs of whatever plays its head."""

    def hear(self, rank: int, frame: AnyFrame) -> None: ...


class PrefillProcess:
    """One prefill rank: a process with a machine and a receive slab."""

    def __init__(
        self, world: "Ground", engine: "PrefillEngine", rank: int, ranks: int, session: str
    ) -> None:
        self.world = world
        self.engine = engine
        self.rank = rank
        self.incarnation = world.new_id()
        self.memory = memory = world.fabric.slabs[session]
        self.machine = PrefillRank(
            ReceiveSettings(
                incarnation=self.incarnation,
                rank=rank,
                ranks=ranks,
                slab_nbytes=memory.nbytes,
                sessions={"shm": session},
                fences={"shm": FENCE_S},
                heartbeat_s=1.0,
                peer_timeout_s=5.0,
                max_rooms=1000,
            )
        )
        self._offsets: dict[int, int] = {}
        self._dialed: set[str] = set()
        self._alarm = Alarm(world.timeline, self.machine.next_deadline, lambda: self.tell(Tick()))

    def hear(self, endpoint: str, sender: int, addressee: int, frame: AnyFrame) -> None:
        self.tell(FromSender(endpoint, sender, addressee, frame))

    def tell(self, event: ReceiveEvent) -> None:
        if not self.memory.alive:
            return
        for effect in self.machine.handle(event, self.world.now):
            self._carry_out(effect)
        self.machine.check()
        self._alarm.set()

    def hang_up(self, endpoint: str) -> None:
        """Whoever listened at ``endpoint`` was killed: its connections break."""
        if endpoint in self._dialed:
            self.world.soon(lambda: self.tell(Broken(endpoint)))

    def assert_rows(self, hash: str, shard: Shard, offset: int) -> None:
        found = bytes(self.memory.data[offset : offset + shard.rows * ROW_NBYTES])
        assert found == rows_bytes(hash, *shard), f"{hash}, {shard}, rank {self.rank}"

    def kill(self) -> None:
        self.memory.alive = False
        self.world.network.kill(self.incarnation)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(frame=frame):
                if isinstance(frame, Grant) and frame.nbytes:
                    owner = Owner(effect.addressee, frame.room, frame.grant, frame.nbytes)
                    before = self.memory.owners.setdefault(frame.offset, owner)
                    assert before == owner, f"{before} may still write where {owner} is to"
                    self._offsets[frame.room] = frame.offset
                self._dialed.add(effect.endpoint)
                self.world.to_encode(self, effect)
            case Probe(endpoint=endpoint):
                self.world.soon(
                    lambda: self.tell(Probed(endpoint, gone=not self.world.listens(endpoint)))
                )
            case TellHead(frame=frame):
                if isinstance(frame, RoomLanded | RoomReleased):
                    self.memory.owners.pop(self._offsets.pop(frame.room, -1), None)
                self.engine.to_head(self.rank, frame)
            case Hangup(endpoint=endpoint):
                self._dialed.discard(endpoint)
            case _:
                raise AssertionError(f"a prefill rank does not ask for {effect}")


class PrefillEngine:
    """The ranks of one prefill engine, and a link to its head that is slow but keeps order.

    ``shares_slab``: all ranks have one slab. ``head`` is set by whoever makes the engine,
    before anything happens.
    """

    head: Head

    def __init__(self, world: "Ground", ranks: int, slab_nbytes: int) -> None:
        self.world = world
        self.shares_slab = ranks > 1 and world.rng.random() < 0.4
        names = [f"slab-{world.new_id()}" for _ in range(1 if self.shares_slab else ranks)]
        world.fabric.slabs.update({name: ReceiveMemory(slab_nbytes) for name in names})
        sessions = names * ranks if self.shares_slab else names
        self.ranks = [
            PrefillProcess(world, self, rank, ranks, sessions[rank]) for rank in range(ranks)
        ]
        self._links: dict[tuple[str, int], float] = {}

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()

    def to_head(self, rank: int, frame: AnyFrame) -> None:
        self._in_order(("up", rank), lambda: self.head.hear(rank, frame))

    def to_ranks(self, event: ReceiveEvent) -> None:
        for process in self.ranks:
            self.down(process.rank, partial(process.tell, event))

    def down(self, rank: int, act: Callable[[], None]) -> None:
        """``act`` happens when the head's word of now has reached rank ``rank``."""
        self._in_order(("down", rank), act)

    def _in_order(self, link: tuple[str, int], act: Callable[[], None]) -> None:
        when = self.world.now + self.world.rng.uniform(0.0, 0.01)
        when = self._links[link] = max(when, self._links.get(link, 0.0) + 1e-9)
        self.world.timeline.at(when, act)

    def assert_rows(self, hash: str, rows: int, offset: int, layout: Layout) -> None:
        """Every rank has what it is to have, and nothing else was written over it."""
        for process in self.ranks:
            process.assert_rows(hash, self.in_slab(process.rank, rows, layout), offset)

    def in_slab(self, rank: int, rows: int, layout: Layout) -> Shard:
        """Rows of an item that lie in the slab of rank ``rank`` once all have landed."""
        shared = layout is Layout.SHARED
        return wanted_rows(rows, len(self.ranks), rank, sharded=layout.sharded and not shared)
