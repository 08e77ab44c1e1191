# SPDX-License-Identifier: Apache-2.0
"""The encode rank's rules: what a grant must be, its writes, and its answers."""

from dataclasses import replace

import pytest

from epd_connector.core.effects import Write
from epd_connector.core.send import EncodeRank
from epd_connector.core.send_events import Wrote
from epd_connector.core.send_peers import IDLE_PEER_S
from epd_connector.core.send_state import RoomState
from epd_connector.errors import Code
from epd_connector.protocol.frames import Landed
from tests.unit.send_bench import (
    BROKEN,
    SETTINGS,
    Bench,
    answers,
    dropped,
    full_grant,
    of,
    reason,
    replies,
)

# --- the contract ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": 11}, ["rows", "11", "10"]),
        ({"width": 8}, ["width", "8", "4"]),
        ({"dtype": "float16"}, ["dtype", "float16", "bfloat16"]),
        ({"start": 1}, ["first row", "1", "0"]),
        ({"count": 9}, ["row count", "9", "10"]),
        ({"nbytes": 81}, ["bytes", "81", "80"]),
        ({"offset": (1 << 20) - 79}, ["outside the receiver's slab", str(1 << 20)]),
        ({"transport": "mooncake"}, ["mooncake", "shm"]),
        ({"sharded": True, "count": 5, "nbytes": 40}, ["row count", "5", "10"]),
    ],
)
def test_a_grant_that_disagrees_is_refused_with_both_values(
    change: dict[str, object], words: list[str]
) -> None:
    bench = Bench()
    bench.hello()
    bench.hear(full_grant(1, 1, **change))
    effects = bench.offer()
    assert of(Write, effects) == []
    assert answers(effects) == [(0, "Refused", 1, 1)]
    assert reason(effects).code is Code.MISMATCH
    assert all(word in reason(effects).reason for word in words)
    assert bench.at_rest()


def test_a_rank_that_another_encode_rank_serves_is_refused() -> None:
    bench = Bench(ranks=4)
    bench.machine = EncodeRank(replace(SETTINGS, rank=1, ranks=2))
    effects = bench.asked(rank=1)
    assert "served by encode rank 0, not by rank 1" in reason(effects).reason
    assert bench.machine.rooms() == {}
    bench.asked(rank=2)
    assert bench.state() is RoomState.ASKED


def test_a_rank_that_its_engine_does_not_have_is_refused() -> None:
    bench = Bench(ranks=2)
    effects = bench.asked(rank=2)
    assert "prefill rank 2 of 2 ranks" in reason(effects).reason
    assert bench.machine.rooms() == {}
    assert bench.machine.next_deadline() == IDLE_PEER_S, "only the peer is remembered"


def test_two_engines_of_different_size_cannot_share_a_room() -> None:
    bench = Bench(ranks=2)
    bench.asked(rank=0)
    bench.ranks = 3
    effects = bench.asked(rank=2)
    assert "engines of 3 and 2 ranks ask for one room" in reason(effects).reason
    assert bench.state() is RoomState.ASKED


def test_rows_of_another_number_than_the_prompt_says_fail_the_room() -> None:
    bench = Bench()
    bench.asked()
    bench.claim(rows=11)
    effects = bench.encode(rows=10)
    assert "10 rows where the prompt has 11 tokens" in reason(effects).reason
    assert dropped(effects) == [1]
    assert bench.at_rest()


# --- writes ----------------------------------------------------------------------------


def test_writes_to_one_peer_are_as_many_as_may_run_at_once_in_order() -> None:
    bench = Bench(ranks=2, write_parallelism=2)
    bench.hello(0)
    bench.hello(1)
    started = []
    for room in range(1, 6):
        bench.grant(room, room)
        started += of(Write, bench.offer(room, f"h{room}"))
    assert [write.write for write in started] == [1, 2]
    other = of(Write, bench.grant(5, 1, 1))
    assert len(other) == 1, "a busy peer delays nobody else"
    order = []
    while started:
        effects = bench.do(Wrote(started.pop(0).write))
        order += [room for route, _, room, _ in answers(effects)]
        started += of(Write, effects)
    assert order == [1, 2, 3, 4, 5]


def test_a_room_that_failed_in_the_meantime_is_not_written() -> None:
    bench = Bench(write_parallelism=1)
    bench.hello()
    bench.grant(1, 1)
    bench.grant(2, 2)
    first = bench.offer(1, "a")
    assert of(Write, bench.offer(2, "b")) == []
    assert answers(bench.skip(2)) == [(0, "Refused", 2, 2)]
    assert of(Write, bench.wrote(first)) == []
    assert bench.at_rest()


