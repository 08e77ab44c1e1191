# SPDX-License-Identifier: Apache-2.0
"""The encode rank's staged copies: one per item, shared by the rooms that ask for it.

Owns the send slab's bookkeeping, the order in which copies get memory, and when a copy's
memory is free again. Does not own rooms. A part of ``send.EncodeRank``, not a machine of
its own: it appends to the machine's effects.
"""

from collections import deque

from epd_connector.core.effects import DropRows, Effect, Stage
from epd_connector.core.send_events import Encoded
from epd_connector.core.send_state import CopyState, SendRoom, StagedCopy
from epd_connector.errors import Code, Failure
from epd_connector.memory.slab import RegionState, Slab
from epd_connector.stats import Counters

MAX_WAITING_SLABS = 2
"""Rows that wait for memory may take this many times the slab's size, outside of it."""


class CopyDesk:
    """Copies by hash, and the queue of those that wait for memory."""

    def __init__(self, slab_nbytes: int, counters: Counters, effects: list[Effect]) -> None:
        self._effects = effects
        self.slab = Slab(slab_nbytes)
        self._counters = counters
        self._copies: dict[str, StagedCopy] = {}
        self._copying: dict[int, StagedCopy] = {}
        self._queue: deque[StagedCopy] = deque()
        self._serial = 0

    def find(self, hash: str) -> StagedCopy | None:
        """The copy of item ``hash``, if there is one."""
        return self._copies.get(hash)

    def refusal(self, event: Encoded) -> Failure | None:
        """Why the item cannot be staged, now or ever, or None.

        Rows that wait keep the tower's memory, so what may wait is bounded, too.
        """
        remedy = "raise send_slab_bytes on the encode engine"
        if not self.slab.fits(event.nbytes):
            reason = f"item of {event.nbytes} bytes, send slab of {self.slab.capacity} bytes"
            return Failure(Code.TOO_LARGE, f"{reason}: {remedy}")
        waiting = sum(c.nbytes for c in self._queue if c.state is CopyState.WAITING)
        if waiting + event.nbytes <= MAX_WAITING_SLABS * self.slab.capacity:
            return None
        reason = f"{waiting} bytes wait for the send slab of {self.slab.capacity} bytes already"
        return Failure(Code.OVERLOADED, f"{reason}: {remedy}")

    def make(self, event: Encoded, now: float) -> StagedCopy:
        """A copy of the rows in ``event``; it waits for memory until ``advance``."""
        self._serial += 1
        copy = StagedCopy(
            number=self._serial,
            hash=event.hash,
            token=event.token,
            rows=event.rows,
            width=event.width,
            dtype=event.dtype,
            nbytes=event.nbytes,
            encoded_at=now,
        )
        self._copies[event.hash] = copy
        self._queue.append(copy)
        return copy

    def advance(self) -> None:
        """Gives memory to waiting copies, first come first served, as far as there is some."""
        while self._queue:
            copy = self._queue[0]
            if copy.state is not CopyState.WAITING:
                self._queue.popleft()
                continue
            region = self.slab.lease(copy.nbytes)
            if region is None:
                self._counters.add("stagings_deferred")
                return
            self._queue.popleft()
            copy.region, copy.state = region, CopyState.COPYING
            self._copying[copy.number] = copy
            self._effects.append(Stage(copy.number, copy.token, region.offset, copy.nbytes))

    def landed(self, number: int) -> StagedCopy | None:
        """Copying has ended, well or not; the copy, or None if it is not known."""
        return self._copying.pop(number, None)

    def ready(self, copy: StagedCopy) -> None:
        """``copy`` is complete and may be read."""
        assert copy.region is not None
        copy.state = CopyState.READY
        self.slab.move(copy.region, RegionState.LANDED)
        self._counters.add("bytes_staged", copy.nbytes)

    def release(self, copy: StagedCopy, room: SendRoom | None = None) -> None:
        """``room`` does not use ``copy`` any more; without users its memory is free.

        Memory that is being copied into stays until copying has ended.
        """
        if room is not None:
            copy.users.pop(room.room, None)
        if copy.users or copy.number in self._copying or copy.state is CopyState.GONE:
            return
        if copy.state is CopyState.WAITING:
            self._effects.append(DropRows(copy.token))
        copy.state = CopyState.GONE
        del self._copies[copy.hash]
        if copy.region is not None:
            self.slab.free(copy.region)
        self.advance()

    def idle(self) -> bool:
        """Whether there is no copy."""
        return not self._copies

    def check(self) -> None:
        """Holds the balance of the slab. Raises AssertionError."""
        self.slab.check()
        held = sum(copy.region.size for copy in self._copies.values() if copy.region)
        balance = self.slab.balance()
        assert held == balance.leased + balance.landed, (held, balance)
        assert set(self._copying.values()) <= set(self._copies.values())
