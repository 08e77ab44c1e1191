# SPDX-License-Identifier: Apache-2.0
"""What is remembered of one process so that the rules can be held of it, from outside.

Owns nothing of a machine: it sees what machines are told and what they ask for. The one look
inside is at the peers of an encode rank, whose silence shows nowhere else.
"""

from epd_connector.core import receive_state as receive
from epd_connector.core import send_events as send
from epd_connector.core.effects import Reply, Send, TellHead, Write
from epd_connector.core.receive import PrefillRank
from epd_connector.core.send import EncodeRank
from epd_connector.core.send_state import RoomState as SendRoomState
from epd_connector.protocol.frames import (
    AnyFrame,
    Cancel,
    Cancelled,
    Grant,
    Landed,
    Refused,
    RoomFailed,
    RoomLanded,
    RoomReleased,
    Stalled,
)
from tests.sim.invariants import (
    DeadlinesAreKept,
    GrantsAreAnsweredOneWay,
    OnlyTheDeadAreGone,
    RoomsConcludeOnce,
    SilenceIsNoticed,
)
from tests.sim.process import Process
from tests.sim.timeline import TIMER_LATE_S


class EncodeAudit:
    """One encode rank: its rooms, its answers, its writes, its peers."""

    def __init__(self, process: Process, machine: EncodeRank) -> None:
        self._process = process
        self._machine = machine
        self._began: dict[int, float] = {}
        self._over: set[int] = set()
        self._finals: dict[tuple[int, int, int], AnyFrame] = {}
        self._writes: dict[int, tuple[float, int, int]] = {}
        self._heard: dict[int, float] = {}

    def told(self, event: object) -> None:
        """Before the machine takes ``event``."""
        match event:
            case send.FromPeer(sender=sender, frame=frame):
                self._heard[sender] = self._process.clock()
                if isinstance(frame, Cancel):
                    self._settled(frame.room, frame.grant)
            case send.Wrote(write=write):
                self._writes.pop(write, None)
            case send.Claim(room=room):
                state = self._machine.rooms().get(room)
                if state is SendRoomState.ASKED:
                    self._began.pop(room, None)

    def decided(self, effect: object) -> None:
        match effect:
            case Reply(addressee=addressee, frame=Landed() | Refused() | Cancelled() as frame):
                self._hold_answer(addressee, frame)
                self._settled(frame.room, frame.grant)
            case Reply(frame=Stalled(room=room, grant=grant)):
                self._settled(room, grant)
            case Write(write=write):
                grant_ = self.grant_of(write)
                self._writes[write] = (self._process.clock(), grant_.room, grant_.grant)

    def grant_of(self, write: int) -> Grant:
        """What the machine writes under ``write``: an order for a transport does not say."""
        return self._machine._grants._peers._writes[write].frame

    def hold(self) -> None:
        """After every event, and now and then."""
        rooms = self._machine.rooms()
        for room in self._began.keys() - rooms.keys():
            del self._began[room]
            self._over.add(room)
        again = self._over & rooms.keys()
        RoomsConcludeOnce.hold(
            not again, lambda: f"{self._process.name}: rooms {again} began again"
        )
        now = self._process.clock()
        for room in rooms.keys() - self._began.keys():
            self._began[room] = now
        self._hold_deadlines(rooms, now)
        self._hold_silence(now)

    def _settled(self, room: int, grant: int) -> None:
        """The peer knows that a write may take long."""
        for write, (_, its_room, its_grant) in list(self._writes.items()):
            if (its_room, its_grant) == (room, grant):
                del self._writes[write]

    def _hold_answer(self, addressee: int, frame: Landed | Refused | Cancelled) -> None:
        """A repeat says the same; a Cancel is answered as such, whatever the answer was."""
        key = (addressee, frame.room, frame.grant)
        first = self._finals.setdefault(key, frame)
        GrantsAreAnsweredOneWay.hold(
            frame == first or isinstance(frame, Cancelled),
            lambda: f"{self._process.name} said {first}, now {frame}",
        )

    def _hold_deadlines(self, rooms: dict[int, SendRoomState], now: float) -> None:
        settings = self._machine.settings
        for room, began in self._began.items():
            late = now > began + settings.offer_timeout_s + TIMER_LATE_S
            DeadlinesAreKept.hold(
                not late or rooms[room] is SendRoomState.DRAINING,
                lambda room=room: f"{self._process.name}: room {room} is {rooms[room].value}",
            )
        for started, room, grant in self._writes.values():
            DeadlinesAreKept.hold(
                now <= started + settings.write_timeout_s + TIMER_LATE_S,
                lambda room=room, grant=grant: (
                    f"{self._process.name}: nobody was told of the "
                    f"write of room {room}, grant {grant}"
                ),
            )

    def _hold_silence(self, now: float) -> None:
        limit = self._machine.settings.peer_timeout_s + TIMER_LATE_S
        for peer in self._machine._grants._peers._peers.values():
            waits = peer.unanswered and now > self._heard[peer.incarnation] + limit
            SilenceIsNoticed.hold(
                not waits,
                lambda peer=peer: (
                    f"{self._process.name}: rank {peer.hello.rank} of incarnation "
                    f"{peer.incarnation} is silent and has open grants"
                ),
            )


class PrefillAudit:
    """One prefill rank: what it granted, to whom, and what it told its head."""

    def __init__(self, process: Process, machine: PrefillRank) -> None:
        self._process = process
        self._machine = machine
        self._told: dict[int, set[str]] = {}
        self._granted: dict[int, tuple[float, int]] = {}
        self._heard: dict[int, float] = {}
        self._buried = 0
        self.writers: dict[int, int] = {}

    def told(self, event: object) -> None:
        """Before the machine takes ``event``."""
        match event:
            case receive.Opened(frame=frame):
                if frame.room not in self._machine.rooms():
                    self._told[frame.room] = set()
            case receive.FromSender(sender=sender):
                self._heard[sender] = self._process.clock()

    def decided(self, effect: object) -> None:
        match effect:
            case Send(addressee=writer, frame=Grant(room=room)):
                self._granted.setdefault(room, (self._process.clock(), writer))
            case TellHead(frame=RoomLanded(room=room)):
                self.writers[room] = self._granted.pop(room)[1]
                self._say(room, "landed or failed")
            case TellHead(frame=RoomFailed(room=room)):
                self._say(room, "landed or failed")
            case TellHead(frame=RoomReleased(room=room)):
                self._granted.pop(room, None)
                self._say(room, "released")

    def hold(self) -> None:
        """After every event, and now and then."""
        self._hold_graves()
        states, now = self._machine.rooms(), self._process.clock()
        limit = self._machine.settings.peer_timeout_s + TIMER_LATE_S
        for room, (granted, writer) in self._granted.items():
            late = now > max(granted, self._heard.get(writer, 0.0)) + limit
            SilenceIsNoticed.hold(
                not late or states.get(room) is not receive.RoomState.GRANTED,
                lambda room=room: f"{self._process.name}: the writer of room {room} is silent",
            )

    def _hold_graves(self) -> None:
        graves = self._machine._senders._dead._entries
        if len(graves) != self._buried:
            self._buried = len(graves)
            alive = [w for w in graves if self._process.world.processes[w].alive]
            OnlyTheDeadAreGone.hold(
                not alive, lambda: f"{self._process.name} takes {alive} for gone"
            )

    def _say(self, room: int, what: str) -> None:
        told = self._told.setdefault(room, set())
        RoomsConcludeOnce.hold(
            what not in told, lambda: f"{self._process.name}: room {room} {what} twice"
        )
        told.add(what)
