# SPDX-License-Identifier: Apache-2.0
"""Drives a prefill head in tests: every step checks the machine's invariants.

A row of an item takes ``ROW`` bytes on every rank, and two rows take one ``ALIGNMENT``.
"""

from collections import Counter

from epd_connector.core.admission import AdmissionSettings, PrefillHead
from epd_connector.core.admission_state import (
    AdmissionEvent,
    FromEncodeHead,
    FromRank,
    ItemSpec,
    Joined,
    Left,
    Loading,
    Needed,
    RequestState,
    Tick,
    TransferState,
)
from epd_connector.core.effects import Effect, EncodeLocally, RequestFailed, Send, TellRanks
from epd_connector.core.topology import Expected
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    Abandon,
    AnyFrame,
    Identify,
    Identity,
    Open,
    RankAddress,
    RoomFailed,
    RoomLanded,
    RoomLoaded,
    RoomReceivers,
    RoomReleased,
    RoomsSkipped,
    SkipRooms,
)

ROW = 128
SLAB_ROWS = 32
HERE = "encode:1"
THERE = "encode:2"


def settings(
    *,
    ranks: int = 2,
    slab_rows: int = SLAB_ROWS,
    shares_slab: bool = False,
    shard_min_bytes: int | None = None,
    encode_locally: bool = False,
    max_rooms: int = 64,
) -> AdmissionSettings:
    """Small numbers: 60 s to receive, 5 s to resolve."""
    return AdmissionSettings(
        ranks=ranks,
        slab_nbytes=slab_rows * ROW,
        shares_slab=shares_slab,
        shard_min_bytes=shard_min_bytes,
        receive_timeout_s=60.0,
        resolve_timeout_s=5.0,
        failed_peer_s=30.0,
        encode_locally=encode_locally,
        max_rooms=max_rooms,
        expected=Expected("model-a", "bfloat16", 64),
    )


def identity(
    incarnation: int = 1,
    *,
    fingerprint: str = "model-a",
    dtype: str = "bfloat16",
    width: int = 64,
    modality: str = "image",
) -> Identity:
    """An encode engine of one rank."""
    rank = RankAddress("tcp://encode:11", incarnation, {"shm": "here"})
    return Identity(fingerprint, dtype, 2, {modality: width}, (rank,))


def item(
    hash: str,
    room: int | None,
    rows: int = 4,
    *,
    address: str = HERE,
    encodable: bool = False,
    modality: str = "image",
) -> ItemSpec:
    """One media item of a prompt."""
    return ItemSpec(hash, rows, modality, room, address, encodable)


def opened(effects: list[Effect]) -> list[Open]:
    """What ranks are told to receive."""
    frames = [effect.frame for effect in effects if isinstance(effect, TellRanks)]
    return [frame for frame in frames if isinstance(frame, Open)]


def rooms_opened(effects: list[Effect]) -> list[int]:
    """Rooms that ranks are told to receive."""
    return [frame.room for frame in opened(effects)]


def abandoned(effects: list[Effect]) -> list[int]:
    """Rooms that ranks are told to give up."""
    frames = [effect.frame for effect in effects if isinstance(effect, TellRanks)]
    return [frame.room for frame in frames if isinstance(frame, Abandon)]


def skipped(effects: list[Effect]) -> list[int]:
    """Rooms that encode heads are told to skip."""
    frames = [effect.frame for effect in effects if isinstance(effect, Send)]
    return [room for frame in frames if isinstance(frame, SkipRooms) for room in frame.rooms]


def receivers(effects: list[Effect]) -> list[RoomReceivers]:
    """What encode heads are told of who receives a room."""
    frames = [effect.frame for effect in effects if isinstance(effect, Send)]
    return [frame for frame in frames if isinstance(frame, RoomReceivers)]


def asked(effects: list[Effect]) -> list[str]:
    """Endpoints that are asked who they are."""
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return [send.endpoint for send in sends if isinstance(send.frame, Identify)]


def failed(effects: list[Effect]) -> dict[str, Failure]:
    """Requests that failed, and why."""
    return {e.request: e.failure for e in effects if isinstance(e, RequestFailed)}


