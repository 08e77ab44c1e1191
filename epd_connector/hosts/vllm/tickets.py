# SPDX-License-Identifier: Apache-2.0
"""Reads ``ec_transfer_params`` of a request: which room brings which item. Pure.

The form, one entry per media item in prompt order::

    {"epd": [{"room": "<16 hex digits>", "encode": "host:port"} | null, ...]}
"""

import re
from collections.abc import Mapping, Sequence

from epd_connector.core.admission_state import Ticket
from epd_connector.errors import RequestError
from epd_connector.link.base import format_address, parse_address

KEY = "epd"
_ROOM = re.compile(r"[0-7][0-9a-f]{15}")
_FORM = '{"room": "<16 hex digits>", "encode": "host:port"}'


def read_tickets(params: object, items: int) -> tuple[Ticket | None, ...]:
    """One ticket, or None, per media item of a request that has ``items`` of them.

    Without parameters no item has one.

    Raises:
        RequestError: another form, another number of entries, or a room used twice; names
            the value, what was expected, and the remedy.

    """
    if params is None:
        return (None,) * items
    entries = params.get(KEY) if isinstance(params, Mapping) else None
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise RequestError(
            f"ec_transfer_params is {_shown(params)}: expected "
            f'{{"{KEY}": [{_FORM} or null, ...]}} with one entry per media item'
        )
    if len(entries) != items:
        raise RequestError(
            f"ec_transfer_params has {len(entries)} entries and the request {items} media items: "
            "give one entry per item in prompt order, null for an item without a transfer"
        )
    tickets = tuple(_read_entry(index, entry) for index, entry in enumerate(entries))
    rooms = [ticket.room for ticket in tickets if ticket is not None]
    if len(set(rooms)) != len(rooms):
        twice = next(room for room in rooms if rooms.count(room) > 1)
        raise RequestError(
            f"room {twice:016x} is given to two items: a room is for one transfer of one item"
        )
    return tickets


def _read_entry(index: int, entry: object) -> Ticket | None:
    if entry is None:
        return None
    if not isinstance(entry, Mapping) or set(entry) != {"room", "encode"}:
        raise RequestError(
            f"entry {index} of ec_transfer_params is {_shown(entry)}: expected {_FORM} or null"
        )
    room, address = entry["room"], entry["encode"]
    if not isinstance(room, str) or not _ROOM.fullmatch(room):
        raise RequestError(
            f"room of entry {index} is {_shown(room)}: expected 16 lower-case hex digits of a "
            'random 63-bit number, such as "05f3c1a29b7d4e60"'
        )
    if not isinstance(address, str):
        raise RequestError(
            f'encode address of entry {index} is {_shown(address)}: expected "host:port"'
        )
    try:
        return Ticket(int(room, 16), format_address(*parse_address(address)))
    except RequestError as error:
        raise RequestError(f"entry {index} of ec_transfer_params: {error}") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
