# SPDX-License-Identifier: Apache-2.0
"""Encode engines that are killed, however far an item of theirs has come."""

from collections.abc import Callable

import pytest

from epd_connector.testing.ports import Ports
from tests.process.engines import MIB, EncodeEngine, Engines, PrefillEngine, Tenants, item
from tests.process.scenes import (
    MakeScene,
    Scene,
    after_landing,
    before_it_is_offered,
    between_grant_and_write,
    in_the_middle_of_a_write,
    written_partly,
)
from tests.unit.pair_bench import until

SMALL, LARGE = 4 * MIB, 64 * MIB
SCENES: list[tuple[MakeScene, int]] = [
    (before_it_is_offered, SMALL),
    (between_grant_and_write, SMALL),
    (in_the_middle_of_a_write, LARGE),
]
LOST = 2 * SMALL + LARGE
SLAB = LOST + 2 * SMALL
GONE = "its process is gone"


@pytest.fixture(params=["shm", "mooncake"])
def encode_engine(request: pytest.FixtureRequest, engines: Engines) -> Callable[..., EncodeEngine]:
    """Makes encode engines, all over one transport."""

    def make(ports: Ports | None = None) -> EncodeEngine:
        return engines.encode(ports=ports, transport=request.param, send_slab_bytes=LARGE)

    return make


def prefill_engine(engines: Engines, encode: EncodeEngine, silence_s: float) -> PrefillEngine:
    extra = {
        "transport": encode.transport,
        "receive_slab_bytes": SLAB,
        "heartbeat_s": min(1.0, silence_s / 4),
        "peer_timeout_s": silence_s,
    }
    return engines.prefill(extra=extra)


def test_kills_are_noticed_at_once(
    engines: Engines, encode_engine: Callable[..., EncodeEngine]
) -> None:
    """Not by silence, which could last longer than this test waits."""
    ports = [Ports(2) for _ in SCENES]
    dying = [encode_engine(each) for each in ports]
    landed = encode_engine()
    prefill = prefill_engine(engines, landed, silence_s=600)
    good = after_landing(prefill, landed, SMALL)
    scenes = [
        make(prefill, encode, nbytes) for encode, (make, nbytes) in zip(dying, SCENES, strict=True)
    ]
    for encode in [*dying, landed]:
        encode.child.kill()
    for scene in scenes:
        reason = prefill.failed(scene.asked)
        assert reason.startswith("peer_dead: "), reason
        assert GONE in reason
    prefill.loaded(good.asked)
    for each in ports:
        prefill.load(encode_engine(each), item(SMALL))
    until(prefill.settled)
    prefill.load(encode_engine(), item(LARGE))
    assert prefill.counters()["errors_internal"] == 0


def test_regions_wait_for_evidence(
    engines: Engines, encode_engine: Callable[..., EncodeEngine]
) -> None:
    """Engines that do not run are not dead: nobody gets what was granted to them."""
    dying, well = [encode_engine() for _ in SCENES], encode_engine()
    prefill = prefill_engine(engines, well, silence_s=2.5)
    scenes: list[Scene] = []
    for encode, (make, nbytes) in zip(dying, SCENES, strict=True):
        scenes.append(make(prefill, encode, nbytes))
        encode.child.stop()
    for scene in scenes:
        reason = prefill.failed(scene.asked)
        assert reason.startswith("peer_dead: "), reason
        assert "was silent for 2.5 s (peer_timeout_s)" in reason
    assert prefill.balance().quarantined == LOST
    tenants = Tenants(prefill, well, SMALL)
    heir = prefill.ask(well, item(LARGE))
    well.encoded(*heir.items)
    assert prefill.waits(heir)
    assert prefill.receiving()[heir.rooms[0]] == "queued"
    assert prefill.balance().quarantined == LOST
    assert written_partly(prefill, scenes[-1])
    for encode in dying:
        encode.child.kill()
    prefill.ready(heir)
    assert prefill.placed(heir.rooms[0])[0] < LOST
    until(lambda: prefill.balance().quarantined == 0)
    tenants.leave()
    prefill.leave(heir)
    assert prefill.counters()["errors_internal"] == 0
