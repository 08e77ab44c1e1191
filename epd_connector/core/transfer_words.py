# SPDX-License-Identifier: Apache-2.0
"""What a prefill head says about a transfer: to its ranks, and to people.

Owns wording and frames; decides nothing.
"""

from epd_connector.core.admission_state import AdmissionSettings, Item, Transfer, TransferState
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import Identity, Open
from epd_connector.rows import Layout

COUNTED = {
    Layout.WHOLE: "items_whole",
    Layout.SHARDS: "items_sharded",
    Layout.SHARED: "items_shared",
}
"""Which counter counts landed items of a layout."""


def open_frame(transfer: Transfer) -> Open:
    """Every rank is to receive ``transfer``, which has its engine and its memory."""
    assert transfer.identity is not None
    assert transfer.region is not None
    item, identity = transfer.item, transfer.identity
    return Open(
        room=transfer.ticket.room,
        rows=item.rows,
        width=identity.widths[item.modality],
        dtype=identity.dtype,
        itemsize=identity.itemsize,
        layout=transfer.layout,
        offset=transfer.region.offset,
        senders=identity.ranks,
    )


def where(transfer: Transfer) -> str:
    """Room and address of ``transfer``."""
    return f"room {transfer.ticket.room:016x} from {transfer.ticket.address}"


def phase(transfer: Transfer, settings: AdmissionSettings) -> str:
    """What ``transfer`` waited for when the deadline came: not for all of the time, maybe."""
    match transfer.state:
        case TransferState.RESOLVING:
            what = "the encode engine had not said yet who it is"
        case TransferState.QUEUED:
            what = (
                f"no memory for {transfer.nbytes} bytes in the receive slab of "
                f"{settings.slab_nbytes} bytes: raise receive_slab_bytes"
            )
        case TransferState.CLEARING:
            what = "an earlier attempt could still write"
        case _:
            missing = sorted(set(range(settings.ranks)) - transfer.landed)
            what = f"rows had not landed on ranks {missing}"
    limit = f"not received within {settings.receive_timeout_s} s (receive_timeout_s)"
    return f"{where(transfer)}: {limit}: {what}"


def other_rows(item: Item, rows: int) -> Failure:
    """Two prompts disagree about the size of one item."""
    reason = f"item {item.hash[:16]} has {item.rows} rows here and {rows} tokens in this prompt"
    return Failure(Code.BAD_REQUEST, f"{reason}: its uuid was reused")


def no_room(item: Item) -> Failure:
    """Nobody who waits for ``item`` has brought a room that was not used yet."""
    specs = [request.specs[item.hash] for request in item.wanted_by.values()]
    if all(spec.room is None for spec in specs):
        reason = f"item {item.hash[:16]} is not held here, and the request names no room for it"
        return Failure(Code.BAD_REQUEST, f"{reason} (null in ec_transfer_params)")
    return lost(item.hash)


def lost(hash: str) -> Failure:
    """The item was here, and its room was good for one transfer."""
    reason = f"item {hash[:16]} was received before and is gone, and its room is used:"
    return Failure(Code.LOST, f"{reason} send the request again with a new room")


def no_tower(transfer: Transfer, identity: Identity) -> Failure:
    """The encode engine does not encode items of this modality."""
    names = ", ".join(sorted(identity.widths))
    reason = f"encode engine at {transfer.ticket.address} encodes {names}"
    return Failure(Code.MISMATCH, f"{reason}, not {transfer.item.modality}")


def too_many(rooms: int) -> Failure:
    """The table of transfers is full."""
    return Failure(
        Code.OVERLOADED, f"{rooms} rooms are open on this prefill engine: raise max_rooms"
    )
