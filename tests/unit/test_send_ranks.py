# SPDX-License-Identifier: Apache-2.0
"""Encode engines of several ranks: each serves its own, and who serves nobody is done at once."""

from collections.abc import Callable

import msgspec
import pytest

from epd_connector.core.effects import Stage, Write
from epd_connector.core.send_events import Receivers, Staged
from epd_connector.core.send_state import RoomState
from epd_connector.errors import Code
from epd_connector.protocol.frames import Grant
from epd_connector.rows import served_ranks, shard_rows
from tests.unit.send_bench import (
    ROW_NBYTES,
    ROWS,
    Bench,
    answers,
    dropped,
    encode_rank,
    full_grant,
    of,
    reason,
)

TO_ONE = Receivers(1, 1)
"""Room 1 goes to a prefill engine of one rank: of two encode ranks, the second serves nobody."""


def idle_rank() -> Bench:
    """The second of two encode ranks; one prefill rank."""
    return encode_rank(1, 2, prefill_ranks=1)


def shard_grant(rank: int, ranks: int, number: int = 1, room: int = 1) -> Grant:
    """What prefill rank ``rank`` of ``ranks`` grants for its shard."""
    shard = shard_rows(ROWS, ranks, rank)
    part = full_grant(room, number, start=shard.start, count=shard.rows, sharded=True)
    return msgspec.structs.replace(part, offset=512, nbytes=shard.rows * ROW_NBYTES)


# --- a rank that serves nobody -------------------------------------------------------------


def nothing(bench: Bench) -> None:
    """Nothing has happened yet."""


def claimed(bench: Bench) -> None:
    bench.claim()


def staging(bench: Bench) -> None:
    bench.claim()
    bench.encode()


def offered(bench: Bench) -> None:
    bench.offer()


STATES = [nothing, claimed, staging, offered]


@pytest.mark.parametrize("reach", STATES)
def test_it_concludes_at_once_and_for_good(reach: Callable[[Bench], None]) -> None:
    bench = idle_rank()
    reach(bench)
    bench.do(TO_ONE)
    assert bench.machine.rooms() == {}
    bench.claim()
    assert dropped(bench.encode(token=2)) == [2]
    bench.do(Staged(1))
    assert bench.at_rest()
    assert bench.machine.next_deadline() is None


@pytest.mark.parametrize("reach", STATES)
def test_it_has_neither_failed_nor_sent(reach: Callable[[Bench], None]) -> None:
    bench = idle_rank()
    reach(bench)
    effects = bench.do(TO_ONE)
    assert effects == []
    opened = bench.count("rooms_opened")
    assert opened == bench.count("rooms_concluded") == (reach is not nothing)
    names = ("rooms_failed", "rooms_skipped", "items_sent", "grants_refused", "bytes_sent")
    assert [bench.count(name) for name in names] == [0] * len(names)
    assert bench.machine.counters.encoded_to_landed_s == []


@pytest.mark.parametrize("reach", STATES)
def test_word_of_receivers_that_is_repeated_changes_nothing(
    reach: Callable[[Bench], None],
) -> None:
    bench = idle_rank()
    reach(bench)
    bench.do(TO_ONE)
    counted = bench.machine.counters.counts()
    assert bench.do(TO_ONE) == []
    assert bench.skip() == []
    assert bench.machine.counters.counts() == counted


def test_memory_that_is_being_copied_into_is_freed_when_that_has_ended() -> None:
    bench = idle_rank()
    bench.claim()
    (stage,) = of(Stage, bench.encode())
    bench.do(TO_ONE)
    assert bench.machine.balance().leased > 0
    bench.do(Staged(stage.copy))
    assert bench.at_rest()


def test_a_copy_that_another_room_uses_stays() -> None:
    bench = idle_rank()
    bench.claim(2)
    bench.offer(1)
    bench.do(TO_ONE)
    assert bench.machine.rooms() == {2: RoomState.OFFERED}
    assert bench.machine.balance().landed > 0


def test_rows_that_wait_for_memory_are_dropped() -> None:
    bench = encode_rank(1, 2, prefill_ranks=1, slab_nbytes=512)
    bench.claim(2, "other", rows=60)
    bench.encode("other", token=7, rows=60)
    bench.claim()
    bench.encode()
    assert dropped(bench.do(TO_ONE)) == [1]


# --- a rank that serves somebody -----------------------------------------------------------