def local(effects: list[Effect]) -> list[tuple[str, str]]:
    """What the host is to encode: request and item."""
    return [(e.request, e.hash) for e in effects if isinstance(e, EncodeLocally)]


class Harness:
    """A head, a clock, and short words for what happens to it."""

    def __init__(self, made: AdmissionSettings | None = None) -> None:
        self.settings = made or settings()
        self.head = PrefillHead(self.settings)
        self.now = 1000.0
        self.failures: Counter[str] = Counter()

    def do(self, event: AdmissionEvent) -> list[Effect]:
        """One event; holds the invariants after it."""
        effects = self.head.handle(event, self.now)
        self.head.check()
        self.failures.update(list(failed(effects)))
        assert all(count == 1 for count in self.failures.values()), self.failures
        return effects

    def start(self, request: str, *items: ItemSpec) -> list[Effect]:
        """A request joins and needs all of its items."""
        effects = self.do(Joined(request, items))
        return effects + self.need(request, *dict.fromkeys(spec.hash for spec in items))

    def need(self, request: str, *hashes: str) -> list[Effect]:
        """``request`` cannot run without these items."""
        return self.do(Needed(request, hashes))

    def leave(self, request: str) -> list[Effect]:
        """``request`` is over; its name may be used again."""
        effects = self.do(Left(request))
        del self.failures[request]
        return effects

    def hear(self, frame: AnyFrame, address: str = HERE) -> list[Effect]:
        """An encode head speaks."""
        return self.do(FromEncodeHead(address, frame))

    def rank(self, rank: int, frame: AnyFrame) -> list[Effect]:
        """One rank speaks."""
        return self.do(FromRank(rank, frame))

    def every_rank(self, frame: AnyFrame) -> list[Effect]:
        """Every rank says the same."""
        return [e for rank in range(self.settings.ranks) for e in self.rank(rank, frame)]

    def land(self, *rooms: int) -> list[Effect]:
        """Every rank has its rows of these rooms."""
        return [effect for room in rooms for effect in self.every_rank(RoomLanded(room, 1))]

    def release(self, *rooms: int) -> list[Effect]:
        """Nothing writes into these rooms on any rank any more."""
        return [effect for room in rooms for effect in self.every_rank(RoomReleased(room))]

    def loaded(self, *rooms: int) -> list[Effect]:
        """Every rank has carried out a load of these rooms."""
        return [effect for room in rooms for effect in self.every_rank(RoomLoaded(room))]

    def fail(self, room: int, code: Code, rank: int = 0) -> list[Effect]:
        """One rank will not have its rows."""
        return self.rank(rank, RoomFailed(room, Failure(code, "because")))

    def load(self, request: str, *hashes: str) -> list[Effect]:
        """A step loads these items, on every rank."""
        effects: list[Effect] = []
        for hash in hashes:
            room = self.head.held(hash).ticket.room
            effects += self.do(Loading(request, hash))
            effects += self.loaded(room)
        return effects

    def wait(self, seconds: float, *asking: str) -> list[Effect]:
        """Time passes, second by second; the scheduler asks for ``asking`` all the while."""
        effects: list[Effect] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(self.now + 1.0, end)
            for request in asking:
                self.head.ask(request, self.now)
            effects += self.do(Tick())
        return effects

    def state(self, request: str) -> RequestState:
        """What the scheduler is told."""
        return self.head.ask(request, self.now)

    def room(self, room: int) -> TransferState | None:
        """State of the transfer through ``room``."""
        return self.head.transfers().get(room)


def known(made: AdmissionSettings | None = None) -> Harness:
    """A head that knows the encode engines at ``HERE`` and ``THERE``, and holds nothing."""
    harness = Harness(made)
    for address in (HERE, THERE):
        harness.start("probe", item("probe", 1, address=address))
        harness.hear(identity(), address)
        harness.leave("probe")
        harness.release(1)
        harness.hear(RoomsSkipped((1,)), address)
    assert harness.head.idle()
    assert harness.head.transfers() == {}
    return harness
