# SPDX-License-Identifier: Apache-2.0
"""What the machines look like from outside. Pure: reads them and changes nothing.

Owns the way from the machines' records to ``protocol.state``. Tables are cut to their oldest
entries; totals count all. Called by the thread that the machine belongs to.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from epd_connector.core.admission import PrefillHead
from epd_connector.core.admission_state import Request, RequestState, Transfer
from epd_connector.core.encode_head import EncodeHead
from epd_connector.core.receive import PrefillRank
from epd_connector.core.send import EncodeRank
from epd_connector.core.send_state import GrantState, SendRoom
from epd_connector.core.topology import Address, AddressState
from epd_connector.memory.slab import Balance
from epd_connector.protocol import state as shown
from epd_connector.protocol.state import LISTED, LISTED_ITEMS, bounded, name

T = TypeVar("T")

_ITEM_CHARS = 16
_TEXT_CHARS = 200


def describe_sender(machine: EncodeRank, now: float) -> shown.SendState:
    """An encode rank at monotonic time ``now``."""
    rooms = list(machine._rooms)
    copies = list(machine._copies._copies.values())
    peers = list(machine._grants._peers._peers.values())
    return shown.SendState(
        slab=_slab(machine.balance()),
        room_totals=_totals(room.state.value for room in rooms),
        rooms=tuple(_send_room(room, now) for room in _oldest(rooms, lambda r: r.begun)),
        peers=tuple(
            shown.ReceiverState(
                incarnation=name(peer.incarnation),
                rank=peer.hello.rank,
                ranks=peer.hello.ranks,
                heard_s=_age(peer.heard, now),
                open_grants=len(peer.unanswered),
                writing=peer.writing,
            )
            for peer in _oldest(peers, lambda p: p.heard)
        ),
        peers_total=len(peers),
        copies=len(copies),
        waiting_bytes=machine._copies.waiting_nbytes,
        lent_bytes=machine._copies.lent_nbytes,
        pressure=machine._pressure.state.value,
        writes=machine._grants.writing(),
    )


def _send_room(room: SendRoom, now: float) -> shown.SendRoomState:
    states = [grant.state for grant in room.grants.values()]
    busy = (GrantState.WRITING, GrantState.WITHDRAWN)
    return shown.SendRoomState(
        room=name(room.room),
        state=room.state.value,
        age_s=_age(room.begun, now),
        in_state_s=_age(room.since, now),
        item=bounded(room.hash, _ITEM_CHARS),
        rows=room.rows,
        grants=len(states),
        answered=states.count(GrantState.ANSWERED),
        writing=sum(state in busy for state in states),
    )


def describe_receiver(machine: PrefillRank, now: float) -> shown.ReceiveState:
    """A prefill rank at monotonic time ``now``."""
    rooms = list(machine._rooms.values())
    senders = machine._senders.all()
    return shown.ReceiveState(
        room_totals=_totals(room.state.value for room in rooms),
        rooms=tuple(
            shown.ReceiveRoomState(
                room=name(room.frame.room),
                state=room.state.value,
                age_s=_age(room.granted, now),
                in_state_s=_age(room.since, now),
                sender=room.sender.endpoint,
                bytes=room.grant.nbytes,
            )
            for room in _oldest(rooms, lambda r: r.granted)
        ),
        peers=tuple(
            shown.SenderState(
                endpoint=sender.endpoint,
                incarnation=name(sender.incarnation),
                silent=sender.silent,
                heard_s=_age(sender.heard, now),
                rooms=len(sender.rooms),
            )
            for sender in _oldest(senders, lambda s: s.heard)
        ),
        peers_total=len(senders),
    )


def describe_encode(machine: EncodeHead) -> shown.EncodeState:
    """An encode head, of which nothing changes but its ranks."""
    return shown.EncodeState(machine.settings.dtype, dict(machine.settings.widths))


def describe_prefill(machine: PrefillHead, now: float) -> shown.PrefillState:
    """A prefill head at monotonic time ``now``. Requests that wait are listed first."""
    desk, expected = machine._desk, machine.settings.expected
    transfers, requests = list(desk.transfers.values()), list(machine._requests.values())
    addresses = desk.encoders.topology.addresses()
    return shown.PrefillState(
        dtype=expected.dtype,
        width_unit=expected.width_unit,
        slab=_slab(machine.balance()),
        transfer_totals=_totals(transfer.state.value for transfer in transfers),
        transfers=tuple(_transfer(t, now) for t in _oldest(transfers, lambda t: t.begun)),
        request_totals=_totals(request.state.value for request in requests),
        requests=tuple(_request(r, now) for r in _oldest(requests, _waiting_first)),
        encode_engine_totals=_totals(entry.state.value for entry in addresses.values()),
        encode_engines=tuple(
            shown.AddressState(
                bounded(address, _TEXT_CHARS),
                entry.state.value,
                bounded(_why_unused(machine, address, entry, now), _TEXT_CHARS),
            )
            for address, entry in itertools.islice(addresses.items(), LISTED)
        ),
        skips_unanswered=machine.skips_unanswered(),
    )


def _transfer(transfer: Transfer, now: float) -> shown.TransferState:
    return shown.TransferState(
        room=name(transfer.ticket.room),
        item=bounded(transfer.item.hash, _ITEM_CHARS),
        encode=bounded(transfer.ticket.address, _TEXT_CHARS),
        state=transfer.state.value,
        age_s=_age(transfer.begun, now),
        in_state_s=_age(transfer.since, now),
        bytes=transfer.nbytes,
        layout=transfer.layout.value,
        attempt=transfer.attempt,
        landed=tuple(sorted(transfer.landed)),
    )


def _request(request: Request, now: float) -> shown.RequestState:
    hashes = itertools.islice(request.waits, LISTED_ITEMS)
    return shown.RequestState(
        request=bounded(request.request, _TEXT_CHARS),
        state=request.state.value,
        in_state_s=_age(request.since, now),
        waits=len(request.waits),
        waits_for=tuple(bounded(hash, _ITEM_CHARS) for hash in hashes),
    )


def _waiting_first(request: Request) -> tuple[bool, float]:
    return request.state is not RequestState.WAITING, request.since


def _why_unused(machine: PrefillHead, address: str, entry: Address, now: float) -> str:
    if entry.state is AddressState.ASKING:
        return entry.reason
    failure = entry.failure
    if entry.identity is not None:
        failure = machine._desk.encoders.distrust(entry.identity, address, now)
    return "" if failure is None else failure.reason


def _oldest(entries: list[T], when: Callable[[T], float | tuple[bool, float]]) -> list[T]:
    return heapq.nsmallest(LISTED, entries, key=when)


def _totals(states: Iterable[str]) -> dict[str, int]:
    return dict(Counter(states))


def _age(when: float, now: float) -> float:
    return round(max(0.0, now - when), 3)


def _slab(balance: Balance) -> shown.SlabState:
    return shown.SlabState(*balance)
