# SPDX-License-Identifier: Apache-2.0
"""What an item costs in work, not in time: frames, messages, wake-ups, copies.

A change that makes an item cost more shows here, however fast or slow the machine is. Time is
the benchmark's. Collectives per step are counted in ``tests/group``, calls of the scheduler's
thread in ``test_head_adapter``.
"""

import cProfile
import gc
import sys

import pytest

from epd_connector.protocol.frames import MAX_FRAMES
from tests.unit.work_bench import NBYTES, WRITE_PARALLELISM, World

MANY = 64


@pytest.fixture
def world() -> World:
    """Two engines that know each other."""
    world = World()
    world.up()
    world.send([1])
    world.work.clear()
    return world


def test_frames_of_one_item(world: World) -> None:
    world.send([2])
    assert world.work.frames == {
        "Open": 1,
        "Grant": 1,
        "Landed": 1,
        "RoomLanded": 1,
        "RoomLoaded": 1,
    }
    assert world.work.messages == 5


def test_many_items_share_their_messages(world: World) -> None:
    """What is asked for at once is one message for every 32 items, and what ends one write after
    the other is one for as many as are written side by side."""
    world.send(range(2, 2 + MANY))
    assert set(world.work.frames.values()) == {MANY}
    assert len(world.work.frames) == 5
    in_batches, as_written = -(-MANY // MAX_FRAMES), -(-MANY // WRITE_PARALLELISM)
    assert world.work.messages <= 3 * in_batches + 2 * as_written


def test_wake_ups_of_one_item(world: World) -> None:
    """Of the encode rank: by its claim, its rows, the end of its write. Of the prefill rank: when
    the item is loaded. Of the prefill head: when a step is over or a request comes or goes."""
    world.send([2])
    assert world.work.wakes <= 3 + 1 + 4


def test_lent_rows_are_read_where_they_are(world: World) -> None:
    before = world.transport.bytes_written()
    world.send(range(2, 2 + MANY))
    assert world.transport.bytes_written() - before == MANY * NBYTES
    assert world.rows.copied_nbytes == 0
    assert not world.rows.held


def test_work_per_item_in_calls_of_functions(world: World) -> None:
    """Of all four loops and of the scheduler's thread together. It is what CPU time per room is
    made of: about 1,000 with Python 3.11."""
    profile = cProfile.Profile()
    profile.enable()
    world.send(range(2, 2 + MANY))
    profile.disable()
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls / MANY <= 1200


def test_what_is_kept_of_a_room_that_is_over(world: World) -> None:
    """Blocks of memory on both sides: its tombstones, and the answers to its grants."""
    world.send(range(2, 2 + MANY))
    gc.collect()
    before = sys.getallocatedblocks()
    world.send(range(100, 100 + MANY))
    gc.collect()
    assert (sys.getallocatedblocks() - before) / MANY <= 40
