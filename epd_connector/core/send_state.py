# SPDX-License-Identifier: Apache-2.0
"""What an encode rank remembers: rooms, grants, staged copies, peers, and the room's life.

Owns the settings, the records and the table of transitions of ``send.EncodeRank``; decides nothing.
"""

from collections import deque
from dataclasses import dataclass, field

from epd_connector.errors import Failure
from epd_connector.identity_enum import IdentityEnum
from epd_connector.memory.slab import Region
from epd_connector.protocol.frames import Cancelled, Grant, Hello, Landed, Refused


@dataclass(frozen=True, slots=True)
class SendSettings:
    """What an encode rank is configured with. Times in seconds, sizes in bytes.

    ``ahead_rows``: what the host's steps may still bring after this rank has said that
    its slab is full.
    """

    incarnation: int
    rank: int
    ranks: int
    slab_nbytes: int
    ahead_rows: int
    offer_timeout_s: float
    write_timeout_s: float
    peer_timeout_s: float
    failed_peer_s: float
    write_parallelism: int
    max_rooms: int
    tombstone_s: float


class RoomState(IdentityEnum):
    """Life of a room on one encode rank."""

    ASKED = "asked"  # grants wait; no request of this engine has claimed the room yet
    CLAIMED = "claimed"  # a request claimed it; its rows are not there yet
    STAGING = "staging"  # the rows are there; their copy waits for memory or is under way
    OFFERED = "offered"  # the copy serves grants
    DRAINING = "draining"  # failed, while a write may still be landing
    CONCLUDED = "concluded"  # over; a tombstone answers late frames


class RoomEvent(IdentityEnum):
    """What can happen to a room."""

    CLAIM = "claim"
    ROWS = "rows"
    STAGED = "staged"
    SERVED = "served"  # every receiver that this rank serves has its answer, or there is none
    FAIL = "fail"
    DRAINED = "drained"  # no write of the room is in flight


ROOM_MOVES: dict[tuple[RoomState, RoomEvent], RoomState] = {
    (RoomState.ASKED, RoomEvent.CLAIM): RoomState.CLAIMED,
    (RoomState.ASKED, RoomEvent.SERVED): RoomState.CONCLUDED,
    (RoomState.ASKED, RoomEvent.FAIL): RoomState.DRAINING,
    (RoomState.CLAIMED, RoomEvent.ROWS): RoomState.STAGING,
    (RoomState.CLAIMED, RoomEvent.SERVED): RoomState.CONCLUDED,
    (RoomState.CLAIMED, RoomEvent.FAIL): RoomState.DRAINING,
    (RoomState.STAGING, RoomEvent.STAGED): RoomState.OFFERED,
    (RoomState.STAGING, RoomEvent.SERVED): RoomState.CONCLUDED,
    (RoomState.STAGING, RoomEvent.FAIL): RoomState.DRAINING,
    (RoomState.OFFERED, RoomEvent.SERVED): RoomState.CONCLUDED,
    (RoomState.OFFERED, RoomEvent.FAIL): RoomState.DRAINING,
    (RoomState.DRAINING, RoomEvent.DRAINED): RoomState.CONCLUDED,
}
"""Every legal step. A pair that is not here does not move the room."""


Answer = Landed | Refused | Cancelled
"""What ends a grant: after it, its writer never writes under it again."""


class GrantState(IdentityEnum):
    """Life of one grant on the encode rank that it was sent to."""

    WAITING = "waiting"  # for the rows, or for its turn to be written
    WRITING = "writing"
    WITHDRAWN = "withdrawn"  # cancelled or given up while its write is in flight
    ANSWERED = "answered"


class CopyState(IdentityEnum):
    """Life of one staged copy."""

    WAITING = "waiting"  # for memory
    COPYING = "copying"
    READY = "ready"
    LENT = "lent"  # no copy at all: the rows are read where the engine made them
    GONE = "gone"  # without users; its memory is free


@dataclass(slots=True, eq=False)
class HeldGrant:
    """A grant, who gave it, and how far it is.

    ``verdict``: what it will be answered once its write has ended, where that is already
    decided. ``answer``: what it was answered.
    """

    frame: Grant
    peer: "Peer"
    state: GrantState = GrantState.WAITING
    write: int = 0
    verdict: Refused | Cancelled | None = None
    answer: Answer | None = None


@dataclass(slots=True, eq=False)
class StagedCopy:
    """One item's rows in the send slab, shared by every room that asks for its hash.

    ``token`` names the rows to the runtime until ``Stage`` or ``DropRows`` has used it up.
    ``lendable``: until then, writes may read them where they are. ``granted``: a peer has set
    memory aside for them.
    """

    number: int
    hash: str
    token: int
    rows: int
    width: int
    dtype: str
    nbytes: int
    encoded_at: float
    lendable: bool = False
    state: CopyState = CopyState.WAITING
    granted: bool = False
    region: Region | None = None
    users: "dict[int, SendRoom]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class SendRoom:
    """One room on one encode rank. ``begun``: when it was first heard of; ``since``: when it came
    into its state. ``receivers``: the prefill ranks it serves, once known.
    """

    room: int
    state: RoomState
    begun: float
    since: float
    hash: str = ""
    rows: int = 0
    copy: StagedCopy | None = None
    receivers: range | None = None
    grants: dict[int, HeldGrant] = field(default_factory=dict)
    failure: Failure | None = None

    def writes_in_flight(self) -> bool:
        """Whether some write of this room may still read the copy."""
        busy = (GrantState.WRITING, GrantState.WITHDRAWN)
        return any(grant.state in busy for grant in self.grants.values())

    def all_answered(self) -> bool:
        """Whether every prefill rank that this encode rank serves has its answer."""
        if self.receivers is None:
            return False
        for rank in self.receivers:
            grant = self.grants.get(rank)
            if grant is None or grant.state is not GrantState.ANSWERED:
                return False
        return True


@dataclass(slots=True, eq=False)
class Peer:
    """A prefill rank as an encode rank knows it. ``route``: where its last frame came from."""

    incarnation: int
    route: int
    hello: Hello
    heard: float
    unanswered: dict[HeldGrant, None] = field(default_factory=dict)
    writing: int = 0
    backlog: deque[HeldGrant] = field(default_factory=deque)

    def busy(self) -> bool:
        """Whether it has an open grant, or a write to it is in flight."""
        return bool(self.unanswered or self.writing)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """How a concluded room ended: what late grants are answered."""

    failure: Failure | None
