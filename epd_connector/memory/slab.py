# SPDX-License-Identifier: Apache-2.0
"""Which bytes of one slab belong to whom: variable-size regions and their life cycle.

Owns the bookkeeping of one registered slab. Owns no memory: offsets and sizes only,
in bytes, so the same code serves send and receive slabs on host and device. Not
thread-safe; its machine is its only user.

Life of a region::

    FREE -> LEASED -> LANDED -> RESIDENT -> FREE
              |          `---------------> FREE
              `-> QUARANTINED -----------> FREE

LEASED: set aside, perhaps being written. LANDED: complete, somebody waits for it.
RESIDENT: complete, kept only because it may be of use again. QUARANTINED: given up,
but a peer may still write into it. Free bytes plus those four always add up to the
capacity; ``check`` holds it.
"""

import bisect
from dataclasses import dataclass
from typing import NamedTuple

from epd_connector.identity_enum import IdentityEnum

ALIGNMENT = 256
"""Bytes. Regions start on these boundaries, which suits wide loads and RDMA alike."""


class RegionState(IdentityEnum):
    """Where a region is in its life."""

    FREE = "free"
    LEASED = "leased"
    LANDED = "landed"
    RESIDENT = "resident"
    QUARANTINED = "quarantined"


_MOVES: dict[RegionState, frozenset[RegionState]] = {
    RegionState.FREE: frozenset({RegionState.LEASED}),
    RegionState.LEASED: frozenset({RegionState.LANDED, RegionState.QUARANTINED, RegionState.FREE}),
    RegionState.LANDED: frozenset({RegionState.RESIDENT, RegionState.FREE}),
    RegionState.RESIDENT: frozenset({RegionState.LANDED, RegionState.FREE}),
    RegionState.QUARANTINED: frozenset({RegionState.FREE}),
}


@dataclass(slots=True, eq=False)
class Region:
    """A leased part of the slab: ``size`` bytes at ``offset``, ``size`` rounded up."""

    offset: int
    size: int
    state: RegionState


class Balance(NamedTuple):
    """Bytes of a slab by state; they add up to ``capacity``."""

    capacity: int
    free: int
    leased: int
    landed: int
    resident: int
    quarantined: int


class Slab:
    """First-fit allocator with coalescing of free neighbours.

    ``capacity`` is rounded down to a multiple of ``ALIGNMENT``.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < ALIGNMENT:
            raise ValueError(f"a slab has at least {ALIGNMENT} bytes, got {capacity}")
        self.capacity = capacity = capacity // ALIGNMENT * ALIGNMENT
        self._holes: list[tuple[int, int]] = [(0, capacity)]
        self._regions: dict[int, Region] = {}
        self._bytes = dict.fromkeys(RegionState, 0)
        self._bytes[RegionState.FREE] = capacity

    def fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` could ever be leased, were the slab empty."""
        return nbytes <= self.capacity

    def lease(self, nbytes: int, first: int = 0, end: int | None = None) -> Region | None:
        """A region of at least ``nbytes`` bytes between the offsets ``first`` and ``end`` (the
        slab's end if None), or None when there is no room there now."""
        if nbytes < 0:
            raise ValueError(f"cannot lease {nbytes} bytes")
        size = _rounded_up(max(ALIGNMENT, nbytes))
        first, end = _rounded_up(first), self.capacity if end is None else end
        index = self._fitting(size, first, end)
        if index is None:
            return None
        start, length = self._holes[index]
        offset = max(start, first)
        after = (offset + size, start + length - offset - size)
        rest = [hole for hole in ((start, offset - start), after) if hole[1]]
        self._holes[index : index + 1] = rest
        region = Region(offset, size, RegionState.FREE)
        self._regions[offset] = region
        self._account(region, RegionState.LEASED)
        return region

    def move(self, region: Region, state: RegionState) -> None:
        """Takes ``region`` to ``state``; to FREE it returns to the slab.

        Raises:
            ValueError: the region is not of this slab, or the life cycle has no such step.

        """
        if self._regions.get(region.offset) is not region:
            raise ValueError(f"region at {region.offset} is not leased from this slab")
        if state not in _MOVES[region.state]:
            raise ValueError(f"a {region.state.value} region cannot become {state.value}")
        self._account(region, state)
        if state is RegionState.FREE:
            del self._regions[region.offset]
            self._return(region.offset, region.size)

    def free(self, region: Region) -> None:
        """Short for ``move(region, RegionState.FREE)``."""
        self.move(region, RegionState.FREE)

    def balance(self) -> Balance:
        """Bytes by state."""
        count = self._bytes
        return Balance(
            self.capacity,
            count[RegionState.FREE],
            count[RegionState.LEASED],
            count[RegionState.LANDED],
            count[RegionState.RESIDENT],
            count[RegionState.QUARANTINED],
        )

    def check(self) -> None:
        """Recomputes everything from the regions and holes.

        Raises:
            AssertionError: bytes are lost, counted twice, or holes touch or overlap.

        """
        spans = [(offset, length, "hole") for offset, length in self._holes]
        spans += [(r.offset, r.size, "region") for r in self._regions.values()]
        spans.sort()
        end, last = 0, "region"
        for offset, length, kind in spans:
            assert offset == end, f"{offset - end} bytes lost or shared at {end}"
            assert length > 0, f"empty {kind} at {offset}"
            assert not (kind == last == "hole"), f"uncoalesced hole at {offset}"
            end, last = offset + length, kind
        assert end == self.capacity, f"slab ends at {end}, capacity {self.capacity}"
        counted = dict.fromkeys(RegionState, 0)
        counted[RegionState.FREE] = sum(length for _, length in self._holes)
        for region in self._regions.values():
            counted[region.state] += region.size
        assert counted == self._bytes, f"counted {counted}, kept {self._bytes}"

    def _account(self, region: Region, state: RegionState) -> None:
        self._bytes[region.state] -= region.size
        self._bytes[state] += region.size
        region.state = state

    def _fitting(self, size: int, first: int, end: int) -> int | None:
        """The index of the first hole that has ``size`` bytes between ``first`` and ``end``."""
        for index, (start, length) in enumerate(self._holes):
            if max(start, first) + size <= min(start + length, end):
                return index
        return None

    def _return(self, offset: int, length: int) -> None:
        index = bisect.bisect_left(self._holes, (offset, 0))
        if index < len(self._holes) and offset + length == self._holes[index][0]:
            length += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == offset:
            index -= 1
            start, before = self._holes[index]
            self._holes[index] = (start, before + length)
            return
        self._holes.insert(index, (offset, length))


def _rounded_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
