# SPDX-License-Identifier: Apache-2.0
"""A side that is stopped in the middle of a write, for longer than every timeout, and goes on.

Over Mooncake's TCP, where a write that was given up lands late.
"""

import time

from tests.process import sides
from tests.process.engines import MIB, EncodeEngine, Engines, Tenants, item
from tests.process.scenes import (
    before_it_is_offered,
    in_the_middle_of_a_write,
    written,
    written_partly,
)
from tests.process.sides import PROBES
from tests.unit.pair_bench import until

SMALL, LARGE = 4 * MIB, 64 * MIB
LONGEST_S = 3.0
SOON: dict[str, object] = {
    "transport": "mooncake",
    "heartbeat_s": 0.5,
    "peer_timeout_s": 2,
    "write_timeout_s": 1.2,
    "offer_timeout_s": LONGEST_S,
}
RECEIVING: dict[str, object] = {
    **SOON,
    "receive_slab_bytes": LARGE + 2 * SMALL,
    "receive_timeout_s": LONGEST_S,
    "resolve_timeout_s": 1,
}


def encode_engine(engines: Engines, **keys: object) -> EncodeEngine:
    return engines.encode(send_slab_bytes=LARGE + SMALL, **{**SOON, **keys})


def outlast_all_timeouts(since: float) -> None:
    until(lambda: time.monotonic() > since + 1.25 * LONGEST_S)


def test_encode_engine_is_stopped(engines: Engines) -> None:
    encode, well = encode_engine(engines), encode_engine(engines)
    prefill = engines.prefill(extra=RECEIVING)
    prefill.load(encode, item(SMALL))
    scene = in_the_middle_of_a_write(prefill, encode, LARGE)
    stopped = time.monotonic()
    prefill.failed(scene.asked)
    assert prefill.balance().quarantined == LARGE
    tenants = Tenants(prefill, well, SMALL)
    outlast_all_timeouts(stopped)
    assert prefill.balance().quarantined == LARGE
    assert written_partly(prefill, scene)
    encode.child.go_on()
    encode.child.end()
    until(lambda: prefill.balance().quarantined == 0)
    assert written(prefill, scene) == PROBES
    tenants.leave()
    until(encode.idle)
    prefill.load(encode, item(LARGE))
    assert prefill.counters()["errors_internal"] == encode.counters()["errors_internal"] == 0


def test_prefill_engine_is_stopped(engines: Engines) -> None:
    """Its encode engine stops later, so that others fill the slab before all has landed."""
    # Longer than it takes to stage the rows and to give up their write, on a busy machine, too.
    encode, well = encode_engine(engines, peer_timeout_s=8), encode_engine(engines)
    prefill = engines.prefill(extra=RECEIVING)
    prefill.load(encode, item(SMALL))
    scene = before_it_is_offered(prefill, encode, LARGE)
    prefill.head.call(sides.blank, scene.place)
    prefill.head.stop()
    stopped = time.monotonic()
    encode.encoded(scene.rows)
    until(lambda: encode.counters()["writes_late"] == 1)
    until(lambda: encode.counters()["peers_lost"] == 1)
    outlast_all_timeouts(stopped)
    assert encode.offers().writing == 1
    encode.child.stop()
    prefill.head.go_on()
    prefill.failed(scene.asked)
    until(lambda: written_partly(prefill, scene))
    assert prefill.balance().quarantined == LARGE
    tenants = Tenants(prefill, well, SMALL)
    encode.child.go_on()
    until(lambda: prefill.balance().quarantined == 0)
    assert written(prefill, scene) == PROBES
    tenants.leave()
    until(encode.idle)
    prefill.load(encode, item(LARGE))
    assert prefill.counters()["errors_internal"] == encode.counters()["errors_internal"] == 0
