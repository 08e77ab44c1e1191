# SPDX-License-Identifier: Apache-2.0
"""Counters: adding, handing over deltas, and what an exporter sees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_connector.stats import COUNTS, MAX_DURATIONS, Counters

amounts = st.dictionaries(st.sampled_from(COUNTS), st.integers(0, 1 << 60))


def counters(counts: dict[str, int]) -> Counters:
    made = Counters()
    for name, amount in counts.items():
        made.add(name, amount)
    return made


def test_add_counts() -> None:
    stats = Counters()
    stats.add("rooms_opened")
    stats.add("bytes_sent", 4096)
    stats.rooms_opened += 1
    assert (stats.rooms_opened, stats.bytes_sent) == (2, 4096)


@pytest.mark.parametrize("name", ["rooms_open", "encoded_to_landed_s", "add"])
def test_add_refuses_what_is_not_counted(name: str) -> None:
    with pytest.raises(KeyError, match="is not counted"):
        Counters().add(name)


@given(amounts, amounts)
def test_merge_adds_every_count(left: dict[str, int], right: dict[str, int]) -> None:
    total = counters(left)
    total.merge(counters(right))
    assert total.counts() == {name: left.get(name, 0) + right.get(name, 0) for name in COUNTS}


@given(st.lists(amounts, max_size=5))
def test_deltas_add_up_to_the_totals(steps: list[dict[str, int]]) -> None:
    rank, head, expected = Counters(), Counters(), Counters()
    for step in steps:
        rank.merge(counters(step))
        expected.merge(counters(step))
        head.merge(rank.take())
    assert head == expected
    assert rank == Counters()


def test_taken_counters_are_independent() -> None:
    stats = Counters()
    stats.add_duration(0.5)
    taken = stats.take()
    stats.add_duration(0.25)
    assert (taken.encoded_to_landed_s, stats.encoded_to_landed_s) == ([0.5], [0.25])


def test_durations_are_bounded_to_the_newest() -> None:
    stats = Counters()
    for index in range(MAX_DURATIONS + 10):
        stats.add_duration(float(index))
    assert len(stats.encoded_to_landed_s) == MAX_DURATIONS
    assert stats.encoded_to_landed_s[-1] == MAX_DURATIONS + 9
    other = Counters(encoded_to_landed_s=[-1.0])
    stats.merge(other)
    assert len(stats.encoded_to_landed_s) == MAX_DURATIONS
    assert stats.encoded_to_landed_s[-1] == -1.0


def test_counters_come_back_from_the_wire() -> None:
    stats = counters({"items_landed": 3, "bytes_landed": 12})
    wire = {name: float(count) for name, count in stats.counts().items()}
    assert Counters.from_peer({**wire, "of_the_future": 1.0}) == stats
    many = [float(index) for index in range(MAX_DURATIONS + 1)]
    assert Counters.from_peer({}, many).encoded_to_landed_s == many[1:]


def test_snapshot_is_flat() -> None:
    stats = counters({"items_landed": 3})
    for duration in [0.4, 0.1, 0.3, 0.2]:
        stats.add_duration(duration)
    flat = stats.snapshot()
    assert flat["items_landed"] == 3
    assert flat["rooms_opened"] == 0
    assert flat["encoded_to_landed_s_count"] == 4
    assert flat["encoded_to_landed_s_p50"] == 0.2
    assert flat["encoded_to_landed_s_p95"] == 0.4
    assert flat["encoded_to_landed_s_max"] == 0.4


def test_snapshot_without_durations() -> None:
    assert Counters().snapshot()["encoded_to_landed_s_p50"] == 0.0
