# SPDX-License-Identifier: Apache-2.0
"""`epd inspect` and `epd fence` against engines with real sockets; how large an answer gets."""

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from epd_connector.cli.inspect import as_text
from epd_connector.cli.main import main
from epd_connector.core import admission_state as admission
from epd_connector.core.describe import describe_prefill, describe_receiver, describe_sender
from epd_connector.link.base import PeerId
from epd_connector.protocol.codec import MAX_FRAME_BYTES, Codec
from epd_connector.protocol.frames import EngineDescription, Envelope
from epd_connector.protocol.state import LISTED, EngineState, RankState, name
from epd_connector.runtime.describing import (
    MAX_ASKED,
    MAX_FAILURES,
    PATIENCE_S,
    Describing,
    HeadPlace,
    process_state,
)
from epd_connector.runtime.report import fetch_state
from epd_connector.stats import Counters
from tests.unit.admission_harness import item, known, settings
from tests.unit.pair_bench import SLAB, WIDTH, Pair, Shape, new_id, until
from tests.unit.receive_bench import Bench as ReceiveBench
from tests.unit.send_bench import Bench as SendBench

KEY = b"a key of more than 16 bytes"
ROWS = 8


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(Shape(encode_key=KEY, prefill_key=KEY))
    made.start()
    yield made
    made.close()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(KEY)
    return str(path)


def look(address: str) -> EngineState:
    return fetch_state(address, 30, KEY)


def address(of: object) -> str:
    return str(of.head.control).removeprefix("tcp://")  # type: ignore[attr-defined]


def test_a_room_on_its_way_is_seen_on_both_sides(pair: Pair) -> None:
    room = new_id()
    pair.encode.claim(room, "item", ROWS)
    pair.prefill.need("r", pair.item("item", ROWS, room))
    until(lambda: look(address(pair.encode)).ranks[0].send.rooms[0].grants == 1)  # type: ignore[union-attr]
    encode, prefill = look(address(pair.encode)), look(address(pair.prefill))
    (rank,) = encode.ranks
    assert rank.send is not None
    assert rank.receive is None
    (sending,) = rank.send.rooms
    assert (sending.room, sending.state, sending.rows) == (name(room), "claimed", ROWS)
    assert [peer.open_grants for peer in rank.send.peers] == [1]
    assert prefill.prefill is not None
    (transfer,) = prefill.prefill.transfers
    assert (transfer.room, transfer.state, transfer.landed) == (name(room), "receiving", ())
    assert transfer.encode == address(pair.encode)
    assert [(r.request, r.state) for r in prefill.prefill.requests] == [("r", "waiting")]
    assert prefill.prefill.slab.leased >= transfer.bytes
    assert [a.state for a in prefill.prefill.encode_engines] == ["known"]
    (receiving,) = prefill.ranks[0].receive.rooms  # type: ignore[union-attr]
    assert (receiving.state, receiving.sender) == ("granted", rank.endpoint)


def test_an_engine_says_who_it_is_and_what_its_processes_hold(pair: Pair) -> None:
    state = look(address(pair.encode))
    assert (state.role, state.ranks_expected, state.ranks_up) == ("ec_producer", 1, 1)
    assert state.process.pid == os.getpid()
    assert state.process.threads > 1
    assert state.process.descriptors > 3
    assert state.process.resident_bytes > 1 << 20
    assert state.ranks[0].send.slab.capacity == SLAB  # type: ignore[union-attr]
    assert state.prefill is None
    assert state.silent_ranks == ()


def test_after_a_transfer_everything_is_free_or_resident(pair: Pair) -> None:
    room = new_id()
    pair.encode.claim(room, "item", ROWS)
    pair.prefill.need("r", pair.item("item", ROWS, room))
    pair.encode.encoded("item", torch.ones(ROWS, WIDTH, dtype=torch.bfloat16))
    pair.prefill.decided("r")
    pair.prefill.load("r", "item")
    pair.prefill.head.tell(admission.Left("r"))

    def settled() -> bool:
        prefill, encode = look(address(pair.prefill)), look(address(pair.encode))
        slab, sent = prefill.prefill.slab, encode.ranks[0].send  # type: ignore[union-attr]
        free = sent.slab.free == sent.slab.capacity and not sent.rooms  # type: ignore[union-attr]
        return free and slab.resident > 0 and slab.free + slab.resident == slab.capacity

    until(settled)


