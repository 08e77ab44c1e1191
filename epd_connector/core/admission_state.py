# SPDX-License-Identifier: Apache-2.0
"""What a prefill head remembers: requests, items, transfers, and the transfer's life.

Owns the settings, the events, the records and the table of transitions of
``admission.PrefillHead``; decides nothing.
"""

from collections import deque
from dataclasses import dataclass, field

from epd_connector.core.topology import Expected
from epd_connector.errors import Failure
from epd_connector.identity_enum import IdentityEnum
from epd_connector.memory.slab import Region
from epd_connector.protocol.frames import AnyFrame, Identity
from epd_connector.rows import Layout


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What a prefill head is configured with. Times in seconds, sizes in bytes.

    ``shares_slab``: all ranks of the engine have one receive slab. ``shard_min_bytes``: bytes
    from which an item is sharded where they do not; None: none is.
    """

    ranks: int
    slab_nbytes: int
    shares_slab: bool
    shard_min_bytes: int | None
    receive_timeout_s: float
    resolve_timeout_s: float
    failed_peer_s: float
    encode_locally: bool
    max_rooms: int
    expected: Expected


@dataclass(frozen=True, slots=True)
class ItemSpec:
    """One media item of a request, as the scheduler sees it.

    ``room``: what the request brought to receive the item through, if anything, from the
    encode engine at ``address`` (``host:port``). ``encodable``: the host has what it takes
    to encode the item itself.
    """

    hash: str
    rows: int
    modality: str
    room: int | None = None
    address: str = ""
    encodable: bool = False


@dataclass(frozen=True, slots=True)
class Joined:
    """``request`` is known from now on; its items are not needed yet."""

    request: str
    items: tuple[ItemSpec, ...]


@dataclass(frozen=True, slots=True)
class Needed:
    """``request`` cannot run without these of its items. Hashes it did not bring are ignored."""

    request: str
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spared:
    """``request`` does not need these of its items (any more): computed, or cached for good."""

    request: str
    hashes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Left:
    """``request`` is over, however it ended."""

    request: str


@dataclass(frozen=True, slots=True)
class Loading:
    """A step being scheduled loads item ``hash`` for ``request``. Ignored unless it is held."""

    request: str
    hash: str


@dataclass(frozen=True, slots=True)
class Promised:
    """The scheduler was told that item ``hash`` can be loaded: it must stay until the pass ends.

    Ignored unless it is held.
    """

    hash: str


@dataclass(frozen=True, slots=True)
class PassEnded:
    """The scheduling pass is over: what was promised is on a load list, or was not needed."""


@dataclass(frozen=True, slots=True)
class FromRank:
    """Rank ``rank`` of this engine says ``frame``."""

    rank: int
    frame: AnyFrame


@dataclass(frozen=True, slots=True)
class FromEncodeHead:
    """The encode head at ``address`` says ``frame``."""

    address: str
    frame: AnyFrame


@dataclass(frozen=True, slots=True)
class Broken:
    """The connection to the encode head at ``address`` broke: another may be there next."""

    address: str


@dataclass(frozen=True, slots=True)
class Gone:
    """Somebody who knows says that nothing on ``host`` will ever answer or write again."""

    host: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine is shutting down."""


AdmissionEvent = (
    Joined
    | Needed
    | Spared
    | Left
    | Loading
    | Promised
    | PassEnded
    | FromRank
    | FromEncodeHead
    | Broken
    | Gone
    | Tick
    | Stop
)


class TransferState(IdentityEnum):
    """Life of one attempt to receive an item."""

    RESOLVING = "resolving"  # the encode engine is being asked who it is
    QUEUED = "queued"  # waits for memory in the receive slab
    RECEIVING = "receiving"  # open on every rank
    READY = "ready"  # complete on every rank
    CLEARING = "clearing"  # failed or abandoned; ranks say when the region is safe
    OVER = "over"


class TransferEvent(IdentityEnum):
    """What can happen to a transfer."""

    RESOLVED = "resolved"
    OUTDATED = "outdated"  # another engine is behind the address by now
    PLACED = "placed"
    LANDED = "landed"
    FAIL = "fail"
    CLEARED = "cleared"
    DROP = "drop"


TRANSFER_MOVES: dict[tuple[TransferState, TransferEvent], TransferState] = {
    (TransferState.RESOLVING, TransferEvent.RESOLVED): TransferState.QUEUED,
    (TransferState.RESOLVING, TransferEvent.FAIL): TransferState.OVER,
    (TransferState.QUEUED, TransferEvent.OUTDATED): TransferState.RESOLVING,
    (TransferState.QUEUED, TransferEvent.PLACED): TransferState.RECEIVING,
    (TransferState.QUEUED, TransferEvent.FAIL): TransferState.OVER,
    (TransferState.RECEIVING, TransferEvent.LANDED): TransferState.READY,
    (TransferState.RECEIVING, TransferEvent.FAIL): TransferState.CLEARING,
    (TransferState.CLEARING, TransferEvent.CLEARED): TransferState.OVER,
    (TransferState.READY, TransferEvent.DROP): TransferState.OVER,
}
"""Every legal step. A pair that is not here does not move the transfer."""


class RequestState(IdentityEnum):
    """What the scheduler may do with a request."""

    WAITING = "waiting"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ticket:
    """A room that a request brought for one of its items. Good for one transfer."""

    room: int
    address: str


@dataclass(slots=True, eq=False)
class Transfer:
    """One attempt to receive one item through one room.

    ``begun``: when; ``since``: when it came into its state. ``nbytes``: of its region;
    ``item_nbytes``: of the item.
    ``landed`` and ``released``: ranks that said so. ``loads``: loads in scheduled steps
    that ranks have not all carried out. ``again``: open the room once more when cleared.
    ``published``: how often every rank has loaded it.
    """

    ticket: Ticket
    item: "Item"
    begun: float
    since: float
    state: TransferState = TransferState.RESOLVING
    identity: Identity | None = None
    region: Region | None = None
    nbytes: int = 0
    item_nbytes: int = 0
    layout: Layout = Layout.WHOLE
    attempt: int = 0
    again: bool = False
    published: int = 0
    landed: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    loads: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Item:
    """One media item by hash: the transfer that brings or holds it, and who waits for it."""

    hash: str
    rows: int
    modality: str
    transfer: Transfer | None = None
    wanted_by: "dict[str, Request]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Request:
    """One request of the scheduler. ``since``: when it came into its state. ``deadline`` is set
    while it waits.

    ``tickets``: rooms it brought and that were not used yet, by item hash. ``waits``:
    hashes it needs, in order. ``local``: hashes that the host encodes itself.
    """

    request: str
    specs: dict[str, ItemSpec]
    tickets: dict[str, deque[Ticket]]
    since: float
    state: RequestState = RequestState.READY
    waits: dict[str, None] = field(default_factory=dict)
    local: set[str] = field(default_factory=set)
    deadline: float | None = None
    asked: float = 0.0
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Changed:
    """The item has landed, or another attempt to receive it has begun."""

    item: Item


@dataclass(frozen=True, slots=True)
class Lost:
    """No room is left that could bring the item to those who wait for it."""

    item: Item
    failure: Failure


News = Changed | Lost
