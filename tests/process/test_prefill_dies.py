# SPDX-License-Identifier: Apache-2.0
"""Prefill engines, and single ranks of them, that are killed however far an item has come."""

from collections.abc import Callable

import pytest

from epd_connector.testing.ports import Ports
from tests.process import sides
from tests.process.engines import KIB, MIB, Asked, Engines, PrefillEngine, item
from tests.process.scenes import (
    after_landing,
    before_it_is_offered,
    between_grant_and_write,
    in_the_middle_of_a_write,
)
from tests.unit.pair_bench import new_id, until

SMALL, LARGE = 4 * MIB, 64 * MIB
SOON: dict[str, object] = {"heartbeat_s": 0.5, "peer_timeout_s": 2.5}


@pytest.fixture(params=["shm", "mooncake"])
def transport(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def prefill_engine(engines: Engines, transport: str) -> Callable[..., PrefillEngine]:
    def make(**keys: object) -> PrefillEngine:
        extra = {"transport": transport, "receive_slab_bytes": LARGE + 2 * SMALL, **SOON, **keys}
        return engines.prefill(extra=extra)

    return make


def test_encode_engine_lets_go(
    engines: Engines, transport: str, prefill_engine: Callable[..., PrefillEngine]
) -> None:
    encode, busy, forgotten = [
        engines.encode(transport=transport, send_slab_bytes=LARGE + SMALL, **SOON, **keys)
        for keys in ({}, {}, {"offer_timeout_s": 2.5})
    ]
    ports = Ports(2)
    waiting, landed, halfway, before_staging = dying = [
        *(prefill_engine() for _ in range(3)),
        prefill_engine(control_port=ports.first),
    ]
    unasked = Asked("of an engine that died before", [new_id()], [item(SMALL)])
    forgotten.claim(unasked)
    forgotten.encoded(*unasked.items)
    after_landing(landed, encode, SMALL)
    before_it_is_offered(waiting, encode, SMALL)
    between_grant_and_write(before_staging, busy, SMALL)
    in_the_middle_of_a_write(halfway, encode, LARGE)
    for prefill in dying:
        prefill.kill()
    encode.child.go_on()
    encode.child.end()
    prefill_engine(control_port=ports.first).load(encode, item(SMALL))
    prefill = prefill_engine()
    prefill.load(encode, item(LARGE))
    until(encode.idle)
    until(lambda: busy.offers().rooms == 0)
    busy.child.call(sides.let_stage)
    until(busy.idle)
    prefill.load(busy, item(SMALL))
    for engine in (encode, busy, forgotten):
        until(lambda engine=engine: engine.all_concluded())  # type: ignore[misc]
        assert engine.idle()
        assert engine.counters()["errors_internal"] == 0


@pytest.mark.parametrize(("transport", "encode_ranks"), [("shm", 1), ("mooncake", 2)])
def test_one_rank_of_two_is_killed(engines: Engines, transport: str, encode_ranks: int) -> None:
    encode = engines.encode(encode_ranks, transport=transport, **SOON)
    extra = {"transport": transport, **SOON}
    prefill, well = [engines.prefill(2, apart=True, extra=extra) for _ in range(2)]
    prefill.load(encode, item(SMALL))
    waiting = [prefill.ask(encode, item(size)) for size in (KIB, MIB, SMALL)]
    others = [well.ask(encode, item(size)) for size in (KIB, MIB, SMALL)]
    for asked in [*waiting, *others]:
        encode.granted(asked, 2)
    prefill.rank_parts[1].kill()
    waiting.append(prefill.ask(encode, item(MIB)))
    for asked in [*waiting, *others]:
        encode.encoded(*asked.items)
    for asked in others:
        well.loaded(asked)
    until(lambda: True not in [prefill.waits(asked) for asked in waiting])
    for asked in waiting:
        reason = prefill.failed(asked)
        assert "rank 1 of this engine is gone: its worker process has ended" in reason
    until(encode.idle)
    assert encode.counters()["errors_internal"] == 0
    prefill.kill()
    again = engines.prefill(2, apart=True, extra=extra)
    again.load(encode, item(SMALL))
