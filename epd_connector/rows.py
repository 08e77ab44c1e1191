# SPDX-License-Identifier: Apache-2.0
"""Who owns which rows, and which encode rank serves whom.

The one owner of row geometry: both sides of a transfer call these functions with
the same integers and so get the same answer. Pure arithmetic; knows nothing of
bytes, tensors, frames or engines.

Words: an item has ``rows`` rows; a prefill engine has ``ranks`` tensor-parallel
ranks numbered from 0; an encode engine has ``encode_ranks`` ranks.
"""

import enum
from typing import NamedTuple


class Layout(enum.StrEnum):
    """Which rows of an item the ranks of a prefill engine receive, and where they lie.

    An item has one region, at the same offset of every rank's slab.
    """

    WHOLE = "whole"  # every rank receives all rows
    SHARDS = "shards"  # every rank receives its own rows; the TP group puts the item together
    SHARED = "shared"  # all ranks have one slab; every rank receives its own rows into their place

    @property
    def sharded(self) -> bool:
        """Whether each row is sent once, to the rank that owns it."""
        return self is not Layout.WHOLE


class Shard(NamedTuple):
    """A contiguous run of an item's rows: ``start <= row < start + rows``."""

    start: int
    rows: int


def shard_rows(rows: int, ranks: int, rank: int) -> Shard:
    """Rows of prefill rank ``rank`` when ``rows`` rows are sharded over ``ranks``.

    Contiguous and balanced: the first ``rows % ranks`` ranks own one row more. A
    rank may own no row at all (``rows == 0``).

    Raises:
        ValueError: a negative row count, or a rank outside ``0 <= rank < ranks``.

    """
    if rows < 0:
        raise ValueError(f"rows must not be negative, got {rows}")
    _check_rank("rank", rank, ranks)
    base, extra = divmod(rows, ranks)
    return Shard(rank * base + min(rank, extra), base + (rank < extra))


def wanted_rows(rows: int, ranks: int, rank: int, *, sharded: bool) -> Shard:
    """Rows that prefill rank ``rank`` receives: its shard, or the whole item."""
    if sharded:
        return shard_rows(rows, ranks, rank)
    _check_rank("rank", rank, ranks)
    return Shard(0, rows)


def landing_row(shard: Shard, layout: Layout) -> int:
    """Row of the item's region at which the rows of ``shard`` begin."""
    return shard.start if layout is Layout.SHARED else 0


def region_rows(rows: int, ranks: int, layout: Layout) -> int:
    """Rows that an item's region must have room for: those of the rank with the most."""
    if layout is Layout.SHARED:
        return rows
    return wanted_rows(rows, ranks, 0, sharded=layout.sharded).rows


def choose_layout(
    nbytes: int, ranks: int, *, shares_slab: bool, shard_min_bytes: int | None
) -> Layout:
    """How an item of ``nbytes`` bytes is best received by ``ranks`` ranks.

    ``shares_slab``: all ranks have one slab. ``shard_min_bytes``: what an item must have to be
    worth a collective; None: nothing is. See ``docs/architecture.md``.
    """
    if ranks == 1:
        return Layout.WHOLE
    if shares_slab:
        return Layout.SHARED
    if shard_min_bytes is None or nbytes < shard_min_bytes:
        return Layout.WHOLE
    return Layout.SHARDS


def serving_rank(rank: int, ranks: int, encode_ranks: int) -> int:
    """Encode rank that serves prefill rank ``rank`` of ``ranks``.

    Every encode rank holds the whole tower output, so any of them could serve; the
    choice ``rank * encode_ranks // ranks`` gives each a contiguous block of ranks.
    """
    _check_rank("rank", rank, ranks)
    _check_rank("encode_ranks", 0, encode_ranks)
    return rank * encode_ranks // ranks


def served_ranks(encode_rank: int, encode_ranks: int, ranks: int) -> range:
    """Prefill ranks served by ``encode_rank``; empty when it serves nobody."""
    _check_rank("encode_rank", encode_rank, encode_ranks)
    _check_rank("ranks", 0, ranks)
    first = -(-encode_rank * ranks // encode_ranks)
    last = -(-(encode_rank + 1) * ranks // encode_ranks)
    return range(first, last)


def _check_rank(name: str, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise ValueError(f"{name} {rank} is not one of {ranks} ranks")
