# SPDX-License-Identifier: Apache-2.0
"""The encode head: says who this engine is once every rank is up, and passes word on.

Owns what an encode engine's head knows of its own ranks and answers peers with, and which
requests are held back while a rank's send slab is full. Does not own rooms: its ranks do.
Does no I/O. Used by one thread at a time, like the prefill head.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from epd_connector.core.effects import Effect, Reply, TellRanks
from epd_connector.core.fingerprint import same_model
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    AnyFrame,
    DropRoom,
    EndRoom,
    Identify,
    Identity,
    NotReady,
    RankAddress,
    RankUp,
    Rejected,
    RoomReceivers,
    RoomsSkipped,
    SkipRooms,
    SlabFree,
    SlabFull,
)

FULL_S = 2.0
"""Seconds for which a full slab that is not said to be full any more counts as full."""
MAX_GRANTED = 1 << 16
"""Rooms that are remembered as granted while some slab is full; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class EncodeHeadSettings:
    """Who this engine is. ``widths``: elements per row, by modality."""

    ranks: int
    fingerprint: str
    dtype: str
    itemsize: int
    widths: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class FromPeer:
    """``frame`` came over ``route`` from the process of incarnation ``sender``."""

    route: int
    sender: int
    frame: AnyFrame


@dataclass(frozen=True, slots=True)
class RankReady:
    """Rank ``frame.rank`` of this engine, of incarnation ``incarnation``, is up."""

    incarnation: int
    frame: RankUp


@dataclass(frozen=True, slots=True)
class RequestOver:
    """A request of this engine is over; rows of ``rooms`` that are not there will not come."""

    rooms: tuple[int, ...]
    failure: Failure


@dataclass(frozen=True, slots=True)
class RoomsUnneeded:
    """This engine itself consumes what ``rooms`` were claimed for."""

    rooms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FromRank:
    """Rank ``rank`` of this engine says ``frame``."""

    rank: int
    frame: SlabFull | SlabFree


EncodeHeadEvent = FromPeer | RankReady | RequestOver | RoomsUnneeded | FromRank


class EncodeHead:
    """The sans-IO machine of one encode head."""

    def __init__(self, settings: EncodeHeadSettings) -> None:
        self.settings = settings
        self._ranks: dict[int, RankAddress] = {}
        self._full_until: dict[int, float] = {}
        self._granted: dict[int, None] = {}

    def handle(self, event: EncodeHeadEvent, now: float) -> list[Effect]:
        """Takes one event at monotonic time ``now`` (seconds); returns what is to be done."""
        match event:
            case FromRank(rank=rank, frame=frame):
                self._on_pressure(rank, frame, now)
                return []
            case RankReady(incarnation=incarnation, frame=frame):
                if frame.rank < self.settings.ranks:
                    address = RankAddress(frame.endpoint, incarnation, frame.adverts)
                    self._ranks[frame.rank] = address
                return []
            case RequestOver(rooms=rooms, failure=failure):
                return [TellRanks(EndRoom(room, failure)) for room in rooms]
            case RoomsUnneeded(rooms=rooms):
                return [TellRanks(DropRoom(room)) for room in rooms]
            case FromPeer(frame=Identify(fingerprint=fingerprint)):
                return [Reply(event.route, event.sender, self._who(fingerprint))]
            case FromPeer(frame=SkipRooms(rooms=rooms)):
                drops = [TellRanks(DropRoom(room)) for room in rooms]
                return [*drops, Reply(event.route, event.sender, RoomsSkipped(rooms))]
            case FromPeer(frame=RoomReceivers() as frame):
                return [TellRanks(frame)]
        return []

    def holds_back(self, rooms: Iterable[int], now: float) -> bool:
        """Whether a request that claims ``rooms`` is to wait, because rows wait for a send slab.

        Not one whose rows a peer has set memory aside for: that memory could be what everything
        waits for. What is not repeated ends by itself, since a word may be lost.
        """
        if not self._full_until:
            return False
        if all(until <= now for until in self._full_until.values()):
            self._go_on()
            return False
        return all(room not in self._granted for room in rooms)

    def _on_pressure(self, rank: int, frame: SlabFull | SlabFree, now: float) -> None:
        match frame:
            case SlabFull(granted=granted):
                self._full_until[rank] = now + FULL_S
                self._granted.update(dict.fromkeys(granted))
                while len(self._granted) > MAX_GRANTED:
                    del self._granted[next(iter(self._granted))]
            case SlabFree():
                self._full_until.pop(rank, None)
                if not self._full_until:
                    self._go_on()

    def _go_on(self) -> None:
        self._full_until.clear()
        self._granted.clear()

    def ranks_up(self) -> int:
        """How many ranks of this engine are up."""
        return len(self._ranks)

    def _who(self, fingerprint: str) -> Identity | NotReady | Rejected:
        settings = self.settings
        if not same_model(fingerprint, settings.fingerprint):
            reason = (
                f"this engine serves model {settings.fingerprint}, the asking engine "
                f"{fingerprint}: serve one model on both"
            )
            return Rejected(Failure(Code.MISMATCH, reason))
        if len(self._ranks) < settings.ranks:
            return NotReady(f"{len(self._ranks)} of {settings.ranks} ranks are up")
        ranks = tuple(self._ranks[rank] for rank in range(settings.ranks))
        return Identity(
            settings.fingerprint, settings.dtype, settings.itemsize, dict(settings.widths), ranks
        )
