# SPDX-License-Identifier: Apache-2.0
"""Every message that two parts of the system exchange, as typed and bounded structs.

Owns the shape of the messages. Does not own their bytes (``codec``), their order or
their meaning over time (``core``).

Three conversations use these frames:

* prefill head -> encode head ("control"): who are you, who receives a room, skip these rooms;
* prefill rank -> encode rank ("data"): grants and their answers, heartbeats;
* head <-> its own ranks ("link"): what to receive, what has arrived.

Bounds are part of the type: a frame that decodes is within them.
"""

from typing import Annotated

import msgspec

from epd_connector.errors import Failure
from epd_connector.protocol.state import EngineState, RankState
from epd_connector.rows import Layout

Room = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Names one transfer of one item: 63 random bits, minted by the router."""
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Random id of one start of one head or rank; 0: not known yet."""
GrantId = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
Ranks = Annotated[int, msgspec.Meta(ge=1, lt=1 << 16)]
MAX_ROOMS_NAMED = 4096
"""Rooms that one frame may name."""
MAX_FRAMES = 32
"""Frames that one envelope may hold. More save little, and the first would wait for the last."""
Text = Annotated[str, msgspec.Meta(max_length=512)]
Sessions = Annotated[dict[Text, Text], msgspec.Meta(max_length=16)]
"""Transport name -> what that transport says about a process or a slab of it."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of every frame; the class name is its tag on the wire."""


# --- control: prefill head and tools -> encode head ---------------------------------


class Identify(Frame, frozen=True):
    """Who are you? ``fingerprint`` is the asking engine's model (``core.fingerprint``)."""

    fingerprint: Text


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where one encode rank takes grants, and which transports reach it."""

    endpoint: Text
    incarnation: Incarnation
    adverts: Sessions


class Identity(Frame, frozen=True):
    """An encode engine's answer to ``Identify`` once every rank of it is up.

    ``dtype`` is torch's name of the element type (``bfloat16``); ``widths`` gives the
    elements per row of each modality; ``ranks`` is in rank order.
    """

    fingerprint: Text
    dtype: Text
    itemsize: Annotated[int, msgspec.Meta(ge=1, le=16)]
    widths: Annotated[dict[Text, Count], msgspec.Meta(max_length=64)]
    ranks: Annotated[tuple[RankAddress, ...], msgspec.Meta(min_length=1, max_length=1024)]


class NotReady(Frame, frozen=True):
    """Some rank of this engine is not up yet: ask again soon."""

    reason: Text


class Rejected(Frame, frozen=True):
    """The answer to a question that will be no better when asked again."""

    failure: Failure


class SkipRooms(Frame, frozen=True):
    """The prefill side does not need these rooms; whatever is held for them is free."""

    rooms: Annotated[tuple[Room, ...], msgspec.Meta(max_length=MAX_ROOMS_NAMED)]


class RoomsSkipped(Frame, frozen=True):
    """The answer to ``SkipRooms``: heard, and passed on to every rank that is up."""

    rooms: Annotated[tuple[Room, ...], msgspec.Meta(max_length=MAX_ROOMS_NAMED)]


class HostGone(Frame, frozen=True):
    """Somebody who knows says that ``host`` is dead: nothing on it will ever write again.

    From a tool to a prefill head, which tells its ranks: evidence for writers on hosts that
    do not come back, of which nothing else can be known.
    """

    host: Text


class RoomReceivers(Frame, frozen=True):
    """A prefill engine of ``ranks`` ranks receives this room; an encode head tells its ranks.

    An encode rank that serves none of them (``rows.served_ranks``) holds the rows in vain.
    """

    room: Room
    ranks: Ranks


class Inspect(Frame, frozen=True):
    """How are you? Answered by ``Report`` by every head, at any time."""


class Report(Frame, frozen=True):
    """Counters of one engine since its start; names as in ``stats.Counters``.

    ``encoded_to_landed_s``: seconds, of the last items that this engine sent.
    """

    role: Text
    fingerprint: Text
    ranks_up: Count
    counters: Annotated[dict[Text, float], msgspec.Meta(max_length=256)]
    encoded_to_landed_s: Annotated[tuple[float, ...], msgspec.Meta(max_length=1024)]
    failures: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]


class Describe(Frame, frozen=True):
    """What do you look like? From a tool to a head, and from a head to its ranks."""


class Description(Frame, frozen=True):
    """The answer of a rank to its head."""

    state: RankState


class EngineDescription(Frame, frozen=True):
    """The answer of a head to a tool, once its ranks have answered or did not in time."""

    state: EngineState


# --- data: prefill rank <-> encode rank ----------------------------------------------


class Hello(Frame, frozen=True):
    """A prefill rank introduces itself: its place, its slab, and how to write into it."""

    rank: Rank
    ranks: Ranks
    slab_nbytes: Count
    sessions: Sessions


class Welcome(Frame, frozen=True):
    """The encode rank knows this prefill rank's slab from now on."""


class Grant(Frame, frozen=True):
    """You may write these rows of this room, once, into this region of my slab.

    Rows ``start <= row < start + count`` of the item's ``rows``, each of ``width``
    elements of ``dtype``, go to the ``nbytes`` bytes at ``offset`` of the slab that
    ``Hello`` announced, over ``transport``.
    """

    room: Room
    grant: GrantId
    rows: Count
    start: Count
    count: Count
    width: Count
    dtype: Text
    sharded: bool
    transport: Text
    offset: Count
    nbytes: Count


