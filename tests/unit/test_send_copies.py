# SPDX-License-Identifier: Apache-2.0
"""The encode rank's staged copies: shared by rooms, in line for memory, freed in time."""

from epd_connector.core.effects import Stage, Write
from epd_connector.core.send_events import Encoded, Staged, Wrote
from epd_connector.core.send_state import RoomState
from epd_connector.errors import Code
from tests.unit.send_bench import (
    BROKEN,
    ROWS,
    WIDTH,
    Bench,
    answers,
    dropped,
    of,
    reason,
)


def test_rooms_of_one_item_share_one_copy() -> None:
    bench = Bench()
    bench.hello()
    bench.claim(1)
    bench.claim(2)
    bench.grant(1, 1)
    bench.grant(2, 2)
    effects = bench.encode()
    assert len(of(Stage, effects)) == 1
    bench.claim(3)
    effects = bench.stage(effects)
    assert dropped(bench.encode(token=2)) == [2]
    bench.claim(4)
    assert bench.state(4) is RoomState.OFFERED
    writes = of(Write, effects + bench.grant(3, 3) + bench.grant(4, 4))
    assert len({write.source for write in writes}) == 1
    for write in writes:
        bench.do(Wrote(write.write))
    assert bench.at_rest()


def test_copies_wait_for_memory_in_order() -> None:
    bench = Bench(slab_nbytes=512)
    sizes = {1: 256, 2: 512, 3: 256}
    staged = []
    for room, nbytes in sizes.items():
        bench.claim(room, f"h{room}")
        event = Encoded(f"h{room}", room, ROWS, WIDTH, "bfloat16", nbytes)
        staged += of(Stage, bench.do(event))
    assert [stage.token for stage in staged] == [1], "the third must not overtake the second"
    bench.do(Staged(1))
    assert [stage.token for stage in of(Stage, bench.skip(1))] == [2]
    bench.do(Staged(2))
    assert [stage.token for stage in of(Stage, bench.skip(2))] == [3]
    assert bench.count("stagings_deferred") > 0


def test_a_copy_that_nobody_waits_for_any_more_lets_the_next_one_in() -> None:
    bench = Bench(slab_nbytes=512)
    for room in (1, 2, 3):
        bench.claim(room, f"h{room}")
        nbytes = 512 if room == 2 else 256
        bench.do(Encoded(f"h{room}", room, ROWS, WIDTH, "bfloat16", nbytes))
    effects = bench.skip(2)
    assert dropped(effects) == [2]
    assert [stage.token for stage in of(Stage, effects)] == [3]


def test_rows_that_wait_for_memory_are_bounded() -> None:
    bench = Bench(slab_nbytes=512)
    for room in range(1, 5):
        bench.claim(room, f"h{room}")
        effects = bench.do(Encoded(f"h{room}", room, ROWS, WIDTH, "bfloat16", 512))
    assert dropped(effects) == [4], "one is staged, two wait"
    bench.hello()
    late = bench.grant(4, 4)
    assert reason(late).code is Code.OVERLOADED
    assert "send_slab_bytes" in reason(late).reason
    bench.do(Staged(1))
    bench.skip(1)
    bench.claim(5, "h5")
    assert dropped(bench.do(Encoded("h5", 5, ROWS, WIDTH, "bfloat16", 512))) == []


def test_an_item_larger_than_the_slab_fails_with_the_remedy() -> None:
    bench = Bench(slab_nbytes=256)
    bench.asked()
    bench.claim()
    effects = bench.do(Encoded("h", 1, ROWS, WIDTH, "bfloat16", 257))
    assert dropped(effects) == [1]
    assert reason(effects).code is Code.TOO_LARGE
    assert all(word in reason(effects).reason for word in ("257", "256", "send_slab_bytes"))
    assert bench.at_rest()


def test_a_staging_error_fails_only_the_rooms_of_that_item() -> None:
    bench = Bench()
    bench.hello()
    for room, hash in ((1, "a"), (2, "a"), (3, "b")):
        bench.claim(room, hash)
        bench.grant(room, room)
    bench.encode("a")
    bench.encode("b", 2)
    effects = bench.do(Staged(1, BROKEN))
    assert answers(effects) == [(0, "Refused", 1, 1), (0, "Refused", 2, 2)]
    assert len(of(Write, bench.do(Staged(2)))) == 1


def test_memory_that_is_copied_into_stays_until_copying_has_ended() -> None:
    bench = Bench()
    bench.claim()
    effects = bench.encode()
    bench.skip()
    assert bench.machine.balance().leased > 0
    assert not bench.machine.idle()
    bench.stage(effects)
    assert bench.at_rest()
