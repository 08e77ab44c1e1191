# SPDX-License-Identifier: Apache-2.0
"""The slab allocator against a model of it: every byte is accounted for after every step."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from epd_connector.memory.slab import ALIGNMENT, Region, RegionState, Slab

CAPACITY = 16 * ALIGNMENT
LEGAL = {
    (RegionState.FREE, RegionState.LEASED),
    (RegionState.LEASED, RegionState.LANDED),
    (RegionState.LEASED, RegionState.QUARANTINED),
    (RegionState.LEASED, RegionState.FREE),
    (RegionState.LANDED, RegionState.RESIDENT),
    (RegionState.LANDED, RegionState.FREE),
    (RegionState.RESIDENT, RegionState.LANDED),
    (RegionState.RESIDENT, RegionState.FREE),
    (RegionState.QUARANTINED, RegionState.FREE),
}


places = st.just(0) | st.just(CAPACITY) | st.integers(0, CAPACITY)


class SlabModel(RuleBasedStateMachine):
    """Leases and moves at random, beside a model that knows one owner for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab(CAPACITY)
        self.owners: list[Region | None] = [None] * (CAPACITY // ALIGNMENT)
        self.states: dict[Region, RegionState] = {}
        self.freed: list[Region] = []

    def _longest_hole(self, first: int, end: int) -> int:
        longest = run = 0
        for owner in self.owners[-(-first // ALIGNMENT) : end // ALIGNMENT]:
            run = 0 if owner is not None else run + 1
            longest = max(longest, run)
        return longest * ALIGNMENT

    @rule(nbytes=st.integers(0, CAPACITY + ALIGNMENT), first=places, end=places)
    def lease(self, nbytes: int, first: int, end: int) -> None:
        # An allocator without coalescing would miss a hole that the model sees.
        possible = max(nbytes, 1) <= self._longest_hole(first, end)
        region = self.slab.lease(nbytes, first, end)
        assert (region is not None) == possible
        if region is None:
            return
        assert first <= region.offset
        assert region.offset + region.size <= end
        assert region.offset % ALIGNMENT == region.size % ALIGNMENT == 0
        assert nbytes <= region.size < nbytes + ALIGNMENT + (nbytes == 0)
        for block in self._blocks(region):
            assert self.owners[block] is None
            self.owners[block] = region
        self.states[region] = RegionState.LEASED

    @rule(data=st.data(), state=st.sampled_from(RegionState))
    def move(self, data: st.DataObject, state: RegionState) -> None:
        if not self.states:
            return
        region = data.draw(st.sampled_from(sorted(self.states, key=lambda r: r.offset)))
        if (self.states[region], state) not in LEGAL:
            with pytest.raises(ValueError, match="cannot become"):
                self.slab.move(region, state)
            return
        self.slab.move(region, state)
        self.states[region] = state
        if state is RegionState.FREE:
            del self.states[region]
            self.freed.append(region)
            for block in self._blocks(region):
                self.owners[block] = None

    @rule(data=st.data(), state=st.sampled_from(RegionState))
    def touch_a_freed_region(self, data: st.DataObject, state: RegionState) -> None:
        if not self.freed:
            return
        region = data.draw(st.sampled_from(self.freed))
        with pytest.raises(ValueError, match="is not leased from this slab"):
            self.slab.move(region, state)

    @invariant()
    def balances(self) -> None:
        self.slab.check()
        balance = self.slab.balance()
        assert sum(balance[1:]) == balance.capacity == CAPACITY
        for state in RegionState:
            if state is not RegionState.FREE:
                size = sum(r.size for r, kept in self.states.items() if kept is state)
                assert getattr(balance, state.value) == size

    def teardown(self) -> None:
        for region in list(self.states):
            self.slab.free(region)
        self.slab.check()
        assert self.slab.balance().free == CAPACITY
        assert self.slab.lease(CAPACITY) is not None

    @staticmethod
    def _blocks(region: Region) -> range:
        return range(region.offset // ALIGNMENT, (region.offset + region.size) // ALIGNMENT)


TestSlabModel = SlabModel.TestCase
TestSlabModel.settings = settings(max_examples=50, deadline=None)


def test_the_capacity_is_rounded_down() -> None:
    slab = Slab(3 * ALIGNMENT - 1)
    assert slab.capacity == 2 * ALIGNMENT
    assert slab.fits(2 * ALIGNMENT)
    assert not slab.fits(2 * ALIGNMENT + 1)


def test_a_slab_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 256 bytes, got 255"):
        Slab(ALIGNMENT - 1)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot lease -1 bytes"):
        Slab(ALIGNMENT).lease(-1)


def test_a_region_of_another_slab_is_refused() -> None:
    left, right = Slab(ALIGNMENT), Slab(ALIGNMENT)
    region, other = left.lease(1), right.lease(1)
    assert region is not None
    assert other is not None
    with pytest.raises(ValueError, match="is not leased from this slab"):
        left.free(other)
    left.free(region)


def test_check_notices_a_region_that_lost_its_state() -> None:
    slab = Slab(ALIGNMENT)
    region = slab.lease(1)
    assert region is not None
    region.state = RegionState.LANDED
    with pytest.raises(AssertionError, match="counted"):
        slab.check()
