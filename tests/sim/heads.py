# SPDX-License-Identifier: Apache-2.0
"""Whole engines with the real heads, and what carries out what the heads ask for.

Owns the way between heads: prefill heads reach encode heads through the network, like ranks
reach ranks, and each head its own ranks over a link that is slow but keeps order.
"""

from functools import partial
from typing import TYPE_CHECKING

from epd_connector.core.admission import PrefillHead
from epd_connector.core.admission_state import (
    AdmissionEvent,
    AdmissionSettings,
    Broken,
    FromEncodeHead,
    FromRank,
    Tick,
)
from epd_connector.core.effects import (
    Effect,
    EncodeLocally,
    Hangup,
    Noted,
    Reply,
    RequestFailed,
    Send,
    TellRanks,
)
from epd_connector.core.encode_head import (
    EncodeHead,
    EncodeHeadEvent,
    EncodeHeadSettings,
    FromPeer,
    RankReady,
)
from epd_connector.core.receive import Abandoned, Opened
from epd_connector.core.send_events import from_head
from epd_connector.core.topology import Expected
from epd_connector.protocol.frames import (
    Abandon,
    AnyFrame,
    DropRoom,
    EndRoom,
    Open,
    RankUp,
    RoomReceivers,
)
from tests.sim.encode import EncodeEngine, EncodeProcess
from tests.sim.memory import DTYPE, ITEMSIZE, ROW_NBYTES, WIDTH
from tests.sim.network import Alarm
from tests.sim.prefill import PrefillEngine

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet

MODEL = "model"
MODALITY = "image"
RECEIVE_TIMEOUT_S = 12.0
RESOLVE_TIMEOUT_S = 3.0
FAILED_PEER_S = 4.0


class EncodeHost:
    """An encode engine with its head, at a fixed address."""

    def __init__(self, world: "Fleet", address: str, ranks: int) -> None:
        self.world = world
        self.address = address
        self.engine = EncodeEngine(world, address, ranks)
        self._size = ranks
        self._start_head()

    def start(self) -> None:
        """Does nothing where the engine is up already."""
        if not self.engine.ranks:
            self.engine.start()
            self._start_head()

    def stop(self) -> None:
        if self.engine.ranks:
            self.engine.stop()
            self.world.network.kill(self.incarnation)
            for scheduler in self.world.schedulers:
                self.world.soon(partial(scheduler.host.tell, Broken(self.address)))

    def hear(self, sender: int, frame: AnyFrame) -> None:
        self.tell(FromPeer(sender, sender, frame))

    def _start_head(self) -> None:
        self.incarnation = self.world.new_id()
        self.machine = EncodeHead(
            EncodeHeadSettings(self._size, MODEL, DTYPE, ITEMSIZE, {MODALITY: WIDTH})
        )
        for rank, process in enumerate(self.engine.ranks):
            came_up = partial(self._came_up, rank, process)
            self.world.timeline.after(self.world.rng.uniform(0.0, 1.0), came_up)

    def _came_up(self, rank: int, process: EncodeProcess) -> None:
        if process.alive:
            address = process.address()
            frame = RankUp(rank, address.endpoint, address.adverts, 0)
            self.tell(RankReady(process.incarnation, frame))

    def tell(self, event: EncodeHeadEvent) -> None:
        for effect in self.machine.handle(event):
            match effect:
                case Reply():
                    self.world.to_prefill_head(self, effect)
                case TellRanks(frame=DropRoom() | EndRoom() | RoomReceivers() as frame):
                    self.engine.tell(from_head(frame))
                case _:
                    raise AssertionError(f"an encode head does not ask for {effect}")


class PrefillHost:
    """A prefill engine with its head. ``decided``: what it said of requests, in order."""

    def __init__(self, world: "Fleet", ranks: int, slab_nbytes: int) -> None:
        self.world = world
        self.incarnation = world.new_id()
        self.alive = True
        self.decided: list[RequestFailed | EncodeLocally] = []
        self.engine = PrefillEngine(world, ranks, slab_nbytes)
        self.engine.head = self
        self.machine = PrefillHead(
            AdmissionSettings(
                ranks=ranks,
                slab_nbytes=slab_nbytes,
                shares_slab=self.engine.shares_slab,
                shard_min_bytes=world.rng.choice([None, 0, 4 * ROW_NBYTES]),
                receive_timeout_s=RECEIVE_TIMEOUT_S,
                resolve_timeout_s=RESOLVE_TIMEOUT_S,
                failed_peer_s=FAILED_PEER_S,
                encode_locally=world.weather.mishaps and world.rng.random() < 0.3,
                max_rooms=1000,
                expected=Expected(MODEL, DTYPE, WIDTH),
            )
        )
        self._alarm = Alarm(world.timeline, self.machine.next_deadline, lambda: self.tell(Tick()))

    def kill(self) -> None:
        self.alive = False
        self.engine.kill()
        self.world.network.kill(self.incarnation)

    def hear(self, rank: int, frame: AnyFrame) -> None:
        """One of the own ranks speaks."""
        self.tell(FromRank(rank, frame))

    def hear_head(self, address: str, frame: AnyFrame) -> None:
        """The encode head at ``address`` speaks."""
        self.tell(FromEncodeHead(address, frame))

    def tell(self, event: AdmissionEvent) -> None:
        if not self.alive:
            return
        for effect in self.machine.handle(event, self.world.now):
            self._carry_out(effect)
        self.machine.check()
        self._alarm.set()

    def assert_at_rest(self) -> None:
        assert self.machine.idle(), self.machine.transfers()
        balance = self.machine.balance()
        assert balance.free + balance.resident == balance.capacity, balance
        assert self.machine.skips_unanswered() == 0
        for process in self.engine.ranks:
            assert process.machine.idle(), process.machine.rooms()
            assert not process.memory.owners

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send():
                self.world.to_encode_head(self, effect)
            case TellRanks(frame=Open() as frame):
                self.engine.to_ranks(Opened(frame, "shm"))
            case TellRanks(frame=Abandon(room=room)):
                self.engine.to_ranks(Abandoned(room))
            case RequestFailed() | EncodeLocally():
                self.decided.append(effect)
            case Hangup() | Noted():
                pass
            case _:
                raise AssertionError(f"a prefill head does not ask for {effect}")
