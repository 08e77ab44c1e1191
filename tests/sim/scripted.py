# SPDX-License-Identifier: Apache-2.0
"""A prefill head that decides as little as a head can, so that ranks are tested alone.

Owns the receive slab's bookkeeping and one receipt per room.
"""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epd_connector.core.receive import Abandoned, Opened
from epd_connector.memory.slab import Region, RegionState, Slab
from epd_connector.protocol.frames import (
    AnyFrame,
    Open,
    RankAddress,
    RoomFailed,
    RoomLanded,
    RoomReleased,
    SenderBack,
    SenderSilent,
)
from epd_connector.rows import Layout, region_rows
from tests.sim.memory import DTYPE, ITEMSIZE, ROW_NBYTES, WIDTH
from tests.sim.prefill import PrefillEngine

if TYPE_CHECKING:
    from tests.sim.world import World

RECEIVE_SLAB = 2048


@dataclass(slots=True, eq=False)
class Receipt:
    """One room as a head knows it. ``told``: what each rank said of it, and how often."""

    room: int
    hash: str
    rows: int
    layout: Layout
    region: Region | None = None
    abandoned: bool = False
    ready: bool = False
    told: dict[int, Counter[str]] = field(default_factory=dict)

    def ranks_that(self, said: str) -> int:
        return sum(1 for counter in self.told.values() if counter[said])


class ScriptedHead:
    """Opens every room as soon as there is memory, and gives each a time to land."""

    def __init__(self, world: "World", engine: PrefillEngine) -> None:
        self.world = world
        self.engine = engine
        self.slab = Slab(RECEIVE_SLAB)
        self.receipts: dict[int, Receipt] = {}
        self._queue: deque[Receipt] = deque()

    def want(self, room: int, hash: str, rows: int) -> None:
        """Receive this item through this room."""
        layout = self.world.rng.choice([Layout.WHOLE, Layout.SHARDS])
        receipt = Receipt(room, hash, rows, Layout.SHARED if self.engine.shares_slab else layout)
        self._queue.append(receipt)
        self._advance()

    def give_up(self, receipt: Receipt) -> None:
        """Not wanted any more, or too late."""
        if receipt.ready or receipt.abandoned:
            return
        receipt.abandoned = True
        assert receipt.region is not None
        self.slab.move(receipt.region, RegionState.QUARANTINED)
        self.engine.to_ranks(Abandoned(receipt.room))
        self.world.skip(receipt.room)

    def hear(self, rank: int, frame: AnyFrame) -> None:
        if isinstance(frame, SenderSilent | SenderBack):
            return
        assert isinstance(frame, RoomLanded | RoomFailed | RoomReleased)
        receipt = self.receipts[frame.room]
        receipt.told[rank][type(frame).__name__] += 1
        match frame:
            case RoomFailed():
                self.give_up(receipt)
            case RoomLanded() if receipt.ranks_that("RoomLanded") == len(self.engine.ranks):
                self._landed(receipt)
        everybody = receipt.ranks_that("RoomReleased") == len(self.engine.ranks)
        if everybody and receipt.region is not None:
            self._free(receipt)

    def assert_at_rest(self) -> None:
        assert not self._queue
        assert self.slab.balance().free == self.slab.capacity, self.slab.balance()
        for receipt in self.receipts.values():
            for rank, told in receipt.told.items():
                where = f"room {receipt.room}, rank {rank}: {told}"
                assert max(told.values(), default=0) <= 1, where
                assert told["RoomLanded"] + told["RoomFailed"] <= 1, where
                assert receipt.ready == (not told["RoomReleased"]), where
                assert receipt.ready <= told["RoomLanded"], where

    def _advance(self) -> None:
        ranks = len(self.engine.ranks)
        while self._queue:
            receipt = self._queue[0]
            largest = region_rows(receipt.rows, ranks, receipt.layout)
            receipt.region = self.slab.lease(largest * ROW_NBYTES)
            if receipt.region is None:
                return
            self._queue.popleft()
            self._open(receipt, receipt.region)

    def _open(self, receipt: Receipt, region: Region) -> None:
        self.receipts[receipt.room] = receipt
        receipt.told = {rank: Counter() for rank in range(len(self.engine.ranks))}
        frame = Open(
            room=receipt.room,
            rows=receipt.rows,
            width=WIDTH,
            dtype=DTYPE,
            itemsize=ITEMSIZE,
            layout=receipt.layout,
            offset=region.offset,
            senders=self._senders(),
        )
        self.engine.to_ranks(Opened(frame, "shm"))
        patience = 30.0
        if self.world.unlucky(0.2):
            patience = self.world.rng.uniform(0.0, 3.0)
        self.world.timeline.after(patience, lambda: self.give_up(receipt))

    def _senders(self) -> tuple[RankAddress, ...]:
        """Who the encode engine is, or, now and then, who it was."""
        past = self.world.encode.past
        if past and self.world.unlucky(0.2):
            return past[-1]
        return self.world.encode.addresses()

    def _landed(self, receipt: Receipt) -> None:
        if receipt.abandoned:
            return
        receipt.ready = True
        self.world.landed += 1
        assert receipt.region is not None
        self.slab.move(receipt.region, RegionState.LANDED)
        self._assert_published(receipt, receipt.region)
        self.world.skip(receipt.room)
        self.world.timeline.after(self.world.rng.uniform(0.0, 2.0), lambda: self._used(receipt))

    def _used(self, receipt: Receipt) -> None:
        assert receipt.region is not None
        self._assert_published(receipt, receipt.region)
        self._free(receipt)

    def _free(self, receipt: Receipt) -> None:
        assert receipt.region is not None
        self.slab.free(receipt.region)
        receipt.region = None
        self._advance()

    def _assert_published(self, receipt: Receipt, region: Region) -> None:
        self.engine.assert_rows(receipt.hash, receipt.rows, region.offset, receipt.layout)
