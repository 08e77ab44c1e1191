# SPDX-License-Identifier: Apache-2.0
"""The process of a prefill head, and what carries out what its machine asks for.

The head reaches encode heads through the network, as ranks reach ranks, and its own ranks over
links that keep order. What becomes of words to a rank that ended, its runtime decides.
"""

from functools import partial
from typing import TYPE_CHECKING

from epd_connector.core import receive_state
from epd_connector.core.admission import PrefillHead
from epd_connector.core.admission_state import (
    AdmissionEvent,
    AdmissionSettings,
    Broken,
    FromEncodeHead,
    FromRank,
    Gone,
    RequestState,
    Tick,
    TransferState,
)
from epd_connector.core.effects import (
    EncodeLocally,
    Hangup,
    Noted,
    RequestFailed,
    Send,
    TellRanks,
)
from epd_connector.core.receive import Abandoned, Opened
from epd_connector.core.topology import Expected
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    Abandon,
    AnyFrame,
    HostGone,
    Open,
    RoomFailed,
    RoomReceivers,
    RoomReleased,
    SkipRooms,
)
from tests.sim.encode import FAILED_PEER_S, MAX_ROOMS, MODEL, EncodeHeadProcess
from tests.sim.invariants import (
    NobodyWaitsForEachOther,
    NothingIsLeft,
    PublishedBytesAreRight,
)
from tests.sim.memory import DTYPE, ROW_NBYTES, WIDTH
from tests.sim.network import Host
from tests.sim.prefill import PrefillEngine
from tests.sim.process import MachineProcess, Process

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet

RECEIVE_TIMEOUT_S = 12.0
RESOLVE_TIMEOUT_S = 3.0
RANK_GONE = Failure(Code.PEER_DEAD, "rank 0 of this engine is gone: its worker process has ended")


