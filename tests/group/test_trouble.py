# SPDX-License-Identifier: Apache-2.0
"""One rank is late, or does not get its rows: nobody reads what is not there, nobody hangs.

The troubled rank is the last one, which the encode engine's last rank serves.
"""

import os
from collections.abc import Iterator

import pytest

from epd_connector.protocol.frames import Grant
from epd_connector.rows import Layout, serving_rank
from tests.group import encode_side, rank_side
from tests.group.conftest import MakeGroup
from tests.group.engines import EncodeEngine
from tests.group.trouble import ENCODE_RANKS, World, encode_engine, make_world
from tests.unit.pair_bench import until

SHAPES = [*((layout, 2) for layout in Layout), (Layout.SHARDS, 4), (Layout.SHARED, 4)]


@pytest.fixture(scope="module", params=SHAPES, ids=lambda shape: f"{shape[0]}-{shape[1]}")
def world(request: pytest.FixtureRequest, group_of: MakeGroup) -> Iterator[World]:
    layout, ranks = request.param
    world = make_world(layout, group_of(ranks))
    yield world
    world.close()


@pytest.fixture
def encode() -> Iterator[EncodeEngine]:
    engine = encode_engine()
    yield engine
    engine.child.leave()


# --- late, and twice ------------------------------------------------------------------------


def test_a_request_waits_for_a_rank_that_does_not_run(world: World, encode: EncodeEngine) -> None:
    item = world.rows()
    world.last.stop()
    asked = world.prefill.ask(encode, item)
    encode.encoded(item)
    world.others_land(asked)
    assert not world.prefill.runnable(asked)
    assert encode.bytes_written() == world.sent(item, *world.others)
    world.last.go_on()
    for step in world.prefill.loaded(asked):
        assert step.published == asked.prints
    assert encode.bytes_written() == world.sent(item, *range(world.ranks))
    world.goes_on()


def test_a_grant_that_comes_twice_is_written_once(world: World, encode: EncodeEngine) -> None:
    item, next_one = world.rows(), world.rows()
    world.last.call(rank_side.gate, frozenset(), frozenset({Grant}))
    world.prefill.load(encode, item)
    world.last.call(rank_side.gate)
    until(lambda: encode.report().counters["grants_repeated"] == 1)
    world.prefill.load(encode, next_one)
    everybody = range(world.ranks)
    sent = world.sent(item, *everybody) + world.sent(next_one, *everybody)
    assert encode.bytes_written() == sent
    world.goes_on()


# --- one rank does not get its rows ---------------------------------------------------------


def test_one_rank_is_refused(
    world: World, encode: EncodeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    item = world.rows()
    asked = world.prefill.ask(encode, item)
    encode.encoded(item, ranks=(0,))
    served = {r for r in range(world.ranks) if serving_rank(r, world.ranks, ENCODE_RANKS) == 0}
    until(lambda: world.prefill.landed(asked.rooms[0]) == served)
    encode.child.call(encode_side.over, asked.rooms[0])
    world.prefill.failed(asked)
    assert "the tower broke down" in caplog.text
    until(lambda: world.prefill.over(asked.rooms[0]))
    world.goes_on()


def test_the_write_to_one_rank_fails(
    world: World, encode: EncodeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    if world.layout is Layout.SHARED:
        # The last rank has no row of it, so only the first encode rank maps the slab of all.
        world.prefill.load(encode, world.rows(1))
    path = world.last.call(rank_side.slab_path)
    assert path is not None
    os.rename(path, f"{path}.away")
    item = world.rows()
    asked = world.prefill.ask(encode, item)
    encode.encoded(item)
    world.prefill.failed(asked)
    os.rename(f"{path}.away", path)
    assert f"shared segment {path} cannot be opened" in caplog.text
    until(lambda: world.prefill.over(asked.rooms[0]))
    world.goes_on()


def test_a_request_is_given_up_while_one_rank_waits(world: World, encode: EncodeEngine) -> None:
    world.hold_grants_of_the_last()
    item, next_one = world.rows(), world.rows()
    asked = world.prefill.ask(encode, item)
    encode.encoded(item)
    world.others_land(asked)
    world.prefill.finish(asked)
    until(lambda: world.prefill.over(asked.rooms[0]))
    # The grant comes when everybody is done with it, and nothing is written for it.
    world.last.call(rank_side.gate)
    world.prefill.load(encode, next_one)
    sent = world.sent(item, *world.others) + world.sent(next_one, *range(world.ranks))
    assert encode.bytes_written() == sent
    assert world.prefill.failures(asked) == 0
    world.goes_on()