class Landed(Frame, frozen=True):
    """The rows of this grant are there. Final."""

    room: Room
    grant: GrantId


class Refused(Frame, frozen=True):
    """The rows of this grant will never be written. Final."""

    room: Room
    grant: GrantId
    failure: Failure


class Stalled(Frame, frozen=True):
    """This grant has failed, but a write of it may still land. Not final."""

    room: Room
    grant: GrantId
    failure: Failure


class Cancel(Frame, frozen=True):
    """Stop; tell me when you can no longer write under this grant."""

    room: Room
    grant: GrantId


class Cancelled(Frame, frozen=True):
    """Nothing will be written under this grant any more. Final."""

    room: Room
    grant: GrantId


class Ping(Frame, frozen=True):
    """Are you there? Sent by a prefill rank that has rooms open."""


class Pong(Frame, frozen=True):
    """I am."""


class Stale(Frame, frozen=True):
    """Your frame was meant for ``meant_for``, whose place the sender has taken."""

    meant_for: Incarnation


# --- link: head <-> ranks of the same engine ------------------------------------------


class RankUp(Frame, frozen=True):
    """A rank is ready. ``endpoint`` is empty where it takes no grants.

    ``receive_nbytes`` is the size of its receive slab, 0 where it receives nothing.
    """

    rank: Rank
    endpoint: Text
    adverts: Sessions
    receive_nbytes: Count


class HeadUp(Frame, frozen=True):
    """The head's answer to ``RankUp``: heard."""


class Open(Frame, frozen=True):
    """Receive this room. The head has placed it: its region is at ``offset`` on every rank.

    ``senders`` are the encode engine's ranks in order; a rank finds its own by
    ``rows.serving_rank``, its own rows by ``rows.wanted_rows``, and their place in the region
    by ``rows.landing_row``.
    """

    room: Room
    rows: Count
    width: Count
    dtype: Text
    itemsize: Annotated[int, msgspec.Meta(ge=1, le=16)]
    layout: Layout
    offset: Count
    senders: Annotated[tuple[RankAddress, ...], msgspec.Meta(min_length=1, max_length=1024)]


class Abandon(Frame, frozen=True):
    """Nobody wants this room any more: make its region safe and say so."""

    room: Room


class RoomLanded(Frame, frozen=True):
    """This rank has its rows of the room."""

    room: Room
    nbytes: Count


class RoomFailed(Frame, frozen=True):
    """This rank will not have its rows. The region may still be written to."""

    room: Room
    failure: Failure


class RoomReleased(Frame, frozen=True):
    """No peer can write into this rank's region of the room any more."""

    room: Room


class RoomLoaded(Frame, frozen=True):
    """The load of this room in an engine step has been carried out on this rank."""

    room: Room


class SenderSilent(Frame, frozen=True):
    """The encode rank ``sender`` does not answer this rank."""

    sender: Incarnation
    failure: Failure


class SenderBack(Frame, frozen=True):
    """The encode rank ``sender``, which had been silent, speaks to this rank again."""

    sender: Incarnation


class EndRoom(Frame, frozen=True):
    """Encode side: the request that claimed the room is over; rows not there will not come."""

    room: Room
    failure: Failure


class DropRoom(Frame, frozen=True):
    """Encode side: the prefill side does not need the room."""

    room: Room


class SlabFull(Frame, frozen=True):
    """Encode side: rows wait for this rank's send slab; requests are to be held back.

    ``granted``: rooms without rows that peers have set memory aside for; their requests must
    come. It holds until ``SlabFree``, or until it has not been repeated for a while.
    """

    granted: Annotated[tuple[Room, ...], msgspec.Meta(max_length=MAX_ROOMS_NAMED)]


class SlabFree(Frame, frozen=True):
    """Encode side: this rank's send slab takes rows again."""


class Tally(Frame, frozen=True):
    """What a rank counted since its last tally, for the head's totals."""

    counters: Annotated[dict[Text, float], msgspec.Meta(max_length=256)]
    encoded_to_landed_s: Annotated[tuple[float, ...], msgspec.Meta(max_length=1024)]
    failures: Annotated[tuple[Text, ...], msgspec.Meta(max_length=64)]


ControlFrame = (
    Identify
    | Identity
    | NotReady
    | Rejected
    | SkipRooms
    | RoomsSkipped
    | HostGone
    | RoomReceivers
    | Inspect
    | Report
    | Describe
    | EngineDescription
)
DataFrame = (
    Hello | Welcome | Grant | Landed | Refused | Stalled | Cancel | Cancelled | Ping | Pong | Stale
)
LinkFrame = (
    RankUp
    | HeadUp
    | Open
    | Abandon
    | RoomLanded
    | RoomFailed
    | RoomReleased
    | RoomLoaded
    | SenderSilent
    | SenderBack
    | HostGone
    | EndRoom
    | DropRoom
    | RoomReceivers
    | SlabFull
    | SlabFree
    | Tally
    | Describe
    | Description
)
AnyFrame = ControlFrame | DataFrame | LinkFrame


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A frame with the incarnations of its sender and addressee (0: not known yet), and what
    else there was to say to the same addressee at that moment, in order."""

    sender: Incarnation
    addressee: Incarnation
    frame: AnyFrame
    more: Annotated[tuple[AnyFrame, ...], msgspec.Meta(max_length=MAX_FRAMES - 1)] = ()

    def frames(self) -> tuple[AnyFrame, ...]:
        """All of them: one or more."""
        return (self.frame, *self.more)
