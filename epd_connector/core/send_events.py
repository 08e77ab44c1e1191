# SPDX-License-Identifier: Apache-2.0
"""What an encode rank can be told: by its engine, its runtime, its head and its peers."""

from dataclasses import dataclass

from epd_connector.errors import Failure
from epd_connector.protocol.frames import AnyFrame, DropRoom, EndRoom, RoomReceivers


@dataclass(frozen=True, slots=True)
class Claim:
    """A request of this engine claims ``room`` for item ``hash`` of ``rows`` rows."""

    room: int
    hash: str
    rows: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """The rows of ``hash`` exist: ``[rows, width]`` of ``dtype``, ``nbytes`` in all.

    ``token`` names them to the runtime; it is answered by ``Stage`` or ``DropRows``.
    ``lendable``: until then, writes may read them where they are.
    """

    hash: str
    token: int
    rows: int
    width: int
    dtype: str
    nbytes: int
    lendable: bool = False


@dataclass(frozen=True, slots=True)
class Staged:
    """The copy that ``Stage`` asked for is complete, or (``failure``) will not be made."""

    copy: int
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Wrote:
    """Nothing more will be written under ``write``; ``failure`` if not all of it was."""

    write: int
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The request that claimed ``room`` is over: rows that are not there will not come."""

    room: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Skipped:
    """The prefill side does not need ``room``."""

    room: int


@dataclass(frozen=True, slots=True)
class Receivers:
    """A prefill engine of ``ranks`` ranks receives ``room``."""

    room: int
    ranks: int


@dataclass(frozen=True, slots=True)
class FromPeer:
    """``frame`` came over ``route`` from the process of incarnation ``sender``."""

    route: int
    sender: int
    addressee: int
    frame: AnyFrame


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine is shutting down: every room fails, nothing new begins."""


SendEvent = Claim | Encoded | Staged | Wrote | Ended | Skipped | Receivers | FromPeer | Tick | Stop


def from_head(frame: EndRoom | DropRoom | RoomReceivers) -> Ended | Skipped | Receivers:
    """What the head of this engine says."""
    match frame:
        case EndRoom(room=room, failure=failure):
            return Ended(room, failure)
        case DropRoom(room=room):
            return Skipped(room)
        case RoomReceivers(room=room, ranks=ranks):
            return Receivers(room, ranks)
