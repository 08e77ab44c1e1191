# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a prefill head, in whatever order, it neither raises nor leaks."""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_connector.core.admission_state import (
    AdmissionEvent,
    FromRank,
    ItemSpec,
    Joined,
    Loading,
    Needed,
    PassEnded,
    Promised,
    Spared,
    Stop,
    TransferState,
)
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    AnyFrame,
    NotReady,
    Pong,
    Rejected,
    RoomFailed,
    RoomLanded,
    RoomLoaded,
    RoomReleased,
)
from tests.unit.admission_harness import HERE, THERE, Harness, identity, settings

REQUESTS = st.sampled_from(["r1", "r2", "r3", "r4"])
ROWS = {"a": 4, "b": 8, "c": 12, "d": 20, "e": 33}
HASHES = st.sampled_from([*ROWS, "f"])
ROOMS = st.integers(10, 19)
FAILURES = st.sampled_from([Code.STALE, Code.PEER_DEAD, Code.WRITE_FAILED, Code.ENCODE_FAILED]).map(
    lambda code: Failure(code, "because")
)
ITEMS = st.builds(
    lambda hash, room, address, encodable: ItemSpec(
        hash, ROWS[hash], "image", room, address, encodable
    ),
    st.sampled_from([*ROWS]),
    ROOMS,
    st.sampled_from([HERE, THERE]),
    st.booleans(),
)
RANK_FRAMES = st.one_of(
    st.builds(RoomLanded, ROOMS, st.just(1)),
    st.builds(RoomFailed, ROOMS, FAILURES),
    st.builds(RoomReleased, ROOMS),
    st.builds(RoomLoaded, ROOMS),
    st.just(Pong()),
)
HEAD_FRAMES = st.sampled_from(
    [identity(1), identity(2), identity(dtype="float16"), NotReady("soon"), Pong()]
) | st.builds(Rejected, FAILURES)
EVENTS: st.SearchStrategy[AdmissionEvent] = st.one_of(
    st.builds(Joined, REQUESTS, st.lists(ITEMS, max_size=4).map(tuple)),
    st.builds(Needed, REQUESTS, st.lists(HASHES, max_size=4).map(tuple)),
    st.builds(Spared, REQUESTS, st.lists(HASHES, max_size=2).map(tuple)),
    st.builds(Loading, REQUESTS, HASHES),
    st.builds(Promised, HASHES),
    st.just(PassEnded()),
    st.builds(FromRank, st.integers(0, 2), RANK_FRAMES),
)


class Anything(RuleBasedStateMachine):
    """Events without rhyme or reason. ``Harness.do`` checks the machine after each."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Harness(settings(encode_locally=True, max_rooms=6))
        self.loadings = 0

    @rule(event=EVENTS)
    def event(self, event: AdmissionEvent) -> None:
        self.loadings += isinstance(event, Loading)
        self.head.do(event)

    @rule(request=REQUESTS, items=st.lists(ITEMS, min_size=1, max_size=4))
    def start(self, request: str, items: list[ItemSpec]) -> None:
        self.head.start(request, *items)

    @rule(request=REQUESTS)
    def leave(self, request: str) -> None:
        self.head.leave(request)

    @rule(frame=RANK_FRAMES)
    def every_rank(self, frame: AnyFrame) -> None:
        self.head.every_rank(frame)

    @rule(address=st.sampled_from([HERE, THERE, "stranger:1"]), frame=HEAD_FRAMES)
    def hear(self, address: str, frame: AnyFrame) -> None:
        self.head.hear(frame, address)

    @rule(request=REQUESTS, seconds=st.sampled_from([0.5, 1.0, 6.0, 61.0]))
    def wait(self, request: str, seconds: float) -> None:
        self.head.wait(seconds, *([request] if self.head.head.knows(request) else []))

    @rule()
    def stop(self) -> None:
        self.head.do(Stop())
        self.head.failures.clear()

    @invariant()
    def time_is_needed_only_while_somebody_waits(self) -> None:
        due = self.head.head.next_deadline()
        assert due is None or due > self.head.now - 1.0

    def teardown(self) -> None:
        for request in ("r1", "r2", "r3", "r4"):
            self.head.leave(request)
        self.head.do(PassEnded())
        for room, state in self.head.head.transfers().items():
            if state is TransferState.CLEARING:
                self.head.release(room)
        for _ in range(self.loadings):
            self.head.loaded(*self.head.head.transfers())
        balance = self.head.head.balance()
        assert balance.free + balance.resident == balance.capacity
        assert set(self.head.head.transfers().values()) <= {TransferState.READY}
        assert self.head.head.idle()


TestAnything = Anything.TestCase
TestAnything.settings = hypothesis_settings(max_examples=100, stateful_step_count=50)
