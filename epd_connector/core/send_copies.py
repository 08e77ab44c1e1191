# SPDX-License-Identifier: Apache-2.0
"""The encode rank's staged copies: one per item, shared by the rooms that ask for it.

Granted rows that can be read where the engine made them are not copied at all: they are
lent, as long as they are no more than a slab's worth, until no room uses them.

Owns the send slab's bookkeeping, the order in which copies get memory, and when a copy's
memory is free again. Does not own rooms. A part of ``send.EncodeRank``, not a machine of
its own: it appends to the machine's effects.

Granted copies go first, and have the upper half of the slab to themselves: they leave it
again, since somebody has memory for them. Were the slab full of copies that nobody has
memory for yet, it could be the granted ones behind them that hold that memory, and nothing
would move.
"""

from collections import deque

from epd_connector.core.effects import DropRows, Effect, Stage
from epd_connector.core.send_events import Encoded
from epd_connector.core.send_state import CopyState, SendRoom, StagedCopy
from epd_connector.errors import Code, Failure
from epd_connector.memory.slab import Region, RegionState, Slab
from epd_connector.stats import Counters

MAX_WAITING_SLABS = 2
"""Rows that nobody has granted memory for may wait for the slab until they are this many
times its size, and ``ahead_rows`` more."""


class CopyDesk:
    """Copies by hash, and the queues of those that wait for memory."""

    def __init__(
        self, slab_nbytes: int, ahead_rows: int, counters: Counters, effects: list[Effect]
    ) -> None:
        self._effects = effects
        self.slab = Slab(slab_nbytes)
        self.waiting_nbytes = 0
        self.lent_nbytes = 0
        self.newly_lent: deque[StagedCopy] = deque()
        self._ahead_rows = ahead_rows
        self._counters = counters
        self._copies: dict[str, StagedCopy] = {}
        self._copying: dict[int, StagedCopy] = {}
        self._granted: deque[StagedCopy] = deque()
        self._others: deque[StagedCopy] = deque()
        self._serial = 0

    def find(self, hash: str) -> StagedCopy | None:
        """The copy of item ``hash``, if there is one."""
        return self._copies.get(hash)

    def refusal(self, event: Encoded, granted: bool) -> Failure | None:
        """Why the item cannot be staged, now or ever, or None.

        Rows that wait keep the tower's memory, so what may wait is bounded, too. Those that
        are granted are bounded by the memory of whoever granted it.
        """
        remedy = "raise send_slab_bytes on the encode engine"
        if not self.slab.fits(event.nbytes):
            reason = f"item of {event.nbytes} bytes, send slab of {self.slab.capacity} bytes"
            return Failure(Code.TOO_LARGE, f"{reason}: {remedy}")
        ahead = self._ahead_rows * event.nbytes // max(1, event.rows)
        waiting = self.waiting_nbytes
        most = MAX_WAITING_SLABS * self.slab.capacity + ahead
        if granted or waiting + event.nbytes <= most:
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
            lendable=event.lendable,
        )
        self._copies[event.hash] = copy
        self._others.append(copy)
        self.waiting_nbytes += copy.nbytes
        return copy

    def grant(self, copy: StagedCopy) -> None:
        """Somebody has memory for the rows of ``copy``."""
        if copy.granted:
            return
        copy.granted = True
        if copy.state is CopyState.WAITING:
            self._granted.append(copy)
            self.advance()

    def advance(self) -> None:
        """Gives memory to waiting copies as far as there is some: to granted ones, then to the
        others, among each in the order in which they came. What is lent needs none."""
        for queue, granted in ((self._granted, True), (self._others, False)):
            while queue:
                copy = queue[0]
                waits = copy.state is CopyState.WAITING and copy.granted is granted
                if waits and not self._place(copy):
                    self._counters.add("stagings_deferred")
                    return
                queue.popleft()

    def _place(self, copy: StagedCopy) -> bool:
        """Lends or stages the rows of ``copy``, or says that there is no memory for them."""
        if self._lendable(copy):
            self._lend(copy)
            return True
        region = self._lease(copy)
        if region is None:
            return False
        self._stage(copy, region)
        return True

    def _lease(self, copy: StagedCopy) -> Region | None:
        half = self.slab.capacity // 2
        if not copy.granted:
            return self.slab.lease(copy.nbytes, end=half)
        return self.slab.lease(copy.nbytes, first=half) or self.slab.lease(copy.nbytes)

    def _lendable(self, copy: StagedCopy) -> bool:
        most = self.slab.capacity - copy.nbytes
        return copy.granted and copy.lendable and self.lent_nbytes <= most

    def _lend(self, copy: StagedCopy) -> None:
        self.waiting_nbytes -= copy.nbytes
        self.lent_nbytes += copy.nbytes
        copy.state = CopyState.LENT
        self.newly_lent.append(copy)
        self._counters.add("bytes_lent", copy.nbytes)

    def _stage(self, copy: StagedCopy, region: Region) -> None:
        self.waiting_nbytes -= copy.nbytes
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
            self.waiting_nbytes -= copy.nbytes
            self._effects.append(DropRows(copy.token))
        elif copy.state is CopyState.LENT:
            self.lent_nbytes -= copy.nbytes
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
        assert self.waiting_nbytes == self._nbytes(CopyState.WAITING), self.waiting_nbytes
        assert self.lent_nbytes == self._nbytes(CopyState.LENT), self.lent_nbytes
        assert self.lent_nbytes <= self.slab.capacity, self.lent_nbytes

    def _nbytes(self, state: CopyState) -> int:
        return sum(copy.nbytes for copy in self._copies.values() if copy.state is state)