def test_both_forms_are_printed(
    pair: Pair, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["inspect", address(pair.prefill), "--auth-key-file", key_file]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["role"] == "ec_consumer"
    assert found["prefill"]["slab"]["free"] == SLAB
    assert main(arguments) == 0
    page = capsys.readouterr().out
    for part in ("ec_consumer at", "1 of 1 ranks up", "receive slab", "no failures", "rank 0"):
        assert part in page


@pytest.mark.parametrize("command", [["inspect"], ["fence", "--dead", "10.0.0.1"]])
def test_without_the_key_there_is_no_answer_and_a_remedy(
    pair: Pair, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    where = address(pair.prefill)
    assert main([command[0], where, *command[1:], "--timeout", "0.5"]) == 1
    error = capsys.readouterr().err
    assert where in error
    assert "0.5 s" in error


def test_a_host_is_declared_dead(
    pair: Pair, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [address(pair.prefill), "--dead", "10.0.0.1", "--auth-key-file", key_file]
    assert main(["fence", *arguments]) == 0
    assert "10.0.0.1 is dead" in capsys.readouterr().out


def test_an_encode_engine_has_nothing_to_fence(pair: Pair, key_file: str) -> None:
    options = ["--auth-key-file", key_file, "--timeout", "0.5"]
    assert main(["fence", address(pair.encode), "--dead", "10.0.0.1", *options]) == 1


def test_a_key_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none")
    assert main(["inspect", "127.0.0.1:1", "--auth-key-file", missing]) == 1
    assert missing in capsys.readouterr().err


# --- who asks, and how much is said ---------------------------------------------------------


def describing(ranks: int) -> Describing:
    place = HeadPlace("ec_both", "f" * 500, 1, 2, ranks, "tcp://here:1", "")
    made = Describing(place, lambda: ranks, Counters, lambda now: None)
    for _ in range(2 * MAX_FAILURES):
        made.failed("x" * 2000, 0.0)
    return made


def test_a_rank_that_does_not_answer_is_waited_for_and_named() -> None:
    asked = describing(2)
    assert asked.ask(PeerId(7), 9, now=10.0)
    asked.heard(full_rank(0))
    assert asked.answers(10.0) == []
    assert asked.next_wait(10.0) == PATIENCE_S
    ((peer, asker, frame),) = asked.answers(10.0 + PATIENCE_S)
    assert (peer, asker) == (7, 9)
    assert [rank.rank for rank in frame.state.ranks] == [0]
    assert frame.state.silent_ranks == (1,)
    assert asked.next_wait(10.0) is None


def test_everybody_who_waits_is_answered_and_no_more_than_so_many_wait() -> None:
    asked = describing(1)
    assert [asked.ask(PeerId(n), n, now=0.0) for n in range(MAX_ASKED + 1)] == [
        *[True] * MAX_ASKED,
        False,
    ]
    asked.heard(full_rank(0))
    assert len(asked.answers(0.0)) == MAX_ASKED


@functools.cache
def full_rank(rank: int) -> RankState:
    """One whose every table holds more than can be listed."""
    sending, receiving = SendBench(max_rooms=1000), ReceiveBench(max_rooms=1000)
    for number in range(2 * LISTED):
        sending.claim(number, hash=f"hash-{number}")
        sending.hello(rank=number)
        receiving.open(number, incarnation=10_000 + number)
    return RankState(
        rank=rank,
        incarnation=name(rank),
        endpoint="tcp://" + "h" * 250 + ":1",
        transports=("shm", "mooncake"),
        process=process_state(),
        send=describe_sender(sending.machine, 1.0),
        receive=describe_receiver(receiving.machine, 1.0),
    )


def test_tables_are_cut_to_the_oldest_and_totals_count_all() -> None:
    rank = full_rank(0)
    assert rank.send is not None
    assert rank.receive is not None
    assert len(rank.send.rooms) == len(rank.receive.rooms) == LISTED
    assert rank.send.room_totals == {"claimed": 2 * LISTED}
    assert rank.receive.room_totals == {"granted": 2 * LISTED}
    assert rank.receive.peers_total == 2 * LISTED


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_however_full_the_tables_an_answer_fits_into_a_frame(ranks: int) -> None:
    asked = describing(ranks)
    asked.ask(PeerId(1), 1, now=0.0)
    for rank in range(ranks):
        asked.heard(msgspec.structs.replace(full_rank(0), rank=rank))
    ((_, _, frame),) = asked.answers(0.0)
    payload = Codec().encode(Envelope(1, 2, frame))
    assert len(payload) < MAX_FRAME_BYTES
    decoded = Codec().decode(payload).frame
    assert isinstance(decoded, EngineDescription)
    assert decoded.state == frame.state
    assert as_text(frame.state)


def test_a_prefill_head_is_described_with_what_waits_for_what() -> None:
    head = known(settings(max_rooms=1000))
    head.start("r", item("a", 5))
    head.start("s", item("a", 6), item("b", 7, address="elsewhere:1"))
    state = describe_prefill(head.head, head.now + 2.0)
    assert state.transfer_totals == {"receiving": 1, "resolving": 1}
    assert [(r.request, r.waits_for) for r in state.requests] == [("r", ("a",)), ("s", ("a", "b"))]
    assert {a.address: a.state for a in state.encode_engines}["elsewhere:1"] == "asking"
    assert [t.age_s for t in state.transfers] == [2.0, 2.0]
