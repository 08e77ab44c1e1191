# SPDX-License-Identifier: Apache-2.0
"""An encode engine: its ranks' machines, and a runtime that carries out what they ask for."""

from functools import partial
from typing import TYPE_CHECKING

from epd_connector.core.effects import DropRows, Effect, ForgetSession, Noted, Reply, Stage, Write
from epd_connector.core.send import EncodeRank, SendSettings
from epd_connector.core.send_events import Encoded, FromPeer, SendEvent, Staged, Tick, Wrote
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import AnyFrame, Cancelled, Landed, RankAddress, Refused
from tests.sim.memory import DTYPE, ROW_NBYTES, WIDTH, rows_bytes
from tests.sim.network import Alarm

if TYPE_CHECKING:
    from tests.sim.ground import Ground

SEND_SLAB = 4096
STAGE_FAILED = Failure(Code.ENCODE_FAILED, "the copy failed")


class EncodeProcess:
    """One encode rank: a process with a machine, a send slab and writes in flight."""

    def __init__(self, world: "Ground", endpoint: str, rank: int, ranks: int) -> None:
        self.world = world
        self.endpoint = endpoint
        self.incarnation = world.new_id()
        self.alive = True
        self.machine = EncodeRank(
            SendSettings(
                incarnation=self.incarnation,
                rank=rank,
                ranks=ranks,
                slab_nbytes=SEND_SLAB,
                offer_timeout_s=10.0,
                write_timeout_s=2.0,
                peer_timeout_s=5.0,
                failed_peer_s=4.0,
                write_parallelism=world.rng.choice((1, 2, 4)),
                max_rooms=1000,
                tombstone_s=1000.0,
            )
        )
        self.memory = bytearray(SEND_SLAB)
        self._rows: dict[int, tuple[str, int]] = {}
        self._finals: dict[tuple[int, int, int], type[AnyFrame]] = {}
        self._over: set[int] = set()
        self._open: set[int] = set()
        self._alarm = Alarm(world.timeline, self.machine.next_deadline, lambda: self.tell(Tick()))

    def address(self) -> RankAddress:
        return RankAddress(self.endpoint, self.incarnation, {"shm": "host"})

    def encoded(self, hash: str, rows: int) -> None:
        """The tower has run for ``hash``."""
        token = self.world.new_id()
        self._rows[token] = (hash, rows)
        self.tell(Encoded(hash, token, rows, WIDTH, DTYPE, rows * ROW_NBYTES))

    def hear(self, sender: int, addressee: int, frame: AnyFrame) -> None:
        self.tell(FromPeer(sender, sender, addressee, frame))

    def tell(self, event: SendEvent) -> None:
        if not self.alive:
            return
        for effect in self.machine.handle(event, self.world.now):
            self._carry_out(effect)
        self.machine.check()
        self._audit_rooms()
        self._alarm.set()

    def kill(self) -> None:
        self.alive = False
        self.world.network.kill(self.incarnation)
        self.world.fabric.kill_writer(self.incarnation)
        self.world.hang_up(self.endpoint)

    def assert_at_rest(self) -> None:
        balance = self.machine.balance()
        assert self.machine.idle(), self.machine.rooms()
        assert balance.free == balance.capacity, balance
        assert not self._rows, f"rows {self._rows} were neither staged nor dropped"

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Reply():
                self._audit_answer(effect)
                self.world.to_prefill(self, effect)
            case Stage():
                self.world.timeline.after(
                    self.world.rng.uniform(0.0, 0.05), lambda: self._stage(effect)
                )
            case Write():
                self.world.fabric.write(
                    self.incarnation,
                    self.memory,
                    effect,
                    lambda failure: self.tell(Wrote(effect.write, failure)),
                )
            case DropRows(token=token):
                del self._rows[token]
            case ForgetSession() | Noted():
                pass
            case _:
                raise AssertionError(f"an encode rank does not ask for {effect}")

    def _stage(self, order: Stage) -> None:
        hash, rows = self._rows.pop(order.token)
        if self.world.unlucky(0.03):
            self.tell(Staged(order.copy, STAGE_FAILED))
            return
        self.memory[order.offset : order.offset + order.nbytes] = rows_bytes(hash, 0, rows)
        self.tell(Staged(order.copy))

    def _audit_answer(self, reply: Reply) -> None:
        """A grant is landed or refused, never first the one and then the other."""
        frame = reply.frame
        if not isinstance(frame, Landed | Refused | Cancelled):
            return
        key = (reply.addressee, frame.room, frame.grant)
        first = self._finals.setdefault(key, type(frame))
        assert type(frame) in (first, Cancelled), f"{key} was {first}, now {frame}"

    def _audit_rooms(self) -> None:
        """A room that is over does not begin again."""
        rooms = set(self.machine.rooms())
        self._over |= self._open - rooms
        self._open = rooms
        assert not rooms & self._over, f"rooms {rooms & self._over} began again"


class EncodeEngine:
    """The ranks of one encode engine at fixed endpoints; killed and started again together."""

    def __init__(self, world: "Ground", name: str, ranks: int) -> None:
        self.world = world
        self.name = name
        self.past: list[tuple[RankAddress, ...]] = []
        self.dead: list[EncodeProcess] = []
        self._size = ranks
        self.ranks: list[EncodeProcess] = []
        self.start()

    def start(self) -> None:
        self.ranks = [
            EncodeProcess(self.world, f"tcp://{self.name}:{rank}", rank, self._size)
            for rank in range(self._size)
        ]

    def stop(self) -> None:
        self.past.append(self.addresses())
        for process in self.ranks:
            process.kill()
            self.dead.append(process)
        self.ranks = []

    def restart(self) -> None:
        self.stop()
        self.start()

    def addresses(self) -> tuple[RankAddress, ...]:
        return tuple(process.address() for process in self.ranks)

    def tell(self, event: SendEvent) -> None:
        """Every rank is told, each in its own time."""
        for process in self.ranks:
            self.world.soon(partial(process.tell, event))

    def encoded(self, hash: str, rows: int) -> None:
        for process in self.ranks:
            self.world.soon(partial(process.encoded, hash, rows))
