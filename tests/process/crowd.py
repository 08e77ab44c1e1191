# SPDX-License-Identifier: Apache-2.0
"""Very many requests: what runs in the engines' processes to drive them without the test.

Functions are called by the test process on the sides of ``sides``.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from epd_connector.core.admission_state import ItemSpec, RequestState
from tests.group import encode_side
from tests.group.material import Rows, print_of
from tests.process import sides
from tests.process.sides import Encode, Prefill
from tests.unit.pair_bench import until

LOADED, ABORTED = "loaded", "aborted"
TOWER_AHEAD = 4
"""Tensors that a patient tower lets wait for the send slab."""


@dataclass(frozen=True)
class Order:
    """One request for one item. ``aborted_at``: when so many others are over, if at all.

    ``encoded``: whether its encode request lives to see the tower run.
    """

    name: str
    room: int
    rows: Rows
    address: str
    aborted_at: int | None = None
    encoded: bool = True

    @property
    def spec(self) -> ItemSpec:
        return ItemSpec(self.rows.hash, self.rows.rows, self.rows.modality, self.room, self.address)


def claim_all(side: Encode, orders: Sequence[Order]) -> None:
    for order in orders:
        encode_side.claim(side, order.room, order.rows)


def encode_all(side: Encode, orders: Sequence[Order], patient: bool) -> None:
    """The tower runs for one item after the other. ``patient``: not faster than they are sent."""
    for order in orders:
        if patient:
            until(lambda: sum(map(len, side.rows)) < TOWER_AHEAD)
        if order.encoded:
            sides.tower(side, order.rows)
        else:
            encode_side.over(side, order.room)


def schedule_all(side: Prefill, orders: Sequence[Order]) -> dict[str, str]:
    """A scheduler's passes until all requests are over: what became of each, or why it failed.

    All come at once. What is loaded is compared, byte for byte.
    """
    fates: dict[str, str] = {}
    for order in orders:
        sides.ask(side, order.name, (order.spec,))
    live = list(orders)
    while live:
        for order in live:
            fate = _pass(side, order, len(fates))
            if fate is not None:
                fates[order.name] = fate
        live = [order for order in live if order.name not in fates]
        threading.Event().wait(0.001)
    return fates


def _pass(side: Prefill, order: Order, over: int) -> str | None:
    """What a scheduling pass does with one request; its fate, once it is known."""
    if order.aborted_at is not None and over >= order.aborted_at:
        # It may have failed since the last pass: its encode request is aborted as well.
        reasons = sides.leave(side, order.name)
        assert len(reasons) <= 1
        return reasons[0] if reasons else ABORTED
    state, _ = sides.decided(side, order.name)
    if state is RequestState.WAITING:
        return None
    if state is RequestState.READY:
        where = sides.begin_load(side, order.name, order.rows.hash)
        assert sides.load(side, where) == [print_of(order.rows.tensor())] * len(side.ranks)
        assert sides.leave(side, order.name) == []
        return LOADED
    [reason] = sides.leave(side, order.name)
    return reason
