# SPDX-License-Identifier: Apache-2.0
"""`epd inspect` and `epd fence` against engines with real sockets."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epd_connector.cli.main import main
from epd_connector.core import admission_state as admission
from epd_connector.protocol.state import EngineState, name
from epd_connector.runtime.report import fetch_state
from tests.unit.pair_bench import SLAB, WIDTH, Pair, Shape, new_id, until

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
