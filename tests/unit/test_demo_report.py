# SPDX-License-Identifier: Apache-2.0
"""The demo's verdict, table and JSON, from made-up findings."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from epd_connector.cli.demo_report import (
    Answer,
    Findings,
    align,
    as_json,
    problems,
    sent_over_embedding,
    table,
    verdict,
)
from epd_connector.rows import Layout

TOKENS = tuple(range(100, 132))
OTHER = Answer(tuple(range(32)), 0.5)
GOOD = Findings(
    transport="shm",
    items=1,
    published=1,
    monolithic=Answer(TOKENS, 0.25),
    epd=Answer(TOKENS, 0.125),
    other_monolithic=OTHER,
    other_epd=OTHER,
    embedding_bytes=1_075_200,
    sent_bytes=1_075_200,
    encoded_to_landed_s=(0.0042,),
)
WRONG = (*TOKENS[:5], 7, *TOKENS[6:])


COPIES = replace(GOOD, prefill_tp=2, shard="never", sent_bytes=2 * GOOD.embedding_bytes)
SHARED = replace(
    GOOD, encode_tp=2, prefill_tp=2, layout=Layout.SHARED, encoded_to_landed_s=(0.004, 0.005)
)


@pytest.mark.parametrize("good", [GOOD, COPIES, SHARED, replace(SHARED, layout=Layout.SHARDS)])
def test_good_findings_pass(good: Findings) -> None:
    assert problems(good) == []
    assert as_json(good)["pass"] is True


def test_the_last_line_of_a_demo_that_passed() -> None:
    assert verdict([], GOOD) == "demo: PASS 32 tokens equal, 1 item moved over shm"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(GOOD, epd=Answer(WRONG, 0.1)), "the tokens of the two ways differ"),
        (replace(GOOD, epd=Answer((), None), monolithic=Answer((), None)), "ways differ"),
        (replace(GOOD, other_epd=Answer(WRONG, 0.1)), "differ for another picture"),
        (replace(GOOD, other_epd=None), "differ for another picture"),
        (
            replace(GOOD, other_epd=GOOD.epd, other_monolithic=GOOD.epd),
            "another picture gives the same tokens, so the picture does not matter",
        ),
        (replace(GOOD, published=0), "1 items were sent but 0 published"),
        (replace(GOOD, published=2), "1 items were sent but 2 published"),
        (replace(GOOD, encoded_to_landed_s=()), "1 items were sent but 0 reported landed"),
        (
            replace(SHARED, encoded_to_landed_s=(0.004,)),
            "1 items were sent by 2 encode ranks but 1 reported landed",
        ),
        (replace(GOOD, sent_bytes=0), "no bytes were moved"),
        (
            replace(SHARED, sent_bytes=2 * GOOD.embedding_bytes),
            "2150400 bytes were sent, not 1 copy of 1075200 bytes",
        ),
        (
            replace(COPIES, sent_bytes=GOOD.embedding_bytes),
            "1075200 bytes were sent, not 2 copies of 1075200 bytes",
        ),
        (replace(GOOD, embedding_bytes=0), "1075200 bytes were sent, not 1 copy of 0 bytes"),
        (Findings(transport="shm"), "the picture was not answered both ways"),
    ],
)
def test_each_fault_is_named_in_the_last_line(bad: Findings, reason: str) -> None:
    reasons = problems(bad)
    assert reason in "; ".join(reasons)
    assert verdict(reasons, bad).startswith("demo: FAIL ")
    assert as_json(bad)["pass"] is False


def test_the_json_holds_exactly_the_documented_keys() -> None:
    assert json.loads(json.dumps(as_json(GOOD))) == {
        "pass": True,
        "tokens_equal": True,
        "items": 1,
        "transport": "shm",
        "encode_tp": 1,
        "prefill_tp": 1,
        "shard": "auto",
        "layout": "whole",
        "embedding_bytes": 1_075_200,
        "sent_bytes": 1_075_200,
        "sent_over_embedding": 1.0,
        "encoded_to_landed_s": [0.0042],
        "ttft_monolithic_s": 0.25,
        "ttft_epd_s": 0.125,
    }


def test_the_json_of_a_demo_that_got_nowhere_has_the_same_keys() -> None:
    assert as_json(Findings(transport="mooncake")).keys() == as_json(GOOD).keys()


def test_the_table_shows_every_fact_in_columns() -> None:
    assert table(GOOD).splitlines() == [
        "                     monolithic                         encode + prefill",
        "first tokens         100 101 102 103 104 105 106 107 …  100 101 102 103 104 105 106 107 …",
        "time to first token  250.0 ms                           125.0 ms",
        "tokens equal                                            yes, all 32",
        "ranks                1                                  1 + 1",
        "items                                                   1 of 1 over shm",
        "layout                                                  whole (shard auto)",
        "embedding                                               1.0 MiB",
        "bytes moved                                             1.0 MiB",
        "sent / embedding                                        1.00",
        "encoded to landed                                       4.2 ms",
    ]


def test_the_table_names_the_first_token_that_differs() -> None:
    assert "no, from token 6 on" in table(replace(GOOD, epd=Answer(WRONG, 0.1)))


def test_the_table_says_how_often_each_byte_was_sent() -> None:
    lines = [line.split(maxsplit=1) for line in table(COPIES).splitlines()]
    assert ["sent", "/ embedding" + " " * 40 + "2.00"] in lines
    assert sent_over_embedding(SHARED) == 1.0
    assert sent_over_embedding(Findings(transport="shm")) is None


def test_the_table_of_nothing_has_dashes() -> None:
    lines = table(Findings(transport="shm")).splitlines()
    assert lines[1].split() == ["first", "tokens", "-", "-"]
    assert lines[-1].split() == ["encoded", "to", "landed", "-"]


def test_align_pads_to_the_widest_cell_and_leaves_no_trailing_space() -> None:
    assert align([("a", "bb", ""), ("ccc", "d", "e")]) == "a    bb\nccc  d   e"
