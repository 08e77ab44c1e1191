# SPDX-License-Identifier: Apache-2.0
"""What runs in a prefill rank's process: the host's group, and the connector's rank adapter.

Functions on ``RankSide`` are called by the test process. Those that say so are collectives: all
ranks of the group must be told to run them.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from epd_connector.hosts.vllm.plan import StepPlan
from epd_connector.hosts.vllm.rank import RankAdapter
from tests.group.gated_link import NONE, GatedLink, Kinds, use_gated_links
from tests.group.host_config import HostConfig
from tests.group.material import Print, print_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in its group. ``ident``: ranks with one ident share memory for gathers."""

    rank: int
    ranks: int
    rendezvous: str
    ident: str


class RankSide:
    """One rank. Making it is a collective."""

    def __init__(self, seat: Seat) -> None:
        torch.set_num_threads(1)
        os.environ["VLLM_DIST_IDENT"] = seat.ident
        use_gated_links()
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(
                seat.ranks, seat.rank, f"file://{seat.rendezvous}", seat.rank, "gloo"
            )
            parallel_state.initialize_model_parallel(seat.ranks, backend="gloo")
        self.adapter: RankAdapter | None = None
        self.gathers = 0
        communicator = parallel_state.get_tp_group().device_communicator
        communicator.all_gather = self._counted(communicator.all_gather)

    def _counted(self, collective: Callable[..., T]) -> Callable[..., T]:
        def run(*args: object, **kwargs: object) -> T:
            self.gathers += 1
            return collective(*args, **kwargs)

        return run

    @property
    def link(self) -> GatedLink:
        assert self.adapter is not None
        assert self.adapter._parts is not None
        link = self.adapter._parts.runtime._link
        assert isinstance(link, GatedLink)
        return link


def gathers_through_shared_memory(side: RankSide) -> bool:
    """Whether the host's group has found a faster way than gloo's."""
    communicator = parallel_state.get_tp_group().device_communicator
    return communicator.dist_module is not torch.distributed


def has_shared_memory_gathers(side: RankSide) -> bool:
    """Whether the host's build for this machine's processor has a faster way than gloo's."""
    return hasattr(torch.ops._C, "init_shm_manager")


def start(side: RankSide, host: HostConfig) -> None:
    """Makes and starts an adapter. A collective where ranks share or gather."""
    close(side)
    side.adapter = RankAdapter(host.read(), host)
    side.adapter.start()


def close(side: RankSide) -> None:
    if side.adapter is not None:
        side.adapter.close()
        side.adapter = None


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one step on one rank."""

    published: dict[str, Print]
    gathers: int


def load(side: RankSide, plan: StepPlan) -> Step:
    """One engine step. A collective where the plan has sharded items."""
    assert side.adapter is not None
    before = side.gathers
    cache: dict[str, torch.Tensor] = {}
    side.adapter.start_load_caches(plan, cache)
    published = {hash: print_of(tensor) for hash, tensor in cache.items()}
    return Step(published, side.gathers - before)


def meet(side: RankSide) -> list[float]:
    """A collective of the host: what every rank of the group brought."""
    group = parallel_state.get_tp_group()
    mine = torch.tensor([float(group.rank_in_group)])
    met: list[float] = group.all_gather(mine, 0).tolist()
    return met


def gate(side: RankSide, held: Kinds = NONE, doubled: Kinds = NONE) -> None:
    """What this rank says is held back, or said twice, from now on."""
    side.link.gate(held=held, doubled=doubled)


def held_back(side: RankSide) -> int:
    return side.link.held_back()


def slab_path(side: RankSide) -> str | None:
    """The file behind this rank's receive slab."""
    assert side.adapter is not None
    assert side.adapter._parts is not None
    slab = side.adapter._parts.receive_slab
    assert slab is not None
    return slab.path
