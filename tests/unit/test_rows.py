# SPDX-License-Identifier: Apache-2.0
"""Row geometry: shards tile the item, and each prefill rank has exactly one server."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_connector.rows import (
    Layout,
    Shard,
    choose_layout,
    landing_row,
    region_rows,
    served_ranks,
    serving_rank,
    shard_rows,
    wanted_rows,
)

rows_counts = st.integers(0, 1 << 40)
rank_counts = st.integers(1, 80)


@given(rows_counts, rank_counts)
def test_shards_tile_the_item_in_order(rows: int, ranks: int) -> None:
    end = 0
    for rank in range(ranks):
        shard = shard_rows(rows, ranks, rank)
        assert shard.start == end
        end += shard.rows
    assert end == rows


@given(rows_counts, rank_counts)
def test_shards_are_balanced_and_the_first_are_the_larger(rows: int, ranks: int) -> None:
    sizes = [shard_rows(rows, ranks, rank).rows for rank in range(ranks)]
    assert sizes == [rows // ranks + 1] * (rows % ranks) + [rows // ranks] * (ranks - rows % ranks)


@given(rows_counts, rank_counts, st.sampled_from(Layout))
def test_a_region_has_room_for_what_lands_on_any_rank(
    rows: int, ranks: int, layout: Layout
) -> None:
    shards = [wanted_rows(rows, ranks, rank, sharded=layout.sharded) for rank in range(ranks)]
    ends = [landing_row(shard, layout) + shard.rows for shard in shards]
    assert region_rows(rows, ranks, layout) == max(ends)


@given(rows_counts, rank_counts)
def test_in_a_shared_slab_the_shards_lie_where_they_are_in_the_item(rows: int, ranks: int) -> None:
    shards = [shard_rows(rows, ranks, rank) for rank in range(ranks)]
    assert [landing_row(shard, Layout.SHARED) for shard in shards] == [s.start for s in shards]


@pytest.mark.parametrize(
    ("nbytes", "ranks", "shares_slab", "shard_min_bytes", "layout"),
    [
        (100, 1, True, 0, Layout.WHOLE),
        (100, 2, True, None, Layout.SHARED),
        (100, 2, False, None, Layout.WHOLE),
        (100, 2, False, 101, Layout.WHOLE),
        (100, 2, False, 100, Layout.SHARDS),
        (0, 2, False, 0, Layout.SHARDS),
    ],
)
def test_the_layout_by_what_the_ranks_have_and_the_item_weighs(
    nbytes: int, ranks: int, shares_slab: bool, shard_min_bytes: int | None, layout: Layout
) -> None:
    chosen = choose_layout(nbytes, ranks, shares_slab=shares_slab, shard_min_bytes=shard_min_bytes)
    assert chosen is layout


@given(rows_counts, rank_counts)
def test_a_full_copy_is_the_whole_item_on_every_rank(rows: int, ranks: int) -> None:
    wanted = {wanted_rows(rows, ranks, rank, sharded=False) for rank in range(ranks)}
    assert wanted == {Shard(0, rows)}


def test_fewer_rows_than_ranks_leaves_some_ranks_without() -> None:
    assert [shard_rows(2, 4, rank) for rank in range(4)] == [(0, 1), (1, 1), (2, 0), (2, 0)]
    assert shard_rows(0, 3, 2) == (0, 0)


@given(rank_counts, rank_counts)
def test_served_ranks_is_the_inverse_of_serving_rank(encode_ranks: int, ranks: int) -> None:
    for encode_rank in range(encode_ranks):
        expected = [p for p in range(ranks) if serving_rank(p, ranks, encode_ranks) == encode_rank]
        assert list(served_ranks(encode_rank, encode_ranks, ranks)) == expected


@given(rank_counts, rank_counts)
def test_served_ranks_are_contiguous_blocks_of_about_one_size(encode: int, ranks: int) -> None:
    blocks = [served_ranks(encode_rank, encode, ranks) for encode_rank in range(encode)]
    assert [rank for block in blocks for rank in block] == list(range(ranks))
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


@given(rank_counts, rank_counts)
def test_an_encode_rank_serves_nobody_only_where_there_are_more_of_them(
    encode: int, ranks: int
) -> None:
    idle = sum(not served_ranks(encode_rank, encode, ranks) for encode_rank in range(encode))
    assert idle == max(encode - ranks, 0)


@given(rows_counts, rank_counts, rank_counts)
def test_all_encode_ranks_together_send_every_row_once(rows: int, encode: int, ranks: int) -> None:
    end = 0
    for encode_rank in range(encode):
        for rank in served_ranks(encode_rank, encode, ranks):
            assert serving_rank(rank, ranks, encode) == encode_rank
            shard = wanted_rows(rows, ranks, rank, sharded=True)
            assert shard.start == end
            end += shard.rows
    assert end == rows


@pytest.mark.parametrize(
    ("encode", "ranks", "servers"),
    [
        (1, 4, [0, 0, 0, 0]),
        (2, 4, [0, 0, 1, 1]),
        (2, 3, [0, 0, 1]),
        (3, 4, [0, 0, 1, 2]),
        (4, 4, [0, 1, 2, 3]),
        (3, 2, [0, 1]),
        (4, 2, [0, 2]),
        (4, 3, [0, 1, 2]),
        (4, 1, [0]),
    ],
)
def test_who_serves_whom(encode: int, ranks: int, servers: list[int]) -> None:
    assert [serving_rank(rank, ranks, encode) for rank in range(ranks)] == servers


def test_more_encode_ranks_than_prefill_ranks_leaves_some_serving_nobody() -> None:
    assert [len(served_ranks(rank, 5, 2)) for rank in range(5)] == [1, 0, 1, 0, 0]


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0), (0, -1)])
def test_a_rank_that_does_not_exist_is_refused(rank: int, ranks: int) -> None:
    message = rf"{rank} is not one of {ranks} ranks"
    for call in (
        lambda: shard_rows(4, ranks, rank),
        lambda: wanted_rows(4, ranks, rank, sharded=False),
        lambda: serving_rank(rank, ranks, 1),
        lambda: served_ranks(rank, ranks, 1),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_the_other_engine_must_have_ranks_too() -> None:
    with pytest.raises(ValueError, match="encode_ranks 0 is not one of 0 ranks"):
        serving_rank(0, 1, 0)
    with pytest.raises(ValueError, match="ranks 0 is not one of 0 ranks"):
        served_ranks(0, 1, 0)


def test_a_negative_row_count_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        shard_rows(-1, 2, 0)
