# SPDX-License-Identifier: Apache-2.0
"""Sharded items become whole: one collective of the host's tensor-parallel group per step.

Owns the tensors that are gathered into and the order of pieces in them. Does not own the
slab (``memory.tensors``) or the group. Every rank of the group calls ``assemble`` in the same
step with the same loads in the same order, because one head decided them; no other part of
the connector issues a collective while the engine runs. On the worker's main thread.

Two ways, by what the group's communicator offers:

* NCCL: own rows go from the slab to their place in the published tensor, and one fused launch
  sends each rank's rows of each item to their place on all others. Nothing is copied twice.
* Anything else has an all-gather of equal parts, whose result is ordered by rank: the step's
  own rows are packed into one part. A single item whose rows divide evenly is published as it
  was gathered; pieces of any others are copied into their tensors.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from epd_connector.hosts.vllm.plan import LoadSpec
from epd_connector.memory.tensors import Publisher, WhenRead
from epd_connector.rows import Layout, Shard, region_rows, shard_rows

if TYPE_CHECKING:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.parallel_state import GroupCoordinator

_ALIGNMENT = 16
"""Bytes; a piece must begin where an element of any dtype may."""
_CARRIER = torch.float32
"""The dtype as which bytes are gathered: the host's shared-memory group takes floats only. No
arithmetic is done on them, so bits stay what they are."""


class Reassembly:
    """Puts sharded items together on the ranks of ``group``."""

    def __init__(self, group: "GroupCoordinator") -> None:
        self._group = group
        self._ranks = group.world_size
        self._rank = group.rank_in_group
        self._nccl = _nccl_of(group)

    def warm_up(self) -> None:
        """Makes the group's buffers and connections, so that no request pays for it.

        A collective: every rank must call it.
        """
        if self._nccl is None:
            self._gather(torch.zeros(_ALIGNMENT, dtype=torch.uint8, device=self._device))
            return
        whole = torch.zeros((self._ranks, 1), dtype=torch.bfloat16, device=self._device)
        self._fuse([(whole, [1] * self._ranks)])

    def assemble(
        self,
        publisher: Publisher,
        loads: Sequence[LoadSpec],
        when_read: Callable[[LoadSpec], WhenRead],
    ) -> list[torch.Tensor]:
        """The items of ``loads``, each ``[rows, width]``. A collective: see the module.

        ``publisher``: of this rank's slab, where its own rows are. ``when_read(load)`` is told,
        once per load, when the slab's bytes are not read any more.
        """
        if self._nccl is not None:
            return self._assemble_in_place(publisher, loads, when_read)
        return self._assemble_packed(publisher, loads, when_read)

    @property
    def _device(self) -> torch.device:
        return self._group.device

    def _shards(self, load: LoadSpec) -> list[Shard]:
        return [shard_rows(load.rows, self._ranks, rank) for rank in range(self._ranks)]

    # --- NCCL -------------------------------------------------------------------------

    def _assemble_in_place(
        self,
        publisher: Publisher,
        loads: Sequence[LoadSpec],
        when_read: Callable[[LoadSpec], WhenRead],
    ) -> list[torch.Tensor]:
        wholes = []
        for load in loads:
            whole = publisher.empty(load.rows, load.width, load.dtype)
            start, rows = shard_rows(load.rows, self._ranks, self._rank)
            publisher.fill(whole[start : start + rows], load.offset, when_read(load))
            wholes.append((whole, [shard.rows for shard in self._shards(load)]))
        self._fuse(wholes)
        return [whole for whole, _ in wholes]

    def _fuse(self, wholes: Sequence[tuple[torch.Tensor, list[int]]]) -> None:
        """One launch: NCCL merges what is called between group start and end.

        Source and destination of the own rows are the same memory, which NCCL allows for a
        broadcast's root.
        """
        assert self._nccl is not None
        self._nccl.group_start()
        for whole, sizes in wholes:
            start = sum(sizes[: self._rank])
            self._nccl.all_gatherv(whole, whole[start : start + sizes[self._rank]], sizes=sizes)
        self._nccl.group_end()

    # --- an all-gather of equal parts -------------------------------------------------

    def _assemble_packed(
        self,
        publisher: Publisher,
        loads: Sequence[LoadSpec],
        when_read: Callable[[LoadSpec], WhenRead],
    ) -> list[torch.Tensor]:
        seats, part_nbytes = self._seats(loads)
        part = torch.empty(part_nbytes, dtype=torch.uint8, device=self._device)
        for load, seat in zip(loads, seats, strict=True):
            own = shard_rows(load.rows, self._ranks, self._rank)
            publisher.fill(_piece(part, seat, own.rows, load), load.offset, when_read(load))
        gathered = self._gather(part)
        if len(loads) == 1 and gathered.numel() == loads[0].rows * _row_nbytes(loads[0]):
            return [_piece(gathered, 0, loads[0].rows, loads[0])]
        parts = gathered.view(self._ranks, part_nbytes)
        return [self._join(parts, seat, load) for load, seat in zip(loads, seats, strict=True)]

    def _gather(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks in their order; all bytes, and as many on every rank."""
        return self._group.all_gather(part.view(_CARRIER), dim=0).view(torch.uint8)

    def _seats(self, loads: Sequence[LoadSpec]) -> tuple[list[int], int]:
        """Byte at which each load's piece begins in every rank's part, and a part's bytes."""
        seats, end = [], 0
        for load in loads:
            seats.append(end)
            rows = region_rows(load.rows, self._ranks, Layout.SHARDS)
            end += -(-rows * _row_nbytes(load) // _ALIGNMENT) * _ALIGNMENT
        return seats, end

    def _join(self, parts: torch.Tensor, seat: int, load: LoadSpec) -> torch.Tensor:
        """One item out of the parts of all ranks, ``[ranks, bytes of a part]``."""
        pieces = [
            _piece(part, seat, shard.rows, load)
            for part, shard in zip(parts, self._shards(load), strict=True)
        ]
        return torch.cat(pieces)


def _row_nbytes(load: LoadSpec) -> int:
    return load.width * int(getattr(torch, load.dtype).itemsize)


def _piece(part: torch.Tensor, seat: int, rows: int, load: LoadSpec) -> torch.Tensor:
    """``[rows, width]`` of the load's dtype, a view of the bytes of ``part`` from ``seat``."""
    raw = part[seat : seat + rows * _row_nbytes(load)]
    return raw.view(getattr(torch, load.dtype)).view(rows, load.width)


def _nccl_of(group: "GroupCoordinator") -> "PyNcclCommunicator | None":
    """The group's NCCL communicator, where it has one that works."""
    nccl: PyNcclCommunicator | None = getattr(group.device_communicator, "pynccl_comm", None)
    return None if nccl is None or nccl.disabled else nccl
