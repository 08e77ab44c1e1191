# SPDX-License-Identifier: Apache-2.0
"""Sharded items over an NCCL-like communicator: one fused launch, in place, bit for bit.

The communicator is played by threads, with NCCL's rules: what is called between group start
and end happens at the end, a broadcast's root may send from where it receives. The group that
the host has on CPUs is tested with real processes, in ``tests/group``.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from epd_connector.hosts.vllm.plan import LoadSpec
from epd_connector.hosts.vllm.reassembly import Reassembly
from epd_connector.memory.tensors import Publisher, SlabMemory, WhenRead
from epd_connector.rows import Layout, shard_rows

CPU = torch.device("cpu")
SLAB = 1 << 16


@dataclass
class Wire:
    """What the ranks of one group have in common."""

    ranks: int
    barrier: threading.Barrier = field(init=False)
    sent: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.ranks, timeout=30)


@dataclass
class Nccl:
    """One rank's communicator. ``launches``: calls in each group."""

    wire: Wire
    rank: int
    disabled: bool = False
    launches: list[int] = field(default_factory=list)
    in_place: bool = True
    calls: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = field(default_factory=list)

    def group_start(self) -> None:
        assert not self.calls

    def all_gatherv(self, output: torch.Tensor, input_: torch.Tensor, sizes: list[int]) -> None:
        start = sum(sizes[: self.rank])
        own = output[start : start + sizes[self.rank]]
        self.in_place &= own.data_ptr() == input_.data_ptr()
        assert input_.shape[0] == sizes[self.rank]
        self.calls.append((output, input_, sizes))

    def group_end(self) -> None:
        for call, (_, input_, _) in enumerate(self.calls):
            self.wire.sent[call, self.rank] = input_
        self.wire.barrier.wait()
        for call, (output, _, sizes) in enumerate(self.calls):
            for root, part in enumerate(output.split(sizes)):
                part.copy_(self.wire.sent[call, root].clone())
        self.wire.barrier.wait()
        self.launches.append(len(self.calls))
        self.calls.clear()


@dataclass
class Communicator:
    """What is read of the host's device communicator."""

    pynccl_comm: Nccl


class Group:
    """What is read of the host's group."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.world_size = wire.ranks
        self.rank_in_group = rank
        self.device = CPU
        self.device_communicator = Communicator(Nccl(wire, rank))


class Rank:
    """One rank: its slab, its group, and which loads were reported as read."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.rank = rank
        self.slab = SlabMemory.on_host(SLAB, shared=False, pin=False, owner_tag="test slab")
        self.group = Group(wire, rank)
        self.nccl = self.group.device_communicator.pynccl_comm
        self.reassembly = Reassembly(self.group)
        self.read: list[int] = []

    def lands(self, load: LoadSpec, item: torch.Tensor) -> None:
        start, rows = shard_rows(load.rows, self.group.world_size, self.rank)
        target = self.slab.rows(load.offset, rows, load.width, item.dtype)
        target.copy_(item[start : start + rows])

    def assemble(self, loads: Sequence[LoadSpec]) -> list[torch.Tensor]:
        return self.reassembly.assemble(Publisher(self.slab, CPU), loads, self.when_read)

    def when_read(self, load: LoadSpec) -> WhenRead:
        def read(wait: Callable[[], None]) -> None:
            wait()
            self.read.append(load.room)

        return read


@pytest.fixture(params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    wire = Wire(request.param)
    made = [Rank(wire, rank) for rank in range(request.param)]
    yield made
    for rank in made:
        rank.slab.close()


def on_all(ranks: list[Rank], loads: Sequence[LoadSpec]) -> list[list[torch.Tensor]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: rank.assemble(loads), ranks))


def item(rows: int, width: int, seed: int) -> torch.Tensor:
    """Any bit pattern, not only numbers."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(1 << 15), 1 << 15, (rows, width), generator=generator)
    return bits.to(torch.int16).view(torch.bfloat16)


def test_items_of_any_size_are_whole_on_every_rank_after_one_launch(ranks: list[Rank]) -> None:
    items = [item(rows, 32, seed) for seed, rows in enumerate((8, 1, 7, 12))]
    loads = [
        LoadSpec(room, f"item-{room}", room * 4096, made.shape[0], 32, "bfloat16", Layout.SHARDS)
        for room, made in enumerate(items)
    ]
    for rank in ranks:
        for load, made in zip(loads, items, strict=True):
            rank.lands(load, made)
    for rank, wholes in zip(ranks, on_all(ranks, loads), strict=True):
        for whole, made in zip(wholes, items, strict=True):
            assert torch.equal(whole.view(torch.int16), made.view(torch.int16))
        assert rank.nccl.launches == [len(items)]
        assert rank.nccl.in_place
        assert rank.read == [0, 1, 2, 3]


def test_a_warm_up_is_one_launch_on_every_rank(ranks: list[Rank]) -> None:
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda rank: rank.reassembly.warm_up(), ranks))
    assert [rank.nccl.launches for rank in ranks] == [[1]] * len(ranks)


def test_the_landed_rows_are_not_touched(ranks: list[Rank]) -> None:
    made = item(10, 16, 1)
    load = LoadSpec(1, "item", 256, 10, 16, "bfloat16", Layout.SHARDS)
    for rank in ranks:
        rank.lands(load, made)
    (wholes, *_) = on_all(ranks, [load])
    wholes[0].zero_()
    for rank in ranks:
        start, rows = shard_rows(10, len(ranks), rank.rank)
        landed = rank.slab.rows(256, rows, 16, torch.bfloat16)
        assert torch.equal(landed.view(torch.int16), made[start : start + rows].view(torch.int16))