@pytest.mark.parametrize(("rank", "ranks", "to"), [(0, 1, 1), (0, 2, 1), (1, 2, 2), (2, 4, 2)])
@pytest.mark.parametrize("reach", STATES)
def test_it_takes_no_notice(reach: Callable[[Bench], None], rank: int, ranks: int, to: int) -> None:
    bench = encode_rank(rank, ranks, prefill_ranks=to)
    reach(bench)
    before = bench.machine.rooms()
    assert bench.do(Receivers(1, to)) == []
    assert bench.machine.rooms() == before
    bench.claim()
    assert bench.state() is not None


# --- two engines that name one room --------------------------------------------------------


def test_word_of_another_engine_does_not_end_a_room_that_was_granted() -> None:
    bench = encode_rank(1, 2, prefill_ranks=2)
    bench.hello(1)
    bench.hear(shard_grant(1, 2), 1)
    bench.do(TO_ONE)
    assert bench.state() is RoomState.ASKED
    assert answers(bench.wrote(bench.offer())) == [(1, "Landed", 1, 1)]
    assert bench.at_rest()


def test_a_grant_after_word_of_another_engine_is_refused_with_both_sizes() -> None:
    bench = encode_rank(1, 2, prefill_ranks=2)
    bench.offer()
    bench.do(TO_ONE)
    bench.hello(1)
    effects = bench.hear(shard_grant(1, 2), 1)
    assert answers(effects) == [(1, "Refused", 1, 1)]
    assert reason(effects).code is Code.MISMATCH
    assert "an engine of 1 ranks receives this room" in reason(effects).reason
    assert "encode rank 1 of 2 serves none of them" in reason(effects).reason
    assert bench.at_rest()


# --- whose grant is whose ------------------------------------------------------------------


def test_a_grant_that_comes_twice_is_written_once_and_only_by_its_own_server() -> None:
    benches = [encode_rank(rank, 2, prefill_ranks=2) for rank in (0, 1)]
    for rank, bench in enumerate(benches):
        bench.hello(rank)
        bench.hear(shard_grant(rank, 2), rank)
    assert benches[1].hear(shard_grant(1, 2), 1) == []
    benches[0].hello(1)
    effects = benches[0].hear(shard_grant(1, 2), 1)
    assert answers(effects) == [(1, "Refused", 1, 1)]
    assert "served by encode rank 1, not by rank 0" in reason(effects).reason
    for rank, bench in enumerate(benches):
        effects = bench.offer()
        (write,) = of(Write, effects)
        assert write.session == f"slab-{rank}"
        assert answers(bench.wrote(effects)) == [(rank, "Landed", 1, 1)]
        assert answers(bench.hear(shard_grant(rank, 2), rank)) == [(rank, "Landed", 1, 1)]
        assert bench.at_rest()


def test_grants_of_one_number_are_each_written_once_from_their_own_rows() -> None:
    bench = Bench(ranks=2)
    for rank in (0, 1, 1, 0):
        bench.hello(rank)
        bench.hear(shard_grant(rank, 2), rank)
    effects = bench.offer()
    writes = of(Write, effects)
    assert [write.session for write in writes] == ["slab-0", "slab-1"]
    assert writes[1].source - writes[0].source == 5 * ROW_NBYTES
    assert answers(bench.wrote(effects)) == [(0, "Landed", 1, 1), (1, "Landed", 1, 1)]


def test_a_cancel_takes_back_only_its_own_ranks_grant_of_that_number() -> None:
    bench = Bench(ranks=2)
    for rank in (0, 1):
        bench.hello(rank)
        bench.hear(shard_grant(rank, 2), rank)
    assert answers(bench.cancel(1, 1, rank=1)) == [(1, "Cancelled", 1, 1)]
    effects = bench.offer()
    assert [write.session for write in of(Write, effects)] == ["slab-0"]
    assert answers(bench.wrote(effects)) == [(0, "Landed", 1, 1)]
    assert bench.at_rest()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("encode_ranks", [1, 2, 3, 4])
def test_every_rank_sends_its_own_and_then_rests(encode_ranks: int, ranks: int) -> None:
    sent: list[tuple[int, int]] = []
    for number in range(encode_ranks):
        bench = encode_rank(number, encode_ranks, prefill_ranks=ranks)
        bench.do(Receivers(1, ranks))
        served = served_ranks(number, encode_ranks, ranks)
        for rank in served:
            bench.hello(rank)
            bench.hear(shard_grant(rank, ranks), rank)
        writes = of(Write, effects := bench.offer())
        assert len(writes) == len(served)
        bench.wrote(effects)
        assert bench.at_rest()
        sent += [(rank, write.nbytes) for rank, write in zip(served, writes, strict=True)]
    rows = [shard_rows(ROWS, ranks, rank).rows for rank in range(ranks)]
    assert sent == [(rank, count * ROW_NBYTES) for rank, count in enumerate(rows)]
