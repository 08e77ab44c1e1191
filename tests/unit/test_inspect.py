# SPDX-License-Identifier: Apache-2.0
"""`epd inspect` and `epd fence` against engines with real sockets."""

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from epd_connector.cli.main import main
from epd_connector.core import admission_state as admission
from epd_connector.core.admission_state import RequestState
from epd_connector.errors import ProtocolError
from epd_connector.link.base import endpoint
from epd_connector.link.zmq_link import ZmqLink
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import Envelope, Inspect
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

    def granted() -> bool:
        half = look(address(pair.encode)).ranks[0].send
        return half is not None and [room.grants for room in half.rooms] == [1]

    until(granted)
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
    assert state.encode is not None
    assert (state.encode.dtype, state.encode.widths) == ("bfloat16", {"image": WIDTH})
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
    for part in (
        "ec_consumer at",
        "1 of 1 ranks up",
        "takes rows   multiples of 64 elements of bfloat16",
        "receive slab",
        "no failures",
        "rank 0",
    ):
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
    assert "--auth-key-file" in error
    assert len(error.splitlines()) == 1


def needs_an_item(pair: Pair) -> None:
    """A request of the prefill engine waits for a grant that the encode engine cannot answer."""
    pair.prefill.need("r", pair.item("item", ROWS, new_id()))
    until(lambda: bool(look(address(pair.prefill)).ranks[0].receive.rooms))  # type: ignore[union-attr]


def test_a_host_is_declared_dead(
    pair: Pair, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_an_item(pair)
    arguments = [address(pair.prefill), "--dead", "127.0.0.1", "--auth-key-file", key_file]
    assert main(["fence", *arguments]) == 0
    said = capsys.readouterr().out
    assert "127.0.0.1 is dead" in said
    assert "1 room(s)" in said
    assert pair.prefill.decided("r") is RequestState.FAILED
    assert "said to be dead" in pair.prefill.failures["r"].reason
    until(lambda: look(address(pair.prefill)).prefill.slab.free == SLAB)  # type: ignore[union-attr]


def test_a_host_that_nobody_knows_is_not_fenced_and_those_known_are_named(
    pair: Pair, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_an_item(pair)
    options = ["--auth-key-file", key_file]
    assert main(["fence", address(pair.prefill), "--dead", "10.0.0.1", *options]) == 1
    error = capsys.readouterr().err
    assert "10.0.0.1" in error
    assert "127.0.0.1" in error
    assert pair.prefill.head.ask("r") is RequestState.WAITING


def test_an_encode_engine_has_nothing_to_fence(
    pair: Pair, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--auth-key-file", key_file]
    assert main(["fence", address(pair.encode), "--dead", "127.0.0.1", *options]) == 1
    assert "is an encode engine" in capsys.readouterr().err


def test_help_says_what_a_fence_costs_if_it_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fence", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "free again after the transport's fence" in text
    assert "corrupts them" in text


# --- who does not answer --------------------------------------------------------------------


def test_a_rank_that_has_ended_is_named_and_the_rest_is_shown(
    pair: Pair, key_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.prefill.rank.close(3.0)
    state = look(address(pair.prefill))
    assert state.silent_ranks == (0,)
    assert state.ranks == ()
    assert state.prefill is not None
    assert state.prefill.slab.free == SLAB
    assert main(["inspect", address(pair.prefill), "--auth-key-file", key_file]) == 0
    assert "ranks that did not answer: 0" in capsys.readouterr().out


def test_many_ask_at_once_and_all_are_answered(pair: Pair) -> None:
    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(look, [address(pair.prefill), address(pair.encode)] * 8))
    assert {state.role for state in states} == {"ec_consumer", "ec_producer"}
    assert all(len(state.ranks) == 1 for state in states)


def test_nobody_there_and_somebody_else_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        assert main(["inspect", where, "--timeout", "0.2"]) == 1
    assert main(["inspect", where, "--timeout", "0.2"]) == 1
    for line in capsys.readouterr().err.splitlines():
        assert where in line
        assert "0.2 s" in line
        assert "control_port" in line


def test_an_answer_in_another_protocol_version_names_the_engine() -> None:
    link = ZmqLink()
    where = link.listen(endpoint("127.0.0.1", 0)).removeprefix("tcp://")
    answer = bytearray(Codec().encode(Envelope(1, 0, Inspect())))
    answer[2] += 1

    def engine() -> None:
        for peer, _ in link.wait(30.0):
            assert link.send(peer, bytes(answer))
            link.wait(0.0)

    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(engine)
        with pytest.raises(ProtocolError, match=f"{where}.*protocol version.*same release"):
            fetch_state(where, 30.0)
        served.result()
    link.close()


def test_a_key_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none")
    assert main(["inspect", "127.0.0.1:1", "--auth-key-file", missing]) == 1
    assert missing in capsys.readouterr().err
