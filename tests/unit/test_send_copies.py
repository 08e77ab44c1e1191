# SPDX-License-Identifier: Apache-2.0
"""The encode rank's staged copies: shared by rooms, in line for memory, freed in time."""

from epd_connector.core.effects import Effect, Stage, Write
from epd_connector.core.send_events import Encoded, Staged, Wrote
from epd_connector.core.send_state import RoomState
from epd_connector.errors import Code
from tests.unit.send_bench import (
    BROKEN,
    ROW_NBYTES,
    ROWS,
    SETTINGS,
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


def granted(bench: Bench, *rooms: int) -> None:
    bench.hello()
    for room in rooms:
        bench.grant(room, room)


def encoded(bench: Bench, room: int, nbytes: int) -> list[Effect]:
    """Room ``room`` is claimed, and its rows are there: ``nbytes`` bytes, which is also their
    token."""
    bench.claim(room, f"h{room}")
    return bench.do(Encoded(f"h{room}", room, ROWS, WIDTH, "bfloat16", nbytes))


def staged(effects: list[Effect]) -> list[int]:
    """Tokens of the rows that are given memory."""
    return [stage.token for stage in of(Stage, effects)]


def test_granted_copies_wait_for_memory_in_order() -> None:
    bench = Bench(slab_nbytes=512)
    granted(bench, 1, 2, 3)
    assert staged(encoded(bench, 1, 256)) == [1]
    assert staged(encoded(bench, 2, 512)) == []
    assert staged(encoded(bench, 3, 256)) == [], "the third must not overtake the second"
    assert bench.count("stagings_deferred") > 0
    assert staged(bench.do(Staged(1, BROKEN))) == [2]
    assert staged(bench.do(Staged(2, BROKEN))) == [3]


def test_copies_that_nobody_has_memory_for_leave_half_of_the_slab_free() -> None:
    bench = Bench(slab_nbytes=1024)
    assert staged(encoded(bench, 1, 256)) == [1]
    assert staged(encoded(bench, 2, 256)) == [2]
    assert staged(encoded(bench, 3, 256)) == []
    bench.do(Staged(1))
    assert staged(bench.skip(1)) == [3]


def test_a_slab_full_of_copies_that_nobody_has_memory_for_takes_granted_ones() -> None:
    """The peer that has memory for 5 and 6 may give it to 1 to 4 only when those have landed."""
    bench = Bench(slab_nbytes=1024)
    granted(bench, 5, 6)
    tokens = [token for room in range(1, 7) for token in staged(encoded(bench, room, 256))]
    assert tokens == [1, 2, 5, 6]


def test_a_grant_lets_a_copy_overtake_those_that_nobody_has_memory_for() -> None:
    bench = Bench(slab_nbytes=1024)
    for room in range(1, 6):
        encoded(bench, room, 256)
    bench.hello()
    assert staged(bench.grant(5, 5)) == [5]
    assert bench.machine.balance().free == 256


def test_one_that_is_granted_and_does_not_fit_is_not_overtaken() -> None:
    bench = Bench(slab_nbytes=1024)
    granted(bench, 2)
    encoded(bench, 1, 256)
    assert staged(encoded(bench, 2, 1024)) == []
    assert staged(encoded(bench, 3, 256)) == []
    bench.do(Staged(1))
    assert staged(bench.skip(1)) == [2]


def test_a_copy_that_nobody_waits_for_any_more_lets_the_next_one_in() -> None:
    bench = Bench(slab_nbytes=512)
    granted(bench, 1, 2, 3)
    for room in (1, 2, 3):
        encoded(bench, room, 512 if room == 2 else 256)
    effects = bench.skip(2)
    assert dropped(effects) == [2]
    assert staged(effects) == [3]


def test_rows_that_wait_for_memory_are_bounded() -> None:
    bench = Bench(slab_nbytes=512, ahead_rows=ROWS)
    for room in range(1, 6):
        assert dropped(encoded(bench, room, 256)) == []
    for room in (6, 7):
        effects = encoded(bench, room, 256)
    assert dropped(effects) == [7], "one is staged; twice the slab, and what is ahead, may wait"
    bench.hello()
    late = bench.grant(7, 7)
    assert reason(late).code is Code.OVERLOADED
    assert "send_slab_bytes" in reason(late).reason
    bench.do(Staged(1))
    bench.skip(1)
    assert dropped(encoded(bench, 8, 256)) == []


def test_rows_that_somebody_has_memory_for_are_never_too_many() -> None:
    bench = Bench(slab_nbytes=512)
    granted(bench, *range(1, 11))
    assert [dropped(encoded(bench, room, 256)) for room in range(1, 11)] == [[]] * 10


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


# --- lent rows ------------------------------------------------------------------------------


def lent(bench: Bench, room: int, nbytes: int = ROWS * ROW_NBYTES) -> list[Effect]:
    """Room ``room`` is claimed, and its rows, whose token it is, can be read where they are."""
    bench.claim(room, f"h{room}")
    return bench.do(Encoded(f"h{room}", room, ROWS, WIDTH, "bfloat16", nbytes, lendable=True))


def test_granted_rows_are_written_from_where_they_are_and_dropped_when_that_has_ended() -> None:
    bench = Bench()
    granted(bench, 1)
    effects = lent(bench, 1)
    assert staged(effects) == []
    (write,) = of(Write, effects)
    assert (write.lent, write.source, write.nbytes) == (1, 0, ROWS * ROW_NBYTES)
    assert dropped(effects) == []
    assert bench.machine.balance().free == bench.machine.balance().capacity
    assert dropped(bench.do(Wrote(write.write))) == [1]
    assert bench.count("bytes_lent") == ROWS * ROW_NBYTES
    assert bench.count("bytes_staged") == 0
    assert bench.at_rest()


def test_a_shard_of_lent_rows_is_written_from_its_own_place() -> None:
    bench = Bench(ranks=2)
    for rank in range(2):
        bench.hello(rank)
        shard = {"start": rank * 5, "count": 5, "nbytes": 5 * ROW_NBYTES, "sharded": True}
        bench.grant(1, 1, rank, **shard)
    writes = of(Write, lent(bench, 1))
    assert [(w.lent, w.source, w.nbytes) for w in writes] == [
        (1, 0, 5 * ROW_NBYTES),
        (1, 5 * ROW_NBYTES, 5 * ROW_NBYTES),
    ]
    assert dropped(bench.do(Wrote(writes[0].write))) == []
    assert dropped(bench.do(Wrote(writes[1].write))) == [1]
    assert bench.at_rest()


def test_rows_that_nobody_has_memory_for_are_staged_though_they_could_be_lent() -> None:
    """They would keep the tower's memory until somebody has."""
    bench = Bench()
    bench.hello()
    effects = lent(bench, 1)
    assert staged(effects) == [1]
    bench.stage(effects)
    (write,) = of(Write, bench.grant(1, 1))
    assert write.lent is None
    bench.do(Wrote(write.write))
    assert bench.at_rest()


def test_no_more_is_lent_than_the_slab_holds_and_the_rest_is_staged() -> None:
    nbytes = ROWS * ROW_NBYTES
    bench = Bench(slab_nbytes=512)
    granted(bench, *range(1, 9))
    writes = of(Write, [effect for room in range(1, 7) for effect in lent(bench, room)])
    assert [write.lent for write in writes] == [1, 2, 3, 4], "as many as may run at once"
    assert bench.machine._copies.lent_nbytes == 6 * nbytes <= 512 < 7 * nbytes
    assert staged(lent(bench, 7)) == [7]
    assert staged(lent(bench, 8)) == [8]


def test_a_grant_lends_rows_that_wait_for_the_slab() -> None:
    bench = Bench(slab_nbytes=512)
    bench.hello()
    assert staged(lent(bench, 1)) == [1]
    assert staged(lent(bench, 2)) == []
    (write,) = of(Write, bench.grant(2, 2))
    assert write.lent == 2
    assert dropped(bench.do(Wrote(write.write))) == [2]


def test_a_claim_that_comes_later_shares_lent_rows() -> None:
    bench = Bench()
    granted(bench, 1, 2)
    (first,) = of(Write, lent(bench, 1))
    (second,) = of(Write, bench.claim(2, "h1"))
    assert second.lent == first.lent == 1
    assert dropped(bench.do(Wrote(first.write))) == []
    assert dropped(bench.do(Wrote(second.write))) == [1]
    assert bench.at_rest()


def test_lent_rows_of_a_room_that_has_failed_stay_until_its_write_has_ended() -> None:
    bench = Bench()
    granted(bench, 1)
    (write,) = of(Write, lent(bench, 1))
    assert dropped(bench.tick(SETTINGS.write_timeout_s)) == []
    assert dropped(bench.do(Wrote(write.write, BROKEN))) == [1]
    assert bench.at_rest()


def test_a_write_to_a_lost_peer_keeps_lent_rows_as_long_as_it_may_read_them() -> None:
    bench = Bench()
    granted(bench, 1)
    (write,) = of(Write, lent(bench, 1))
    for now in (SETTINGS.peer_timeout_s, SETTINGS.peer_timeout_s + SETTINGS.write_timeout_s, 1e4):
        assert dropped(bench.tick(now)) == []
    assert dropped(bench.do(Wrote(write.write, BROKEN))) == [1]
    assert bench.at_rest()
