# SPDX-License-Identifier: Apache-2.0
"""Engines that are told to end while a write of theirs, or to them, does not: nothing is left.

What libraries keep for good is not counted: each process has had one engine before.
"""

import pytest

from tests.group import encode_side
from tests.process import sides
from tests.process.engines import MIB, EncodeEngine, Engines, PrefillEngine, item
from tests.process.scenes import before_it_is_offered, in_the_middle_of_a_write, written_partly
from tests.process.sides import Holdings, Place
from tests.unit.pair_bench import until

SMALL, LARGE = MIB, 64 * MIB
KEYS: dict[str, object] = {
    "heartbeat_s": 0.5,
    "peer_timeout_s": 2,
    "send_slab_bytes": LARGE + SMALL,
    "receive_slab_bytes": LARGE + SMALL,
}


def keys_of(transport: str) -> dict[str, object]:
    return {**KEYS, "transport": transport}


def end_encode(encode: EncodeEngine) -> Holdings:
    """The engine ends in good order; what its process still holds."""
    encode.child.call(encode_side.close)
    return encode.child.call(sides.holdings)


def begin_encode(encode: EncodeEngine) -> None:
    encode.child.call(sides.begin)
    encode.address = encode.child.call(sides.control)


def end_prefill(prefill: PrefillEngine) -> Holdings:
    prefill.head.call(sides.close)
    return prefill.head.call(sides.holdings)


def begin_prefill(prefill: PrefillEngine) -> None:
    prefill.head.call(sides.begin)
    prefill.head.call(sides.await_ranks, prefill.ranks)


def nothing_of_ours(held: Holdings) -> bool:
    return held.threads == ("MainThread",) and held.segments == () and held.mapped == 0


def test_encode_engine_ends_while_it_writes_to_one_that_is_stopped(engines: Engines) -> None:
    keys = keys_of("mooncake")
    encode, prefill = engines.encode(**keys), engines.prefill(extra=keys)
    prefill.load(encode, item(SMALL))
    before = end_encode(encode)
    assert nothing_of_ours(before)
    begin_encode(encode)
    prefill.load(encode, item(SMALL))
    scene = before_it_is_offered(prefill, encode, LARGE)
    prefill.head.stop()
    encode.encoded(scene.rows)
    until(lambda: encode.offers().writing == 1)
    assert end_encode(encode) == before
    prefill.head.go_on()
    prefill.failed(scene.asked)
    until(prefill.settled)
    begin_encode(encode)
    prefill.load(encode, item(LARGE))
    assert end_encode(encode) == before


@pytest.mark.parametrize("transport", ["shm", "mooncake"])
def test_prefill_engine_ends_in_the_middle_of_a_write_by_one_that_is_stopped(
    engines: Engines, transport: str
) -> None:
    keys = keys_of(transport)
    encode = engines.encode(**keys)
    prefill = engines.prefill(place=Place(own_tracker=True), extra=keys)
    prefill.load(encode, item(SMALL))
    before = end_prefill(prefill)
    assert nothing_of_ours(before)
    begin_prefill(prefill)
    prefill.load(encode, item(SMALL))
    scene = in_the_middle_of_a_write(prefill, encode, LARGE)
    assert written_partly(prefill, scene)
    assert end_prefill(prefill) == before
    encode.child.go_on()
    encode.child.end()
    until(encode.idle)
    begin_prefill(prefill)
    prefill.load(encode, item(LARGE))
    assert end_prefill(prefill) == before