class PrefillHeadProcess(MachineProcess):
    """The scheduler's process of a prefill engine. ``decided``: what it said of requests."""

    def __init__(self, world: "Fleet", name: str, host: Host, engine: PrefillEngine) -> None:
        super().__init__(world, f"{name}.head", host)
        self.fleet = world
        self.engine = engine
        engine.head = self
        self.outcomes: list[RequestFailed | EncodeLocally] = []
        self._lost_ranks: list[int] = []
        self.machine: PrefillHead = PrefillHead(self._settings())
        self.wind_up()

    def _settings(self) -> AdmissionSettings:
        rng, rough = self.world.rng, self.world.weather.mishaps
        return AdmissionSettings(
            ranks=len(self.engine.ranks),
            slab_nbytes=self.engine.ranks[0].memory.nbytes,
            shares_slab=self.engine.shares_slab,
            shard_min_bytes=rng.choice([None, 0, 4 * ROW_NBYTES]),
            receive_timeout_s=RECEIVE_TIMEOUT_S,
            resolve_timeout_s=RESOLVE_TIMEOUT_S,
            failed_peer_s=FAILED_PEER_S,
            encode_locally=rough and rng.random() < 0.3,
            max_rooms=MAX_ROOMS,
            expected=Expected(MODEL, DTYPE, WIDTH),
        )

    def processes(self) -> list[Process]:
        return [self, *self.engine.ranks]

    def kill(self) -> None:
        if self.alive:
            super().kill()
            self.fleet.network.ended(self)
        self.engine.kill()

    # --- what it hears ----------------------------------------------------------------

    def hear(self, rank: int, frame: AnyFrame) -> None:
        """One of the own ranks speaks."""
        self.tell(FromRank(rank, frame), f"rank {rank}")

    def hear_head(self, address: str, frame: AnyFrame) -> None:
        """The encode head at ``address`` speaks."""
        self.decide(FromEncodeHead(address, frame))

    def broken(self, endpoint: str) -> None:
        self.decide(Broken(endpoint.removeprefix("tcp://")))

    def host_gone(self, host: str) -> None:
        """An operator says that nothing on ``host`` will ever write again."""
        self.tell(Gone(host), "operator")

    def rank_ended(self, rank: int) -> None:
        """One of the own ranks has ended, as its link shows: its part of every room fails."""
        self._lost_ranks.append(rank)
        for room in self.machine.transfers():
            self.decide(FromRank(rank, RoomFailed(room, RANK_GONE)))

    def tell(self, event: AdmissionEvent, source: str) -> None:
        self.run(partial(self.decide, event), source)

    def decide(self, event: AdmissionEvent) -> None:
        """For the scheduler, which runs in this process: it decides at once, and sends later."""
        self.drive(event, lambda: list(self.machine.handle(event, self.world.now)))

    def _tick(self) -> None:
        self.decide(Tick())

    # --- what it asks for -------------------------------------------------------------

    def decided(self, effect: object) -> None:
        if isinstance(effect, RequestFailed | EncodeLocally):
            self.outcomes.append(effect)

    def carry_out(self, effect: object) -> None:
        match effect:
            case Send(endpoint=endpoint, frame=frame):
                self._say(endpoint, frame)
            case TellRanks(frame=Open() as frame):
                self._tell_ranks(frame)
            case TellRanks(frame=Abandon() as frame):
                self._tell_ranks(frame)
            case TellRanks(frame=HostGone(host=host)):
                for rank in range(len(self.engine.ranks)):
                    self.engine.to_rank(rank, receive_state.Gone(host))
            case Hangup(endpoint=endpoint):
                self.fleet.network.hang_up(self, endpoint)
            case RequestFailed() | EncodeLocally() | Noted():
                pass
            case _:
                raise AssertionError(f"a prefill head does not ask for {effect}")

    def _tell_ranks(self, frame: Open | Abandon) -> None:
        """Ranks that ended, as far as is known, are spoken for."""
        for rank in range(len(self.engine.ranks)):
            if rank not in self._lost_ranks:
                event = Opened(frame, "wire") if isinstance(frame, Open) else Abandoned(frame.room)
                self.engine.to_rank(rank, event)
        for rank in self._lost_ranks:
            if isinstance(frame, Open):
                self.decide(FromRank(rank, RoomFailed(frame.room, RANK_GONE)))
            self.decide(FromRank(rank, RoomReleased(frame.room)))

    def _say(self, endpoint: str, frame: AnyFrame) -> None:
        def deliver(receiver: Process) -> None:
            assert isinstance(receiver, EncodeHeadProcess)
            receiver.hear(self.incarnation, frame)

        deaf = isinstance(frame, SkipRooms | RoomReceivers)
        self.fleet.network.dial(
            self, endpoint, deliver, self.world.weather.deaf_heads if deaf else 0.0
        )

    # --- what must hold ---------------------------------------------------------------

    def audit(self) -> None:
        """Nothing more than the machine's own check holds after every event."""

    def hold_held(self) -> None:
        """Whatever could be loaded now is as it should be."""
        desk = self.machine._desk
        for transfer in desk.transfers.values():
            if transfer.state is TransferState.READY:
                assert transfer.region is not None
                item = transfer.item
                with PublishedBytesAreRight.holds(self.name):
                    self.engine.hold_rows(
                        transfer.ticket.room,
                        item.hash,
                        item.rows,
                        transfer.region.offset,
                        transfer.layout,
                    )

    def hold_progress(self) -> None:
        """Requests that wait do so for something: an encode engine, a rank, or one that runs."""
        machine, desk = self.machine, self.machine._desk
        states = [request.state for request in machine._requests.values() if request.waits]
        stuck = RequestState.WAITING in states and RequestState.READY not in states
        stuck = stuck and all(
            t.state in (TransferState.QUEUED, TransferState.READY) and not t.loads
            for t in desk.transfers.values()
        )
        NobodyWaitsForEachOther.hold(
            not stuck or desk._promised, lambda: f"{self.name}: {machine.transfers()}"
        )

    def hold_rest(self) -> None:
        machine, balance = self.machine, self.machine.balance()
        NothingIsLeft.hold(machine.idle(), lambda: f"{self.name}: {machine.transfers()}")
        NothingIsLeft.hold(
            balance.free + balance.resident == balance.capacity, lambda: f"{self.name}: {balance}"
        )
        skips = machine.skips_unanswered()
        NothingIsLeft.hold(not skips, lambda: f"{self.name}: {skips} skips")
        NothingIsLeft.hold(not machine._turns._line, lambda: f"{self.name}: a line for memory")
        for process in self.engine.ranks:
            process.hold_rest()
