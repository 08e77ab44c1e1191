# SPDX-License-Identifier: Apache-2.0
"""What every rank publishes is the encode engine's, byte for byte, in every layout."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from epd_connector.hosts.vllm.plan import StepPlan
from epd_connector.rows import Layout
from tests.group import rank_side
from tests.group.conftest import KEYS, MakeGroup
from tests.group.engines import EncodeEngine, PrefillEngine
from tests.group.material import Rows
from tests.group.rank_side import Step
from tests.unit.pair_bench import until

COUNTERS = {
    Layout.WHOLE: "items_whole",
    Layout.SHARDS: "items_sharded",
    Layout.SHARED: "items_shared",
}


@dataclass(frozen=True)
class Shape:
    """How two engines are put together."""

    layout: Layout
    ranks: int
    encode_ranks: int
    transport: str = "shm"
    dtype: str = "bfloat16"
    shared_memory: bool = True

    def __str__(self) -> str:
        gather = "" if self.shared_memory else "-gloo"
        ranks = f"{self.encode_ranks}to{self.ranks}"
        return f"{self.layout}-{ranks}-{self.transport}-{self.dtype}{gather}"


SHAPES = [
    *(
        Shape(layout, 2, encode_ranks, transport)
        for layout in Layout
        for encode_ranks in (1, 2)
        for transport in ("shm", "mooncake")
    ),
    Shape(Layout.SHARDS, 2, 3, dtype="float32"),
    Shape(Layout.SHARDS, 2, 1, shared_memory=False),
    Shape(Layout.SHARED, 2, 1, dtype="float32"),
    Shape(Layout.SHARED, 2, 3),
    Shape(Layout.WHOLE, 4, 3),
    Shape(Layout.SHARDS, 4, 2),
    Shape(Layout.SHARDS, 4, 3),
    Shape(Layout.SHARED, 4, 1, "mooncake"),
    Shape(Layout.SHARED, 4, 2),
    Shape(Layout.WHOLE, 8, 2),
    Shape(Layout.SHARDS, 8, 1),
    Shape(Layout.SHARDS, 8, 3),
    Shape(Layout.SHARED, 8, 2),
]


@dataclass
class World:
    """Both engines of a shape."""

    shape: Shape
    encode: EncodeEngine
    prefill: PrefillEngine
    names: Iterator[int] = field(default_factory=itertools.count)
    landed: list[Rows] = field(default_factory=list)

    def load(self, *items: Rows) -> list[Step]:
        """Items the whole way, right on every rank."""
        self.landed += items
        return self.prefill.load(self.encode, *items)

    def rows(self, rows: int, modality: str = "image") -> Rows:
        """An item that there has not been yet."""
        return Rows(f"{self.shape}-{next(self.names)}", rows, modality, self.shape.dtype)

    @property
    def collectives(self) -> int:
        """How many of them a step with items takes."""
        return int(self.shape.layout is Layout.SHARDS)

    @property
    def copies(self) -> int:
        """How often each byte is sent."""
        return self.shape.ranks if self.shape.layout is Layout.WHOLE else 1


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def world(request: pytest.FixtureRequest, group_of: MakeGroup) -> Iterator[World]:
    shape: Shape = request.param
    group = group_of(shape.ranks, shared_memory=shape.shared_memory)
    encode = EncodeEngine(shape.encode_ranks, shape.dtype, transport=shape.transport)
    extra = {**KEYS[shape.layout], "transport": shape.transport}
    prefill = PrefillEngine(group, shape.dtype, extra)
    yield World(shape, encode, prefill.up())
    prefill.close()
    encode.close()


def test_items_of_unequal_size_in_one_step_with_one_collective(world: World) -> None:
    ranks = world.shape.ranks
    sizes = (1, ranks - 1, ranks, ranks + 1, 5 * ranks, 257)
    items = [world.rows(n, "video" if n % 2 else "image") for n in sizes]
    before = world.encode.bytes_written()
    steps = world.load(*items)
    assert [step.gathers for step in steps] == [world.collectives] * ranks
    sent = world.encode.bytes_written() - before
    assert sent == world.copies * sum(rows.nbytes for rows in items)


@pytest.mark.parametrize("modality", ["image", "video"])
def test_an_item_alone_of_any_number_of_rows(world: World, modality: str) -> None:
    ranks = world.shape.ranks
    for n in (1, ranks - 1, ranks, ranks + 1, 16 * ranks):
        steps = world.load(world.rows(n, modality))
        assert [step.gathers for step in steps] == [world.collectives] * ranks


def test_what_is_held_is_published_again_without_a_transfer(world: World) -> None:
    items = [world.rows(n) for n in (1, 33, 64)]
    world.load(*items)
    before = world.encode.bytes_written()
    again = world.prefill.ask(world.encode, *items, claims=False)
    for step in world.prefill.loaded(again):
        assert step.published == again.prints
    assert world.encode.bytes_written() == before


def test_a_step_without_items_takes_no_collective(world: World) -> None:
    steps = world.prefill.group.all(rank_side.load, StepPlan())
    assert steps == [Step({}, 0)] * world.shape.ranks


def test_what_landed_is_counted_by_layout(world: World) -> None:
    world.load(world.rows(1), world.rows(100))
    nbytes = sum(rows.nbytes for rows in world.landed)
    sent = world.copies * nbytes
    # Ranks tell their heads what they counted a moment later.
    until(lambda: world.prefill.report().counters["bytes_landed"] == sent)
    until(lambda: world.encode.report().counters["bytes_sent"] == sent)
    counters = world.prefill.report().counters
    assert counters["embedding_bytes"] == nbytes
    assert counters["items_landed"] == len(world.landed)
    assert {name: counters[name] for name in COUNTERS.values()} == {
        name: len(world.landed) * (layout is world.shape.layout)
        for layout, name in COUNTERS.items()
    }
    for report in (world.prefill.report(), world.encode.report()):
        assert report.failures == ()
        assert report.counters["errors_internal"] == report.counters["frames_malformed"] == 0


# --- layouts mixed, and what the host gathers through ---------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_and_sharded_items_in_one_step(group_of: MakeGroup, ranks: int) -> None:
    group = group_of(ranks)
    encode = EncodeEngine(2, transport="shm")
    extra: dict[str, object] = {
        "share_slab": False,
        "shard_min_bytes": 4096,
        "transport": "shm",
    }
    prefill = PrefillEngine(group, extra=extra).up()
    sizes = (1, 31, 32, 200, 3, 33)  # Of 128 bytes each: 32 are the first that are sharded.
    items = [Rows(f"mixed-{ranks}-{n}", n) for n in sizes]
    steps = prefill.load(encode, *items)
    assert [step.gathers for step in steps] == [1] * ranks
    sharded = [rows for rows in items if rows.nbytes >= 4096]
    total = sum(rows.nbytes for rows in items)
    more = (ranks - 1) * sum(rows.nbytes for rows in items if rows not in sharded)
    assert encode.bytes_written() == total + more
    counters = prefill.report().counters
    assert (counters["items_sharded"], counters["items_whole"]) == (3, 3)
    prefill.close()
    encode.close()


def test_every_way_in_which_the_host_gathers_here_is_used(group_of: MakeGroup) -> None:
    """There are two, but for processors that the host has no fast one for."""
    for shared_memory in (True, False):
        group = group_of(2, shared_memory=shared_memory)
        seen = group.all(rank_side.gathers_through_shared_memory)
        has = group.all(rank_side.has_shared_memory_gathers)
        assert seen == [shared_memory and here for here in has]
