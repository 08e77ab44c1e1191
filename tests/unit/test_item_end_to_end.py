# SPDX-License-Identifier: Apache-2.0
"""Items from an encode engine's tensors to a prefill engine's, through all that is in between."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from epd_connector.core import admission_state as admission
from epd_connector.core.admission_state import RequestState
from epd_connector.errors import Code, LinkError
from epd_connector.link.zmq_link import ZmqLink
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import Envelope, RankUp, RoomLanded, RoomReleased
from epd_connector.runtime.report import fetch_report
from tests.unit.pair_bench import SLAB, WIDTH, Pair, Shape, new_id, until

KEY = b"a key of more than 16 bytes"
OTHER_KEY = b"some other key of 16 bytes"
ROWS = 8
READY, FAILED = RequestState.READY, RequestState.FAILED

MakePair = Callable[..., Pair]


@pytest.fixture
def pair_of() -> Iterator[MakePair]:
    """Makes started pairs, and closes them."""
    pairs: list[Pair] = []

    def make(**shape: object) -> Pair:
        pair = Pair(Shape(**shape))  # type: ignore[arg-type]
        pairs.append(pair)
        pair.start()
        return pair

    yield make
    for pair in pairs:
        pair.close()


def send(pair: Pair, tensor: torch.Tensor, name: str = "r") -> torch.Tensor:
    """One item, whole way; what the prefill engine published."""
    room, hash = new_id(), f"item-of-{name}"
    rows = tensor.shape[0]
    pair.encode.claim(room, hash, rows)
    pair.prefill.need(name, pair.item(hash, rows, room))
    pair.encode.encoded(hash, tensor)
    assert pair.prefill.decided(name) is READY, pair.prefill.failures
    published = pair.prefill.load(name, hash)
    pair.prefill.head.tell(admission.Left(name))
    return published


def count(pair: Pair, side: str, name: str, key: bytes | None = None) -> float:
    engine = pair.encode if side == "encode" else pair.prefill
    return fetch_report(engine.address, 30, key).counters[name]


# --- bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shm", "mooncake"])
def test_items_of_all_sizes_land_bit_for_bit_and_are_counted(
    pair_of: MakePair, transport: str
) -> None:
    pair = pair_of(transport=transport)
    sizes = (1, 3, ROWS, 1000, SLAB // (WIDTH * 2))
    for rows in sizes:
        tensor = torch.randn(rows, WIDTH).bfloat16()
        assert torch.equal(send(pair, tensor, f"r{rows}"), tensor)
    nbytes = sum(sizes) * WIDTH * 2
    # Ranks tell their heads what they counted a moment later.
    until(lambda: count(pair, "prefill", "bytes_landed") == nbytes)
    until(lambda: count(pair, "encode", "bytes_sent") == nbytes)
    until(lambda: count(pair, "prefill", "items_published") == len(sizes))
    encode = fetch_report(pair.encode.address, 30)
    prefill = fetch_report(pair.prefill.address, 30)
    assert (encode.role, prefill.role) == ("ec_producer", "ec_consumer")
    assert (encode.ranks_up, prefill.ranks_up) == (1, 1)
    assert encode.counters["bytes_staged"] == nbytes
    assert len(encode.encoded_to_landed_s) == len(sizes)
    assert prefill.counters["items_landed"] == prefill.counters["rooms_ready"] == len(sizes)
    for report in (encode, prefill):
        assert report.failures == ()
        for name in ("errors_internal", "frames_malformed", "frames_stale", "writes_failed"):
            assert report.counters[name] == 0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_every_element_type_travels(pair_of: MakePair, dtype: str) -> None:
    pair = pair_of(dtype=dtype)
    tensor = torch.randn(ROWS, WIDTH).to(getattr(torch, dtype))
    assert torch.equal(send(pair, tensor), tensor)


def test_many_items_at_once_each_land_in_their_own_place(pair_of: MakePair) -> None:
    pair = pair_of()
    tensors = {f"i{n}": torch.randn(n + 1, WIDTH).bfloat16() for n in range(40)}
    rooms = {hash: new_id() for hash in tensors}
    items = [pair.item(hash, len(tensor), rooms[hash]) for hash, tensor in tensors.items()]
    pair.prefill.need("r", *items)
    for hash, tensor in reversed(tensors.items()):
        pair.encode.claim(rooms[hash], hash, len(tensor))
        pair.encode.encoded(hash, tensor)
    assert pair.prefill.decided("r") is READY, pair.prefill.failures
    for hash, tensor in tensors.items():
        assert torch.equal(pair.prefill.load("r", hash), tensor)


def test_a_held_item_is_loaded_again_without_a_transfer(pair_of: MakePair) -> None:
    pair = pair_of()
    tensor = torch.randn(ROWS, WIDTH).bfloat16()
    send(pair, tensor, "first")
    pair.prefill.need("second", pair.item("item-of-first", ROWS, new_id()))
    assert pair.prefill.decided("second") is READY
    assert torch.equal(pair.prefill.load("second", "item-of-first"), tensor)
    assert count(pair, "prefill", "rooms_opened") == 1


# --- addresses and keys ---------------------------------------------------------------------


def test_ipv6_addresses_work(pair_of: MakePair) -> None:
    pair = pair_of(host="::1")
    assert pair.encode.address.startswith("[::1]:")
    tensor = torch.randn(ROWS, WIDTH).bfloat16()
    assert torch.equal(send(pair, tensor), tensor)


def test_signed_frames_work(pair_of: MakePair) -> None:
    pair = pair_of(encode_key=KEY, prefill_key=KEY)
    tensor = torch.randn(ROWS, WIDTH).bfloat16()
    assert torch.equal(send(pair, tensor), tensor)
    assert count(pair, "prefill", "items_landed", KEY) == 1
    with pytest.raises(LinkError, match=r"127\.0\.0\.1"):
        fetch_report(pair.encode.address, 0.3)


@pytest.mark.parametrize(
    ("encode_key", "prefill_key"),
    [(KEY, OTHER_KEY), (KEY, None), (None, KEY)],
    ids=["another key", "no key", "key where none is"],
)
def test_another_key_is_refused_in_time_with_a_reason(
    pair_of: MakePair,
    caplog: pytest.LogCaptureFixture,
    encode_key: bytes | None,
    prefill_key: bytes | None,
) -> None:
    pair = pair_of(encode_key=encode_key, prefill_key=prefill_key, resolve_timeout_s=0.3)
    pair.prefill.need("r", pair.item("a", ROWS, new_id()))
    assert pair.prefill.decided("r") is FAILED
    failure = pair.prefill.failures["r"]
    assert failure.code is Code.UNREACHABLE
    assert pair.encode.address in failure.reason
    assert "resolve_timeout_s" in failure.reason
    assert "auth_key" in failure.reason
    assert "give both the same auth_key" in caplog.text
    assert count(pair, "encode", "frames_malformed", encode_key) >= 1


def test_a_stranger_cannot_speak_for_a_rank(pair_of: MakePair) -> None:
    pair = pair_of()
    room = new_id()
    pair.encode.claim(room, "a", ROWS)
    pair.prefill.need("r", pair.item("a", ROWS, room))
    stranger = ZmqLink()
    peer = stranger.connect(pair.prefill.head.control)
    forged = (RankUp(0, "tcp://127.0.0.1:1", {}, SLAB), RoomLanded(room, 1), RoomReleased(room))
    for frame in forged:
        for sender in (pair.prefill.incarnation, new_id()):
            assert stranger.send(peer, Codec().encode(Envelope(sender, 0, frame)))
    until(lambda: count(pair, "prefill", "frames_malformed") == 2 * len(forged))
    stranger.close()
    assert pair.prefill.head.ask("r") is RequestState.WAITING
    tensor = torch.randn(ROWS, WIDTH).bfloat16()
    pair.encode.encoded("a", tensor)
    assert pair.prefill.decided("r") is READY
    assert torch.equal(pair.prefill.load("r", "a"), tensor)


# --- the end --------------------------------------------------------------------------------


def test_an_encode_engine_that_shuts_down_tells_who_waits_for_it(pair_of: MakePair) -> None:
    pair = pair_of()
    room = new_id()
    pair.encode.claim(room, "a", ROWS)
    pair.prefill.need("r", pair.item("a", ROWS, room))
    until(lambda: bool(pair.prefill.rank._receiver and pair.prefill.rank._receiver.rooms()))
    pair.encode.close()
    assert pair.prefill.decided("r") is FAILED
    assert pair.prefill.failures["r"].code is Code.SHUTDOWN


def segments() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"epd-*-{os.getpid()}-*")}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("closed", ["prefill first", "encode first"])
def test_closing_with_a_transfer_under_way_leaves_nothing(closed: str) -> None:
    before = (set(threading.enumerate()), segments(), open_files())
    pair = Pair()
    pair.start()
    room = new_id()
    pair.encode.claim(room, "a", ROWS)
    pair.prefill.need("r", pair.item("a", ROWS, room))
    until(lambda: bool(pair.prefill.rank._receiver and pair.prefill.rank._receiver.rooms()))
    engines = [pair.prefill, pair.encode]
    if closed == "encode first":
        engines.reverse()
    for engine in [*engines, *engines]:
        engine.close(0.5)
    assert (set(threading.enumerate()), segments(), open_files()) == before


def test_closing_while_the_encode_engine_is_silent_is_bounded() -> None:
    threads = set(threading.enumerate())
    pair = Pair()
    pair.start()
    send(pair, torch.randn(ROWS, WIDTH).bfloat16())
    pair.encode.rank._loop.stop(30)
    pair.prefill.need("r", pair.item("b", ROWS, new_id()))
    until(lambda: bool(pair.prefill.rank._receiver and pair.prefill.rank._receiver.rooms()))
    pair.prefill.close(0.2)
    pair.encode.close(0.2)
    assert set(threading.enumerate()) == threads


def test_starting_twice_is_starting_once_and_making_starts_nothing() -> None:
    threads = set(threading.enumerate())
    pair = Pair()
    assert {t for t in threading.enumerate() if t.name.startswith("epd-")} <= threads
    pair.start()
    control, running = pair.encode.head.control, set(threading.enumerate())
    pair.start()
    assert (pair.encode.head.control, set(threading.enumerate())) == (control, running)
    pair.close()
    pair.close()
    host, _, port = control.removeprefix("tcp://").rpartition(":")
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect((host, int(port)))
