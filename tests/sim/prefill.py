# SPDX-License-Identifier: Apache-2.0
"""The ranks of a prefill engine: their machines, their memory, and the links to their head.

Does not own the head (``heads``), or the requests (``jobs``).
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from epd_connector.core.effects import Hangup, Probe, Send, TellHead
from epd_connector.core.receive import (
    Broken,
    FromSender,
    PrefillRank,
    Probed,
    ReceiveEvent,
    ReceiveSettings,
    Tick,
)
from epd_connector.protocol.frames import AnyFrame, Grant, RoomLanded, RoomReleased
from epd_connector.rows import Layout, shard_rows, wanted_rows
from tests.sim.audits import PrefillAudit
from tests.sim.encode import MAX_ROOMS, PEER_TIMEOUT_S, EncodeProcess
from tests.sim.invariants import NothingIsLeft, PublishedBytesAreRight
from tests.sim.memory import FENCE_S, ROW_NBYTES, ReceiveMemory, Session
from tests.sim.network import Host
from tests.sim.process import MachineProcess, Process

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet
    from tests.sim.heads import PrefillHeadProcess

HEARTBEAT_S = 1.0


class PrefillProcess(MachineProcess):
    """One prefill rank: a process with a machine and a receive slab."""

    def __init__(
        self, world: "Fleet", name: str, host: Host, engine: "PrefillEngine", place: int
    ) -> None:
        super().__init__(world, name, host)
        self.fleet = world
        self.engine = engine
        self.rank = place

    def start(self, ranks: int, memory: ReceiveMemory) -> None:
        session = f"slab of {self.name}"
        self.memory = memory
        self.fleet.fabric.sessions[session] = Session(memory, self)
        self.machine: PrefillRank = PrefillRank(
            ReceiveSettings(
                incarnation=self.incarnation,
                rank=self.rank,
                ranks=ranks,
                slab_nbytes=memory.nbytes,
                sessions={"wire": session},
                fences={"wire": FENCE_S},
                heartbeat_s=HEARTBEAT_S,
                peer_timeout_s=PEER_TIMEOUT_S,
                max_rooms=MAX_ROOMS,
            )
        )
        self._audit = PrefillAudit(self, self.machine)
        self.wind_up()

    def hear(self, endpoint: str, sender: int, addressee: int, frame: AnyFrame) -> None:
        """An encode rank speaks."""
        self._take(FromSender(endpoint, sender, addressee, frame))

    def broken(self, endpoint: str) -> None:
        self._take(Broken(endpoint))

    def tell(self, event: ReceiveEvent, source: str = "head") -> None:
        self.run(partial(self._take, event), source)

    def writer_of(self, room: int) -> int:
        """Which process wrote this rank's rows of ``room``, which has landed."""
        writer = self._audit.writers.get(room)
        PublishedBytesAreRight.hold(
            writer is not None, lambda: f"{self.name}: room {room} has not landed"
        )
        assert writer is not None
        return writer

    def audit(self) -> None:
        self._audit.hold()

    def kill(self) -> None:
        super().kill()
        self.fleet.network.ended(self)
        self.memory.grantor_died(self.incarnation)
        self.fleet.fabric.reader_killed(self)

    def hold_rest(self) -> None:
        rooms = self.machine.rooms()
        NothingIsLeft.hold(self.machine.idle(), lambda: f"{self.name}: rooms {rooms}")
        owners = self.memory.owners
        NothingIsLeft.hold(not owners, lambda: f"{self.name}: granted {owners}")

    def _take(self, event: ReceiveEvent) -> None:
        self._audit.told(event)
        self.drive(event, lambda: list(self.machine.handle(event, self.world.now)))

    def _tick(self) -> None:
        self._take(Tick())

    def decided(self, effect: object) -> None:
        self._audit.decided(effect)
        match effect:
            case Send(addressee=writer, frame=Grant() as frame):
                self.memory.grant(self.incarnation, writer, frame)
            case TellHead(frame=RoomLanded(room=room) | RoomReleased(room=room)):
                self.memory.revoke(self.incarnation, room)

    def carry_out(self, effect: object) -> None:
        match effect:
            case Send(endpoint=endpoint, addressee=addressee, frame=frame):
                self._say(endpoint, addressee, frame)
            case TellHead(frame=frame):
                self.engine.to_head(self.rank, frame)
            case Probe(endpoint=endpoint):
                answer = partial(self._probed, endpoint)
                self.fleet.network.probe(self, endpoint, answer)
            case Hangup(endpoint=endpoint):
                self.fleet.network.hang_up(self, endpoint)
            case _:
                raise AssertionError(f"a prefill rank does not ask for {effect}")

    def _probed(self, endpoint: str, gone: bool) -> None:
        self.tell(Probed(endpoint, gone), "prober")

    def _say(self, endpoint: str, addressee: int, frame: AnyFrame) -> None:
        def deliver(receiver: Process) -> None:
            assert isinstance(receiver, EncodeProcess)
            receiver.hear(self.incarnation, addressee, frame)

        self.fleet.network.dial(self, endpoint, deliver)


