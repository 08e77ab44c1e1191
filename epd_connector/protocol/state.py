# SPDX-License-Identifier: Apache-2.0
"""What an engine looks like from outside at one moment: typed, bounded, and readable as JSON.

Owns the shape and the names, which tools and scripts rely on (docs/inspect.md). Does not own
how it is collected (``core.describe``, ``runtime.describing``) or shown (``cli.inspect``).

Numbers of rooms and incarnations are 16 hex digits. Ages are seconds, sizes bytes: ``age_s``
since the beginning, ``in_state_s`` since the present state. A table lists its ``LISTED`` oldest
entries at most; the totals beside it count all of them.
"""

from typing import Annotated

import msgspec

LISTED = 100
"""Entries of one table, at most: so that all of them together fit into a frame."""
LISTED_ITEMS = 16
"""Items of one request, at most."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Totals = Annotated[dict[Text, Count], msgspec.Meta(max_length=64)]
Table = msgspec.Meta(max_length=LISTED)


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all of them. Sent by name, so that JSON and the wire say the same."""


class SlabState(State, frozen=True):
    """Bytes of one slab by what they are; they add up to ``capacity``."""

    capacity: Count
    free: Count
    leased: Count
    landed: Count
    resident: Count
    quarantined: Count


class ProcessState(State, frozen=True):
    """One process as its operating system counts it."""

    pid: Count
    threads: Count
    descriptors: Count
    resident_bytes: Count


class SendRoomState(State, frozen=True):
    """One room on an encode rank. ``grants``: of which so many are answered, written now."""

    room: Text
    state: Text
    age_s: float
    in_state_s: float
    item: Text
    rows: Count
    grants: Count
    answered: Count
    writing: Count


class ReceiverState(State, frozen=True):
    """A prefill rank as an encode rank knows it."""

    incarnation: Text
    rank: Count
    ranks: Count
    heard_s: float
    open_grants: Count
    writing: Count


class SendState(State, frozen=True):
    """The sending part of a rank. ``waiting_bytes``: rows that wait for the slab; ``lent_bytes``:
    rows that are written from where the engine made them; ``pressure``: whether requests are
    held back for those that wait; ``writes``: in flight, those to peers that were lost included.
    """

    slab: SlabState
    room_totals: Totals
    rooms: Annotated[tuple[SendRoomState, ...], Table]
    peers: Annotated[tuple[ReceiverState, ...], Table]
    peers_total: Count
    copies: Count
    waiting_bytes: Count
    lent_bytes: Count
    pressure: Text
    writes: Count


class ReceiveRoomState(State, frozen=True):
    """One room on a prefill rank: who was granted how much."""

    room: Text
    state: Text
    age_s: float
    in_state_s: float
    sender: Text
    bytes: Count


class SenderState(State, frozen=True):
    """An encode rank as a prefill rank knows it."""

    endpoint: Text
    incarnation: Text
    silent: bool
    heard_s: float
    rooms: Count


class ReceiveState(State, frozen=True):
    """The receiving part of a rank."""

    room_totals: Totals
    rooms: Annotated[tuple[ReceiveRoomState, ...], Table]
    peers: Annotated[tuple[SenderState, ...], Table]
    peers_total: Count


class RankState(State, frozen=True):
    """One rank of an engine. ``transports``: what it can use, best first."""

    rank: Count
    incarnation: Text
    endpoint: Text
    transports: Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)]
    process: ProcessState
    send: SendState | None
    receive: ReceiveState | None


class TransferState(State, frozen=True):
    """One attempt to bring one item to a prefill engine. ``landed``: ranks that have it."""

    room: Text
    item: Text
    encode: Text
    state: Text
    age_s: float
    in_state_s: float
    bytes: Count
    layout: Text
    attempt: Count
    landed: Annotated[tuple[Count, ...], msgspec.Meta(max_length=1024)]


class RequestState(State, frozen=True):
    """One request that the prefill head knows, and the first of the ``waits`` items it needs."""

    request: Text
    state: Text
    in_state_s: float
    waits: Count
    waits_for: Annotated[tuple[Text, ...], msgspec.Meta(max_length=LISTED_ITEMS)]


class AddressState(State, frozen=True):
    """An encode engine as the prefill head knows it. ``reason``: why it is not used, if so."""

    address: Text
    state: Text
    reason: Text


class PrefillState(State, frozen=True):
    """The prefill side of a head. Rows are a multiple of ``width_unit`` elements of ``dtype``."""

    dtype: Text
    width_unit: Count
    slab: SlabState
    transfer_totals: Totals
    transfers: Annotated[tuple[TransferState, ...], Table]
    request_totals: Totals
    requests: Annotated[tuple[RequestState, ...], Table]
    encode_engine_totals: Totals
    encode_engines: Annotated[tuple[AddressState, ...], Table]
    skips_unanswered: Count


class EncodeState(State, frozen=True):
    """The encode side of a head. ``widths``: elements of ``dtype`` per row, by modality."""

    dtype: Text
    widths: Totals


class FailureState(State, frozen=True):
    """Something that failed, and how long ago."""

    age_s: float
    text: Text


class EngineState(State, frozen=True):
    """A whole engine. ``silent_ranks``: those that did not say how they are in time."""

    role: Text
    address: Text
    protocol: Count
    version: Text
    incarnation: Text
    fingerprint: Text
    uptime_s: float
    ranks_expected: Count
    ranks_up: Count
    process: ProcessState
    counters: Annotated[dict[Text, float], msgspec.Meta(max_length=256)]
    failures: Annotated[tuple[FailureState, ...], Table]
    prefill: PrefillState | None
    encode: EncodeState | None
    ranks: Annotated[tuple[RankState, ...], msgspec.Meta(max_length=1024)]
    silent_ranks: Annotated[tuple[Count, ...], msgspec.Meta(max_length=1024)]


def bounded(text: str, chars: int) -> str:
    """The first ``chars`` characters of ``text``, which a client may have made up, in a form
    that can be sent."""
    return text[:chars].encode("utf-8", "replace").decode("utf-8")


def name(number: int) -> str:
    """A room or an incarnation as people and routers write it."""
    return f"{number:016x}"
