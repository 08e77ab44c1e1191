# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank is told and remembers: events, rooms, senders, and the room's life.

Owns the settings, the events, the records and the table of transitions of
``receive.PrefillRank``; decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from epd_connector.identity_enum import IdentityEnum
from epd_connector.protocol.frames import AnyFrame, Grant, Open

FIRST_RETRY_S = 2.0
"""Seconds until a frame that was not answered is repeated for the first time."""


@dataclass(frozen=True, slots=True)
class ReceiveSettings:
    """What a prefill rank is configured with. Times in seconds, sizes in bytes.

    ``sessions``: how peers address this rank's receive slab, by transport.
    ``fences``: seconds after a writer's death that its writes can still land.
    """

    incarnation: int
    rank: int
    ranks: int
    slab_nbytes: int
    sessions: Mapping[str, str]
    fences: Mapping[str, float]
    heartbeat_s: float
    peer_timeout_s: float
    max_rooms: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The head opens a room. ``transport``: the best one this rank and its sender share."""

    frame: Open
    transport: str | None


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The head does not want ``room`` any more."""

    room: int


@dataclass(frozen=True, slots=True)
class FromSender:
    """``frame`` came from the process of incarnation ``sender`` at ``endpoint``."""

    endpoint: str
    sender: int
    addressee: int
    frame: AnyFrame


@dataclass(frozen=True, slots=True)
class Broken:
    """The connection to ``endpoint`` broke. The link goes on dialing."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to ``Probe``. ``gone``: the process that listened at ``endpoint`` is."""

    endpoint: str
    gone: bool


@dataclass(frozen=True, slots=True)
class Gone:
    """Somebody who knows says that nothing on ``host`` will ever write again."""

    host: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine is shutting down: withdraw everything."""


ReceiveEvent = Opened | Abandoned | FromSender | Broken | Probed | Gone | Tick | Stop


class RoomState(IdentityEnum):
    """Life of a room on one prefill rank."""

    GRANTED = "granted"  # the writer may write; its answer is awaited
    WITHDRAWING = "withdrawing"  # cancelled by the head; the writer's answer is awaited
    DOOMED = "doomed"  # failed, as the head knows; the writer's final answer is awaited
    QUARANTINED = "quarantined"  # the writer is silent; evidence is awaited
    FENCED = "fenced"  # the writer is gone; the transport's fence is awaited
    LANDED = "landed"
    RELEASED = "released"


class RoomEvent(IdentityEnum):
    """What can happen to a room."""

    LANDED = "landed"
    REFUSED = "refused"
    STALLED = "stalled"
    CANCELLED = "cancelled"
    ABANDON = "abandon"
    SILENCE = "silence"
    RETURN = "return"  # the silent writer speaks again
    DEATH = "death"  # the writer's process is known to be gone
    FENCE = "fence"  # long enough ago


_GONE: dict[tuple[RoomState, RoomEvent], RoomState] = {
    (state, event): target
    for state in (RoomState.WITHDRAWING, RoomState.DOOMED, RoomState.QUARANTINED)
    for event, target in (
        (RoomEvent.LANDED, RoomState.RELEASED),
        (RoomEvent.REFUSED, RoomState.RELEASED),
        (RoomEvent.CANCELLED, RoomState.RELEASED),
        (RoomEvent.SILENCE, RoomState.QUARANTINED),
        (RoomEvent.DEATH, RoomState.FENCED),
    )
}
ROOM_MOVES: dict[tuple[RoomState, RoomEvent], RoomState] = _GONE | {
    (RoomState.GRANTED, RoomEvent.LANDED): RoomState.LANDED,
    (RoomState.GRANTED, RoomEvent.REFUSED): RoomState.RELEASED,
    (RoomState.GRANTED, RoomEvent.CANCELLED): RoomState.RELEASED,
    (RoomState.GRANTED, RoomEvent.STALLED): RoomState.DOOMED,
    (RoomState.GRANTED, RoomEvent.ABANDON): RoomState.WITHDRAWING,
    (RoomState.GRANTED, RoomEvent.SILENCE): RoomState.QUARANTINED,
    (RoomState.GRANTED, RoomEvent.DEATH): RoomState.FENCED,
    (RoomState.DOOMED, RoomEvent.ABANDON): RoomState.WITHDRAWING,
    (RoomState.QUARANTINED, RoomEvent.RETURN): RoomState.WITHDRAWING,
    (RoomState.FENCED, RoomEvent.FENCE): RoomState.RELEASED,
}
"""Every legal step. A pair that is not here does not move the room."""


@dataclass(slots=True, eq=False)
class ReceiveRoom:
    """One room that this rank receives: its grant, and who was granted.

    ``granted``: when; ``since``: when it came into its state.
    """

    frame: Open
    grant: Grant
    sender: "Sender"
    granted: float
    since: float
    state: RoomState = RoomState.GRANTED
    retry_s: float = FIRST_RETRY_S


@dataclass(slots=True, eq=False)
class Sender:
    """A process of an encode rank as a prefill rank knows it.

    ``met``: when it was first heard of; ``heard``: when it last spoke, or was given reason to.
    ``silent``: rooms that it does not answer for fail without waiting for long.
    """

    endpoint: str
    incarnation: int
    met: float
    heard: float
    silent: bool = False
    rooms: dict[int, ReceiveRoom] = field(default_factory=dict)
