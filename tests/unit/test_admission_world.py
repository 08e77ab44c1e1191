# SPDX-License-Identifier: Apache-2.0
"""A prefill head among ranks and engines that behave, each at its own pace.

Holds that a byte which one engine may still write has no second tenant, and that nobody
waits for ever: time stands still here, so no deadline helps.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from epd_connector.core.admission_state import ItemSpec, Loading, RequestState, TransferState
from epd_connector.core.effects import Effect, Send, TellRanks
from epd_connector.errors import Code, Failure
from epd_connector.memory.slab import ALIGNMENT
from epd_connector.protocol.frames import (
    Abandon,
    AnyFrame,
    Identify,
    Open,
    RoomFailed,
    RoomLanded,
    RoomLoaded,
    RoomReleased,
)
from tests.unit.admission_harness import HERE, ROW, THERE, Harness, failed, identity, item

ROWS = {"a": 4, "b": 8, "c": 12, "d": 20}
PICKS = st.integers(0, 1 << 16)
CHOICES = st.lists(
    st.tuples(st.sampled_from([*ROWS]), st.sampled_from([HERE, THERE])), min_size=1, max_size=3
)


@dataclass(slots=True)
class Grant:
    """Bytes of a rank's slab that an engine may write to until it is ``over``."""

    room: int
    start: int
    end: int
    failed: bool = False
    abandoned: bool = False


@dataclass(slots=True)
class Rank:
    """What one rank has granted, and what it said that the head has not heard yet."""

    grants: dict[int, Grant] = field(default_factory=dict)
    said: deque[AnyFrame] = field(default_factory=deque)

    def told(self, frame: AnyFrame) -> None:
        if isinstance(frame, Open):
            size = -(-frame.rows * ROW // ALIGNMENT) * ALIGNMENT
            grant = Grant(frame.room, frame.offset, frame.offset + size)
            for other in self.grants.values():
                assert grant.end <= other.start or other.end <= grant.start, (grant, other)
            self.grants[frame.room] = grant
        elif isinstance(frame, Abandon):
            if frame.room in self.grants:
                self.grants[frame.room].abandoned = True
            else:
                self.said.append(RoomReleased(frame.room))

    def lands(self, grant: Grant) -> None:
        del self.grants[grant.room]
        if grant.abandoned:
            self.said.append(RoomReleased(grant.room))
        elif not grant.failed:
            self.said.append(RoomLanded(grant.room, grant.end - grant.start))

    def fails(self, grant: Grant, code: Code) -> None:
        if not grant.failed and not grant.abandoned:
            grant.failed = True
            self.said.append(RoomFailed(grant.room, Failure(code, "because")))


class World(RuleBasedStateMachine):
    """Requests come, run and go while items travel."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Harness()
        self.ranks = [Rank(), Rank()]
        self.questions: list[str] = []
        self.requests: dict[str, list[str]] = {}
        self.serial = 1

    @rule(choices=CHOICES)
    def start(self, choices: list[tuple[str, str]]) -> None:
        items: list[ItemSpec] = []
        for hash, address in choices:
            self.serial += 1
            items.append(item(hash, self.serial, ROWS[hash], address=address))
        name = f"r{self.serial}"
        self.requests[name] = [spec.hash for spec in items]
        self.take(self.head.start(name, *items))

    @rule(pick=PICKS)
    def abort(self, pick: int) -> None:
        if self.requests:
            self.leave([*self.requests][pick % len(self.requests)])

    @rule()
    def run(self) -> None:
        for name in list(self.requests):
            if self.head.state(name) is RequestState.READY:
                self.load(name)
                self.leave(name)
            elif self.head.state(name) is RequestState.FAILED:
                self.leave(name)

    @rule()
    def answer(self) -> None:
        questions, self.questions = self.questions, []
        for endpoint in questions:
            self.take(self.head.hear(identity(), endpoint.removeprefix("tcp://")))

    @rule(rank=st.integers(0, 1), pick=PICKS)
    def land(self, rank: int, pick: int) -> None:
        grants = [*self.ranks[rank].grants.values()]
        if grants:
            self.ranks[rank].lands(grants[pick % len(grants)])

    @rule(
        rank=st.integers(0, 1),
        pick=PICKS,
        code=st.sampled_from([Code.STALE, Code.PEER_DEAD, Code.ENCODE_FAILED]),
    )
    def fail(self, rank: int, pick: int, code: Code) -> None:
        grants = [*self.ranks[rank].grants.values()]
        if grants:
            self.ranks[rank].fails(grants[pick % len(grants)], code)

    @rule(rank=st.integers(0, 1))
    def listen(self, rank: int) -> None:
        if self.ranks[rank].said:
            self.take(self.head.rank(rank, self.ranks[rank].said.popleft()))

    def load(self, name: str) -> None:
        for hash in dict.fromkeys(self.requests[name]):
            room = self.head.head.held(hash).ticket.room
            self.take(self.head.do(Loading(name, hash)))
            for rank in self.ranks:
                rank.said.append(RoomLoaded(room))

    def leave(self, name: str) -> None:
        del self.requests[name]
        self.take(self.head.leave(name))

    def take(self, effects: list[Effect]) -> None:
        assert all(failure.code is not Code.TIMEOUT for failure in failed(effects).values())
        for effect in effects:
            if isinstance(effect, TellRanks):
                for rank in self.ranks:
                    rank.told(effect.frame)
            elif isinstance(effect, Send) and isinstance(effect.frame, Identify):
                self.questions.append(effect.endpoint)

    def everything_happens(self) -> bool:
        """Whatever can happen does; whether anything did."""
        before = (len(self.requests), len(self.questions))
        busy = False
        for number, rank in enumerate(self.ranks):
            for grant in list(rank.grants.values()):
                rank.lands(grant)
            while rank.said:
                busy = True
                self.listen(number)
        self.answer()
        self.run()
        return busy or before != (len(self.requests), len(self.questions))

    def teardown(self) -> None:
        while self.everything_happens():
            pass
        assert self.requests == {}
        assert self.head.head.idle()
        assert set(self.head.head.transfers().values()) <= {TransferState.READY}
        balance = self.head.head.balance()
        assert balance.free + balance.resident == balance.capacity


TestWorld = World.TestCase
TestWorld.settings = hypothesis_settings(max_examples=100, stateful_step_count=60)
