# SPDX-License-Identifier: Apache-2.0
"""Who owns which rows, and which encode rank serves whom.

The one owner of row geometry: both sides of a transfer call these functions with
the same integers and so get the same answer. Pure arithmetic; knows nothing of
bytes, tensors, frames or engines.

Words: an item has ``rows`` rows; a prefill engine has ``ranks`` tensor-parallel
ranks numbered from 0; an encode engine has ``encode_ranks`` ranks.
"""

from typing import NamedTuple


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


def largest_shard(rows: int, ranks: int, *, sharded: bool) -> int:
    """Row count of the largest part any rank receives (what each rank sets aside)."""
    return wanted_rows(rows, ranks, 0, sharded=sharded).rows


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
