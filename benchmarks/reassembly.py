# SPDX-License-Identifier: Apache-2.0
"""Section `reassembly`: putting a step's sharded items together on all ranks of an engine.

Each rank is a process in the host's tensor-parallel group, with its own rows in its slab.
Measured is one step's ``Reassembly.assemble``, from its beginning until the slowest rank has
all items, and how many collectives of the group it took.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.items import ROW_NBYTES, WIDTH
from benchmarks.processes import Peer, Processes, Side, Up
from benchmarks.results import Goal, Measured, Series
from benchmarks.sides import Setup, join_group, leave_group

if TYPE_CHECKING:
    from epd_connector.hosts.vllm.plan import LoadSpec

RANKS = (2, 4)
ITEMS = (1, 4, 16)
ITEM_ROWS = 1024
"""4.2 MB."""
SLAB_NBYTES = max(ITEMS) * ITEM_ROWS * ROW_NBYTES
ROUNDS, QUICK_ROUNDS, WARMUP = 21, 7, 2


@dataclass(frozen=True, slots=True)
class Assemble:
    """One step that loads so many items. Answered with ``Assembled``."""

    items: int


@dataclass(frozen=True, slots=True)
class Assembled:
    """Nanoseconds that the step took on one rank, and collectives of its group."""

    taken_ns: int
    collectives: int


class RankSide:
    """The process of one rank. See ``processes.Side``."""

    address = ""

    def __init__(self, setup: Setup, rank: int) -> None:
        join_group(setup, rank, ranks=setup.ranks, name="prefill")
        from vllm.distributed.parallel_state import get_tp_group

        from epd_connector.hosts.vllm.reassembly import Reassembly
        from epd_connector.memory.tensors import Publisher, SlabMemory

        group = get_tp_group()
        self._ranks = setup.ranks
        self._slab = SlabMemory.on_host(
            SLAB_NBYTES, shared=False, pin=False, owner_tag="reassembly"
        )
        self._publisher = Publisher(self._slab, group.device)
        self._collectives = 0
        self._gather = group.device_communicator.all_gather
        group.device_communicator.all_gather = self._counted
        self._reassembly = Reassembly(group)
        self._reassembly.warm_up()

    def _counted(self, *arguments: object, **named: object) -> object:
        self._collectives += 1
        return self._gather(*arguments, **named)

    def handle(self, order: object) -> object:
        """See ``processes.Side``."""
        assert isinstance(order, Assemble)
        loads = self._loads(order.items)
        before, begun_ns = self._collectives, time.monotonic_ns()
        wholes = self._reassembly.assemble(self._publisher, loads, lambda load: lambda wait: wait())
        taken_ns = time.monotonic_ns() - begun_ns
        assert all(whole.shape == (ITEM_ROWS, WIDTH) for whole in wholes)
        return Assembled(taken_ns, self._collectives - before)

    def _loads(self, items: int) -> "list[LoadSpec]":
        from epd_connector.hosts.vllm.plan import LoadSpec
        from epd_connector.rows import Layout

        step = ITEM_ROWS * ROW_NBYTES // self._ranks
        return [
            LoadSpec(n + 1, f"item-{n}", n * step, ITEM_ROWS, WIDTH, "bfloat16", Layout.SHARDS)
            for n in range(items)
        ]

    def close(self) -> None:
        """See ``processes.Side``."""
        leave_group()


def _rank_side(setup: Setup, rank: int) -> Side:
    return RankSide(setup, rank)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Steps of ``items`` items on ``ranks`` ranks: milliseconds of each, and its collectives."""

    ranks: int
    items: int
    taken_ms: tuple[float, ...]
    collectives: int


def run(rounds: int) -> list[StepCost]:
    """All of ``ITEMS`` on all of ``RANKS``, ``rounds`` times each."""
    found = []
    for ranks in RANKS:
        processes = Processes()
        with tempfile.TemporaryDirectory(prefix="epd-reassembly-") as scratch:
            key = f"reassembly-{Path(scratch).name}-{ranks}"
            setup = Setup("epd", "none", "shards", ranks, SLAB_NBYTES, key, scratch, 0)
            peers = [
                processes.start(f"rank {rank}", _rank_side, setup, rank) for rank in range(ranks)
            ]
            try:
                for peer in peers:
                    peer.receive(Up)
                found += [_steps(peers, ranks, items, rounds) for items in ITEMS]
            finally:
                processes.close()
                for path in Path("/dev/shm").glob(f"{key}-*"):
                    path.unlink()
    return found


def _steps(peers: list[Peer], ranks: int, items: int, rounds: int) -> StepCost:
    taken_ms, collectives = [], 0
    for _ in range(WARMUP + rounds):
        for peer in peers:
            peer.send(Assemble(items))
        answers = [peer.receive(Assembled) for peer in peers]
        taken_ms.append(max(answer.taken_ns for answer in answers) / 1e6)
        collectives = max(collectives, *(answer.collectives for answer in answers))
    return StepCost(ranks, items, tuple(taken_ms[WARMUP:]), collectives)


def measure(quick: bool) -> Measured:
    """See ``results``."""
    return compare(run(QUICK_ROUNDS if quick else ROUNDS))


def compare(costs: Sequence[StepCost]) -> Measured:
    """Series of all ``costs``; the goal is one collective per step, whatever it loads."""
    series = [
        Series("reassembly", f"{cost.items} items, {cost.ranks} ranks", "ms", cost.taken_ms)
        for cost in costs
    ]
    most = max(cost.collectives for cost in costs)
    return Measured(series, [Goal("collectives per step", "", 1.0, float(most))])
