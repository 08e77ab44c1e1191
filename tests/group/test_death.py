# SPDX-License-Identifier: Apache-2.0
"""Encode engines that are killed, before, between and after their writes."""

from collections.abc import Iterator

import pytest

from epd_connector.protocol.frames import Landed
from epd_connector.rows import Layout
from tests.group import encode_side, rank_side
from tests.group.conftest import MakeGroup
from tests.group.engines import Asked, EncodeEngine
from tests.group.trouble import World, encode_engine, make_world
from tests.unit.pair_bench import until


@pytest.fixture(params=Layout, ids=str)
def world(request: pytest.FixtureRequest, group_of: MakeGroup) -> Iterator[World]:
    world = make_world(request.param, group_of(2))
    yield world
    world.close()


def asks_before_there_are_rows(world: World, encode: EncodeEngine) -> Asked:
    asked = world.prefill.ask(encode, world.rows())
    until(lambda: encode.child.call(encode_side.grants, asked.rooms[0]) == world.ranks)
    return asked


def waits_for_the_last_rank_only(world: World, encode: EncodeEngine) -> Asked:
    world.hold_grants_of_the_last()
    item = world.rows()
    asked = world.prefill.ask(encode, item)
    encode.encoded(item)
    world.others_land(asked)
    return asked


def is_not_told_that_all_is_written(world: World, encode: EncodeEngine) -> Asked:
    encode.child.call(encode_side.hold, frozenset({Landed}))
    item = world.rows()
    asked = world.prefill.ask(encode, item)
    encode.encoded(item)
    until(lambda: encode.child.call(encode_side.held_back) == world.ranks)
    assert encode.bytes_written() == world.sent(item, *range(world.ranks))
    return asked


def has_everything(world: World, encode: EncodeEngine) -> Asked:
    item = world.rows()
    asked = world.prefill.ask(encode, item)
    encode.encoded(item)
    world.prefill.ready(asked)
    return asked


def test_requests_fail_when_their_encode_engines_die_and_loads_do_not(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    losing = [
        asks_before_there_are_rows,
        is_not_told_that_all_is_written,
        waits_for_the_last_rank_only,
    ]
    engines = [encode_engine() for _ in range(len(losing) + 1)]
    good = has_everything(world, engines[-1])
    asked = [ask(world, encode) for ask, encode in zip(losing, engines, strict=False)]
    for encode in engines:
        encode.child.kill()
    world.last.call(rank_side.gate)
    for step in world.prefill.loaded(good):
        assert step.published == good.prints
    for request in asked:
        world.prefill.failed(request)
    assert caplog.text.count("fails: peer_dead: ") == len(losing)
    assert caplog.text.count("its process is gone; it may be sent again") == len(losing)
    world.goes_on()
