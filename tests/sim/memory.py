# SPDX-License-Identifier: Apache-2.0
"""Slabs with rows in them that say what they are, and writes that land late, half or never.

Owns the bytes of the world and the rule that nobody writes where they may not. A write
reads its source and lands while it is in flight, piece by piece, as a real one does.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from epd_connector.core.effects import Write
from epd_connector.errors import Code, Failure
from tests.sim.network import Timeline, Weather

WIDTH, ITEMSIZE, DTYPE = 4, 2, "bfloat16"
ROW_NBYTES = WIDTH * ITEMSIZE
FENCE_S = 2.0
"""Seconds after the death of a writer that its writes still land."""


def row_bytes(hash: str, row: int) -> bytes:
    """What row ``row`` of item ``hash`` looks like."""
    return zlib.crc32(hash.encode()).to_bytes(4, "big") + row.to_bytes(4, "big")


def rows_bytes(hash: str, start: int, count: int) -> bytes:
    return b"".join(row_bytes(hash, row) for row in range(start, start + count))


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may write into a region, and what for."""

    writer: int
    room: int
    grant: int
    nbytes: int


@dataclass(slots=True, eq=False)
class ReceiveMemory:
    """The receive slab of one prefill rank, and whom its regions were granted to."""

    nbytes: int
    alive: bool = True
    owners: dict[int, Owner] = field(default_factory=dict)
    data: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.data = bytearray(self.nbytes)


class Fabric:
    """Every receive slab by session, and the writes into them.

    Whatever the weather: ``broken`` are processes whose writes fail halfway, and no write takes
    less than ``least_s`` seconds.
    """

    def __init__(self, timeline: Timeline, weather: Weather, rng: random.Random) -> None:
        self.slabs: dict[str, ReceiveMemory] = {}
        self._timeline = timeline
        self._weather = weather
        self._rng = rng
        self.broken: set[int] = set()
        self.least_s = 0.0
        self._died: dict[int, float] = {}

    def kill_writer(self, writer: int) -> None:
        self._died[writer] = self._timeline.now

    def write(
        self, writer: int, source: bytearray, order: Write, done: Callable[[Failure | None], None]
    ) -> None:
        """Carries out ``order`` for process ``writer``; ``done`` when nothing more will land."""
        weather, rng = self._weather, self._rng
        rough = self._timeline.now < weather.calm_at
        took = max(rng.uniform(0.0, 0.05), self.least_s)
        if rough and rng.random() < weather.slow_writes:
            took = rng.uniform(0.5, 8.0)
        fails = rough and rng.random() < weather.failed_writes
        fails = fails or writer in self.broken
        self._assert_owned(writer, order)
        cut = order.nbytes // 2
        first, second = (0, cut), (cut, order.nbytes)
        self._timeline.after(took / 2, lambda: self._land(writer, source, order, *first))
        if not fails:
            self._timeline.after(took, lambda: self._land(writer, source, order, *second))
        self._timeline.after(took, lambda: done(self._verdict(order, fails)))

    def _verdict(self, order: Write, fails: bool) -> Failure | None:
        if not self.slabs[order.session].alive:
            return Failure(Code.WRITE_FAILED, "nobody is there")
        return Failure(Code.WRITE_FAILED, "the wire broke") if fails else None

    def _land(self, writer: int, source: bytearray, order: Write, start: int, end: int) -> None:
        if self._timeline.now > self._died.get(writer, self._timeline.now) + FENCE_S:
            return
        slab = self.slabs[order.session]
        if not slab.alive:
            return
        self._assert_owned(writer, order)
        piece = source[order.source + start : order.source + end]
        slab.data[order.destination + start : order.destination + end] = piece

    def _assert_owned(self, writer: int, order: Write) -> None:
        slab = self.slabs[order.session]
        if not slab.alive:
            return
        owner = slab.owners.get(order.destination)
        assert owner is not None, f"{order} goes to a region that nobody may write to"
        assert owner.writer == writer, f"{order} of {writer}, but the region is {owner}'s"
        assert owner.nbytes == order.nbytes, f"{order} has not the size of {owner}"
