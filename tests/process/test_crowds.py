# SPDX-License-Identifier: Apache-2.0
"""Hundreds of requests at once, over slabs for four items."""

import random
from collections import Counter

import pytest

from tests.process import sides
from tests.process.crowd import ABORTED, LOADED, Order, claim_all, encode_all, schedule_all
from tests.process.engines import KIB, MIB, EncodeEngine, Engines, PrefillEngine, item
from tests.unit.pair_bench import new_id, until

SLAB = MIB
ITEM = SLAB // 4
SEED = 20261201


@pytest.fixture(params=["shm", "mooncake"])
def transport(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


def encode_engine(engines: Engines, transport: str, **extra: object) -> EncodeEngine:
    return engines.encode(transport=transport, send_slab_bytes=SLAB, **extra)


@pytest.fixture
def encode(engines: Engines, transport: str) -> EncodeEngine:
    return encode_engine(engines, transport)


@pytest.fixture
def prefill(engines: Engines, transport: str) -> PrefillEngine:
    return engines.prefill(extra={"transport": transport, "receive_slab_bytes": SLAB})


def orders_of(encode: EncodeEngine, count: int, nbytes: int = ITEM) -> list[Order]:
    return [Order(f"r{n}", new_id(), item(nbytes), encode.address) for n in range(count)]


def run(
    encode: EncodeEngine, prefill: PrefillEngine, orders: list[Order], *, patient: bool = True
) -> dict[str, str]:
    """What became of each."""
    encode.child.call(claim_all, orders)
    encode.child.begin(encode_all, orders, patient)
    prefill.head.begin(schedule_all, orders)
    fates = prefill.head.end()
    encode.child.end()
    assert isinstance(fates, dict)
    return fates


def test_200_requests(encode: EncodeEngine, prefill: PrefillEngine) -> None:
    fates = run(encode, prefill, orders_of(encode, 200))
    assert Counter(fates.values()) == {LOADED: 200}
    until(encode.idle)
    until(prefill.settled)


def test_200_items_that_are_encoded_at_once(encode: EncodeEngine, prefill: PrefillEngine) -> None:
    """More than may wait for the send slab: each comes, or fails with the reason."""
    fates = run(encode, prefill, orders_of(encode, 200), patient=False)
    refused = [fate for fate in fates.values() if fate != LOADED]
    assert all("raise send_slab_bytes on the encode engine" in reason for reason in refused)
    assert len(fates) == 200
    assert len(refused) < 200
    until(encode.idle)
    until(prefill.settled)
    prefill.load(encode, item(ITEM))


def test_1000_requests_of_which_a_third_is_aborted(
    engines: Engines, transport: str, prefill: PrefillEngine
) -> None:
    # One write at a time: a transport keeps one connection for as many as there were at once.
    encode = encode_engine(engines, transport, write_parallelism=1)
    seeded = random.Random(SEED)
    warm = run(encode, prefill, orders_of(encode, 64))
    assert set(warm.values()) == {LOADED}
    until(prefill.settled)
    before = [encode.child.call(sides.holdings), prefill.head.call(sides.holdings)]
    orders = [
        Order(
            f"a{n}",
            new_id(),
            item(seeded.choice([KIB, ITEM // 2, ITEM])),
            encode.address,
            aborted_at=seeded.randint(max(0, n - 40), n + 1) if n % 3 == 0 else None,
            encoded=n % 3 != 0 or seeded.random() < 0.7,
        )
        for n in range(1000)
    ]
    fates = run(encode, prefill, orders)
    for order in orders:
        if order.aborted_at is None:
            assert fates[order.name] == LOADED
        elif order.encoded:
            assert fates[order.name] in (LOADED, ABORTED)
        else:
            assert fates[order.name] == ABORTED or "the tower broke down" in fates[order.name]
    assert Counter(fates.values())[ABORTED] > 200
    until(encode.idle)
    until(prefill.settled)
    until(encode.all_concluded)
    balance = prefill.balance()
    assert balance.free + balance.resident == balance.capacity
    after = [encode.child.call(sides.holdings), prefill.head.call(sides.holdings)]
    assert after == before
    for engine in (encode, prefill):
        assert engine.counters()["errors_internal"] == 0