def test_a_failed_write_fails_the_room_for_every_receiver() -> None:
    bench = Bench(ranks=3)
    for rank in (0, 1):
        bench.asked(rank=rank)
    broken, other = of(Write, bench.offer())
    effects = bench.do(Wrote(broken.write, BROKEN))
    assert answers(effects) == [(0, "Refused", 1, 1), (1, "Stalled", 1, 1)]
    assert reason(effects) == BROKEN
    assert reason(bench.asked(rank=2)) == BROKEN
    assert answers(bench.do(Wrote(other.write))) == [(1, "Refused", 1, 1)]
    assert bench.at_rest()
    assert bench.count("writes_failed") == 1


def test_what_waits_for_a_peer_whose_write_failed_is_refused_with_it() -> None:
    bench = Bench(write_parallelism=1)
    bench.hello()
    bench.grant(1, 1)
    bench.grant(2, 2)
    effects = bench.offer(1, "a")
    bench.offer(2, "b")
    effects = bench.wrote(effects, BROKEN)
    assert of(Write, effects) == []
    assert answers(effects) == [(0, "Refused", 1, 1), (0, "Refused", 2, 2)]
    assert bench.at_rest()


def test_a_write_that_fails_after_it_was_given_up_counts_as_failed() -> None:
    bench = Bench()
    bench.asked(1, 1)
    effects = bench.offer(1, "a")
    bench.cancel(1, 1)
    bench.wrote(effects, BROKEN)
    assert bench.count("writes_failed") == 1
    bench.offer(2, "b")
    assert answers(bench.grant(2, 2)) == [(0, "Refused", 2, 2)]


# --- repeats ---------------------------------------------------------------------------


def test_a_repeated_grant_is_not_written_twice_and_answered_the_same() -> None:
    bench = Bench(ranks=2)
    bench.asked()
    effects = bench.offer()
    assert bench.grant() == []
    assert replies(bench.wrote(effects)) == [Landed(1, 1)]
    assert replies(bench.grant()) == [Landed(1, 1)]
    bench.wrote(bench.asked(rank=1))
    assert bench.state() is None
    assert replies(bench.grant()) == [Landed(1, 1)]
    assert bench.count("rooms_concluded") == 1


def test_grants_of_one_number_from_different_ranks_have_their_own_answers() -> None:
    bench = Bench(ranks=2)
    bench.asked(1, 1, rank=0)
    bench.hello(1)
    bench.grant(1, 1, rank=1, width=99)
    bench.wrote(bench.offer())
    assert bench.state() is None
    assert answers(bench.grant(1, 1, rank=0)) == [(0, "Landed", 1, 1)]
    assert answers(bench.grant(1, 1, rank=1, width=99)) == [(1, "Refused", 1, 1)]


def test_a_stranger_is_not_told_what_another_engine_was() -> None:
    bench = Bench()
    bench.asked()
    bench.wrote(bench.offer())
    effects = bench.hear(full_grant(1, 1), rank=5)
    assert answers(effects) == [(5, "Refused", 1, 1)]


def test_a_new_attempt_replaces_the_older_one_once_that_is_answered() -> None:
    bench = Bench(ranks=2)
    bench.asked(1, 1)
    effects = bench.offer()
    early = bench.grant(1, 2)
    assert answers(early) == [(0, "Refused", 1, 2)]
    assert "not answered yet" in reason(early).reason
    bench.wrote(effects)
    effects = bench.grant(1, 3)
    assert len(of(Write, effects)) == 1
    assert answers(bench.wrote(effects)) == [(0, "Landed", 1, 3)]


def test_an_older_attempt_that_comes_late_is_not_written_again() -> None:
    bench = Bench(ranks=2)
    bench.asked(1, 1)
    bench.wrote(bench.offer())
    bench.wrote(bench.grant(1, 2))
    effects = bench.grant(1, 1)
    assert of(Write, effects) == []
    assert replies(effects) == [Landed(1, 1)]


def test_a_grant_that_was_refused_once_is_refused_for_good() -> None:
    bench = Bench(max_rooms=1)
    bench.asked(1, 1)
    assert answers(bench.grant(2, 2)) == [(0, "Refused", 2, 2)]
    bench.cancel(1, 1)
    bench.offer(2, "b")
    effects = bench.grant(2, 2)
    assert of(Write, effects) == []
    assert answers(effects) == [(0, "Refused", 2, 2)]


def test_a_failed_room_answers_late_grants_at_once() -> None:
    bench = Bench(ranks=2)
    bench.asked(rank=0)
    bench.wrote(bench.offer(), BROKEN)
    assert reason(bench.asked(rank=1)) == BROKEN


def test_what_is_remembered_is_forgotten_in_time() -> None:
    bench = Bench(tombstone_s=10.0)
    bench.asked()
    bench.wrote(bench.offer())
    bench.tick(10.0)
    bench.hello()
    assert bench.grant() == []
    assert bench.state() is RoomState.ASKED
