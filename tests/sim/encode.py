# SPDX-License-Identifier: Apache-2.0
"""An encode engine: its head's and ranks' machines, and what carries out what they ask for."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from epd_connector.core.effects import (
    DropRows,
    ForgetSession,
    Noted,
    Reply,
    Stage,
    TellHead,
    TellRanks,
    Write,
)
from epd_connector.core.encode_head import (
    EncodeHead,
    EncodeHeadEvent,
    EncodeHeadSettings,
    FromPeer,
    FromRank,
    RankReady,
)
from epd_connector.core.send import EncodeRank, SendSettings
from epd_connector.core.send_events import (
    Encoded,
    SendEvent,
    Staged,
    Stop,
    Tick,
    Wrote,
    from_head,
)
from epd_connector.core.send_events import FromPeer as FromPrefillRank
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    AnyFrame,
    DropRoom,
    EndRoom,
    RankAddress,
    RankUp,
    RoomReceivers,
    SlabFree,
    SlabFull,
)
from tests.sim.audits import EncodeAudit
from tests.sim.invariants import LentRowsStay, MachinesDoNotRaise, NothingIsLeft
from tests.sim.memory import DTYPE, ITEMSIZE, ROW_NBYTES, WIDTH, rows_bytes
from tests.sim.network import Host
from tests.sim.process import MachineProcess, Process

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet

MODEL = "model"
MODALITY = "image"
OFFER_TIMEOUT_S = 10.0
WRITE_TIMEOUT_S = 2.0
PEER_TIMEOUT_S = 5.0
FAILED_PEER_S = 4.0
MAX_ROOMS = 1000
STEP_S = 0.05
DROPPED = 0xDD
STAGE_FAILED = Failure(Code.ENCODE_FAILED, "the copy failed")


@dataclass(frozen=True, slots=True)
class Rows:
    """What the tower made: all the bytes of one item."""

    hash: str
    data: bytearray

    def drop(self) -> None:
        """The engine makes something else of the memory."""
        self.data[:] = bytes([DROPPED]) * len(self.data)


class EncodeProcess(MachineProcess):
    """One encode rank: a process with a machine, a send slab and writes in flight."""

    def __init__(self, world: "Fleet", name: str, host: Host, endpoint: str, place: int) -> None:
        super().__init__(world, name, host)
        self.fleet = world
        self.endpoint = self.place = endpoint
        self.rank = place
        self.engine: EncodeEngine
        self._rows: dict[int, Rows] = {}

    def start(self, ranks: int) -> None:
        world, nbytes = self.fleet, self.fleet.shape.send_nbytes
        self.memory = bytearray(nbytes)
        self.machine: EncodeRank = EncodeRank(
            SendSettings(
                incarnation=self.incarnation,
                rank=self.rank,
                ranks=ranks,
                slab_nbytes=nbytes,
                ahead_rows=world.shape.ahead_rows,
                offer_timeout_s=OFFER_TIMEOUT_S,
                write_timeout_s=WRITE_TIMEOUT_S,
                peer_timeout_s=PEER_TIMEOUT_S,
                failed_peer_s=FAILED_PEER_S,
                write_parallelism=world.rng.choice((1, 2, 4)),
                max_rooms=MAX_ROOMS,
                tombstone_s=1000.0,
            )
        )
        self._audit = EncodeAudit(self, self.machine)
        self.wind_up()
        world.network.listen(self.endpoint, self)

    def address(self) -> RankAddress:
        return RankAddress(self.endpoint, self.incarnation, {"wire": "host"})

    def encoded(self, hash: str, rows: int) -> None:
        """The tower has run for ``hash``."""
        token = self.world.new_id()
        data = bytearray(rows_bytes(hash, 0, rows, self.incarnation))
        self._rows[token] = Rows(hash, data)
        lendable = zlib.crc32(hash.encode()) % 100 < 100 * self.fleet.shape.lendable
        self.tell(Encoded(hash, token, rows, WIDTH, DTYPE, rows * ROW_NBYTES, lendable))

    def hear(self, route: int, addressee: int, frame: AnyFrame) -> None:
        """A prefill rank speaks."""
        self._take(FromPrefillRank(route, route, addressee, frame))

    def tell(self, event: SendEvent, source: str = "engine") -> None:
        self.run(partial(self._take, event), source)

    def _take(self, event: SendEvent) -> None:
        self._audit.told(event)
        self.drive(event, lambda: list(self.machine.handle(event, self.world.now)))

    def _tick(self) -> None:
        self._take(Tick())

    def audit(self) -> None:
        self._audit.hold()

    def kill(self) -> None:
        super().kill()
        self.fleet.network.ended(self)
        self.fleet.fabric.killed(self)

    def hold_rest(self) -> None:
        """Nothing is left, but for writes to hosts that vanished: those may never end."""
        machine, balance = self.machine, self.machine.balance()
        endless = len(self.fleet.fabric.endless.get(self.incarnation, ()))
        NothingIsLeft.hold(
            len(machine.rooms()) <= endless, lambda: f"{self.name}: rooms {machine.rooms()}"
        )
        NothingIsLeft.hold(balance.free == balance.capacity, lambda: f"{self.name}: {balance}")
        NothingIsLeft.hold(len(self._rows) <= endless, lambda: f"{self.name}: rows {self._rows}")
        NothingIsLeft.hold(endless or machine.idle(), lambda: f"{self.name} is not idle")

    def decided(self, effect: object) -> None:
        self._audit.decided(effect)

    def carry_out(self, effect: object) -> None:
        match effect:
            case Reply():
                self.fleet.to_prefill_rank(self, effect)
            case Stage():
                self.world.soon(lambda: self.run(partial(self._stage, effect), "staging"))
            case Write():
                self._write(effect)
            case DropRows(token=token):
                self._drop(token)
            case TellHead(frame=SlabFull() | SlabFree() as frame):
                self.engine.to_head(self.rank, frame)
            case ForgetSession() | Noted():
                pass
            case _:
                raise AssertionError(f"an encode rank does not ask for {effect}")

    def _write(self, order: Write) -> None:
        self.fleet.fabric.write(
            self,
            self.memory if order.lent is None else self._rows[order.lent].data,
            order,
            self._audit.grant_of(order.write),
            lambda failure: self.tell(Wrote(order.write, failure), "transport"),
        )

    def _drop(self, token: int) -> None:
        rows = self._rows.pop(token)
        LentRowsStay.hold(
            not self.fleet.fabric.reads(self, rows.data),
            lambda: f"{self.name} drops {rows.hash} under a write",
        )
        rows.drop()

    def _stage(self, order: Stage) -> None:
        rows = self._rows.pop(order.token)
        if self.world.unlucky(0.03):
            self.tell(Staged(order.copy, STAGE_FAILED))
            return
        self.memory[order.offset : order.offset + order.nbytes] = rows.data
        rows.drop()
        self.tell(Staged(order.copy))


class EncodeHeadProcess(Process):
    """The head of one encode engine. Its machine does nothing by itself as time passes."""

    def __init__(self, world: "Fleet", name: str, host: Host, address: str, ranks: int) -> None:
        super().__init__(world, name, host)
        self.fleet = world
        self.address = self.place = address
        self.engine: EncodeEngine
        self.machine = EncodeHead(
            EncodeHeadSettings(ranks, MODEL, DTYPE, ITEMSIZE, {MODALITY: WIDTH})
        )
        world.network.listen(f"tcp://{address}", self)

    def hear(self, route: int, frame: AnyFrame) -> None:
        """A prefill head speaks."""
        self._take(FromPeer(route, route, frame))

    def tell(self, event: EncodeHeadEvent) -> None:
        self.run(partial(self._take, event), "engine")

    def kill(self) -> None:
        super().kill()
        self.fleet.network.ended(self)

    def _take(self, event: EncodeHeadEvent) -> None:
        with MachinesDoNotRaise.holds(self.name):
            effects = self.machine.handle(event, self.world.now)
        self.world.note(self.name, event, effects)
        self.acts([partial(self._carry_out, effect) for effect in effects])

    def _carry_out(self, effect: object) -> None:
        match effect:
            case Reply():
                self.fleet.to_prefill_head(self, effect)
            case TellRanks(frame=DropRoom() | EndRoom() | RoomReceivers() as frame):
                self.engine.tell(from_head(frame))
            case _:
                raise AssertionError(f"an encode head does not ask for {effect}")


class EncodeEngine:
    """One start of an encode engine, on ``host``, from ``port`` on."""

    def __init__(self, world: "Fleet", name: str, host: Host, port: int, ranks: int) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.port = port
        self.address = f"{host.name}:{port}"
        self.head = EncodeHeadProcess(world, f"{name}.head", host, self.address, ranks)
        self.head.engine = self
        self.ranks = [
            EncodeProcess(
                world, f"{name}.{rank}", host, f"tcp://{host.name}:{port + 1 + rank}", rank
            )
            for rank in range(ranks)
        ]
        self.held_back = 0
        self._said: dict[int, float] = {}
        for process in self.ranks:
            process.engine = self
            process.start(ranks)
            world.soon(partial(self._came_up, process), 1.0)

    @property
    def alive(self) -> bool:
        return self.head.alive

    def processes(self) -> list[Process]:
        return [self.head, *self.ranks]

    def kill(self) -> None:
        for process in self.processes():
            if process.alive:
                process.kill()

    def stop(self) -> None:
        """It is shut down: it says so before it ends."""
        self.tell(Stop())

    def tell(self, event: SendEvent) -> None:
        """Every rank is told, each in its own time."""
        for process in self.ranks:
            self.world.soon(partial(process.tell, event))

    def to_head(self, rank: int, frame: SlabFull | SlabFree) -> None:
        """Words of one rank keep their order."""
        when = max(self._said.get(rank, 0.0), self.world.now + self.world.rng.uniform(0.0, 0.05))
        self._said[rank] = when
        self.world.timeline.at(when, partial(self.head.tell, FromRank(rank, frame)))

    def encode(self, room: int, hash: str, rows: int, then: Callable[[], None]) -> None:
        """The request that claims ``room`` is let in as soon as the head allows; ``then``
        happens when the tower has run for it."""
        if not self.alive:
            return
        if self.head.machine.holds_back((room,), self.world.now):
            self.held_back += 1
            again = partial(self.encode, room, hash, rows, then)
            self.world.timeline.after(STEP_S, again)
            return
        self.encoded(hash, rows)
        then()

    def encoded(self, hash: str, rows: int) -> None:
        for process in self.ranks:
            self.world.soon(partial(process.run, partial(process.encoded, hash, rows)))

    def _came_up(self, process: EncodeProcess) -> None:
        if process.alive:
            address = process.address()
            frame = RankUp(process.rank, address.endpoint, address.adverts, 0)
            self.head.tell(RankReady(process.incarnation, frame))