class PrefillEngine:
    """The ranks of one start of a prefill engine, and links to its head that keep order.

    ``shares_slab``: all ranks have one slab. ``head`` is set by whoever makes the engine,
    before anything happens.
    """

    head: "PrefillHeadProcess"

    def __init__(
        self, world: "Fleet", name: str, host: Host, ranks: int, slab_nbytes: int, shares_slab: bool
    ) -> None:
        self.world = world
        self.host = host
        self.shares_slab = shares_slab
        slabs = [ReceiveMemory(slab_nbytes) for _ in range(1 if shares_slab else ranks)]
        self.ranks = [
            PrefillProcess(world, f"{name}.{rank}", host, self, rank) for rank in range(ranks)
        ]
        for process in self.ranks:
            process.start(ranks, slabs[0 if shares_slab else process.rank])
        self._links: dict[tuple[str, int], float] = {}

    def kill(self) -> None:
        for process in self.ranks:
            process.memory.alive = False
            if process.alive:
                process.kill()

    def to_head(self, rank: int, frame: AnyFrame) -> None:
        self._in_order(("up", rank), lambda: self.head.hear(rank, frame))

    def to_rank(self, rank: int, event: ReceiveEvent) -> None:
        self.down(rank, partial(self.ranks[rank].tell, event))

    def down(self, rank: int, act: Callable[[], None]) -> None:
        """``act`` happens when the head's word of now has reached rank ``rank``."""
        self._in_order(("down", rank), act)

    def _in_order(self, link: tuple[str, int], act: Callable[[], None]) -> None:
        when = self.world.now + self.world.rng.uniform(0.0, 0.01)
        when = self._links[link] = max(when, self._links.get(link, 0.0) + 1e-9)
        self.world.timeline.at(when, act)

    def hold_rows(self, room: int, hash: str, rows: int, offset: int, layout: Layout) -> None:
        """Every rank that is there has what it is to have, as its own writer wrote it."""
        for process in self.ranks:
            if process.alive:
                self.hold_rows_of(process, room, hash, rows, offset, layout)

    def hold_rows_of(
        self,
        process: PrefillProcess,
        room: int,
        hash: str,
        rows: int,
        offset: int,
        layout: Layout,
    ) -> None:
        """``process`` has its rows; where all ranks share a slab, it reads those of all."""
        ranks = len(self.ranks)
        if layout is not Layout.SHARED:
            shard = wanted_rows(rows, ranks, process.rank, sharded=layout.sharded)
            writer = process.writer_of(room) if shard.rows else 0
            process.memory.hold_rows(hash, shard.start, shard.rows, offset, writer)
            return
        for other in self.ranks:
            shard = shard_rows(rows, ranks, other.rank)
            if shard.rows:
                at = offset + shard.start * ROW_NBYTES
                process.memory.hold_rows(hash, *shard, at, other.writer_of(room))
