# SPDX-License-Identifier: Apache-2.0
"""A full send slab holds requests back, all but those that would make it move."""

from epd_connector.core.effects import Effect, TellHead
from epd_connector.core.encode_head import FULL_S, EncodeHead, FromRank
from epd_connector.core.send_events import Encoded, Staged
from epd_connector.core.send_pressure import REPEAT_S
from epd_connector.protocol.frames import SlabFree, SlabFull
from tests.unit.send_bench import ROWS, WIDTH, Bench, of
from tests.unit.test_encode_head import SETTINGS

SLAB, ITEM = 1024, 256


def said(effects: list[Effect]) -> list[object]:
    """What the rank tells its head."""
    return [told.frame for told in of(TellHead, effects)]


def encoded(bench: Bench, *rooms: int) -> list[object]:
    effects = []
    for room in rooms:
        effects += bench.claim(room, f"h{room}")
        effects += bench.do(Encoded(f"h{room}", room, ROWS, WIDTH, "bfloat16", ITEM))
    return said(effects)


def full() -> Bench:
    """Two items are in the slab's lower half, and three wait."""
    bench = Bench(slab_nbytes=SLAB)
    encoded(bench, 1, 2, 3, 4, 5)
    return bench


def test_it_is_said_once_when_more_than_half_a_slab_waits() -> None:
    bench = Bench(slab_nbytes=SLAB)
    assert encoded(bench, 1, 2, 3, 4) == []
    assert encoded(bench, 5) == [SlabFull(())]
    assert encoded(bench, 6) == []
    assert bench.count("slabs_filled") == 1


def test_it_is_said_again_while_it_lasts() -> None:
    bench = full()
    assert bench.machine.next_deadline() == REPEAT_S
    assert said(bench.tick(REPEAT_S)) == [SlabFull(())]
    assert said(bench.tick(REPEAT_S + 0.1)) == []
    assert said(bench.tick(2 * REPEAT_S)) == [SlabFull(())]


def test_it_is_over_when_little_waits() -> None:
    bench = full()
    bench.do(Staged(1))
    bench.do(Staged(2))
    assert said(bench.skip(1)) == []
    assert said(bench.skip(2)) == [SlabFree()]
    assert bench.machine.next_deadline() != REPEAT_S


def test_rooms_that_peers_have_memory_for_are_named() -> None:
    bench = Bench(slab_nbytes=SLAB)
    bench.asked(7, 7)
    bench.claim(8, "h8")
    bench.grant(8, 8)
    assert encoded(bench, 1, 2, 3, 4, 5) == [SlabFull((7, 8))]
    assert said(bench.grant(9, 9)) == [SlabFull((9,))]
    assert said(bench.grant(9, 9)) == [], "a repeat is no news"
    assert said(bench.grant(1, 1)) == [], "its rows are here"
    assert said(bench.tick(REPEAT_S)) == [SlabFull((7, 8, 9))]


def test_the_head_holds_back_who_is_not_granted_while_any_rank_is_full() -> None:
    head = EncodeHead(SETTINGS)
    assert not head.holds_back([1], 0.0)
    head.handle(FromRank(0, SlabFull((2,))), 0.0)
    head.handle(FromRank(1, SlabFull(())), 0.0)
    assert head.holds_back([1, 3], 0.1)
    assert not head.holds_back([1, 2], 0.1)
    head.handle(FromRank(0, SlabFull((3,))), 0.2)
    assert not head.holds_back([3], 0.2)
    head.handle(FromRank(0, SlabFree()), 0.3)
    assert head.holds_back([1], 0.3)
    head.handle(FromRank(1, SlabFree()), 0.4)
    assert not head.holds_back([1], 0.4)


def test_a_word_that_was_lost_holds_nobody_back_for_ever() -> None:
    head = EncodeHead(SETTINGS)
    head.handle(FromRank(0, SlabFull((2,))), 0.0)
    assert head.holds_back([1], FULL_S - 0.1)
    assert not head.holds_back([1], FULL_S)
    head.handle(FromRank(0, SlabFull(())), 10.0)
    assert head.holds_back([2], 10.0), "what was granted then is over"
