# SPDX-License-Identifier: Apache-2.0
"""Engines on two hosts, and the network between them cut for longer than the peer timeout."""

from collections.abc import Iterator

import pytest

from tests.process import sides
from tests.process.engines import MIB, EncodeEngine, Engines, PrefillEngine, Tenants, item, made
from tests.process.namespaces import Cable, Host
from tests.process.scenes import before_it_is_offered, in_the_middle_of_a_write, written
from tests.process.sides import PROBES, Place
from tests.unit.pair_bench import until

SMALL, LARGE = 4 * MIB, 64 * MIB
SILENT = "was silent for 2.5 s (peer_timeout_s)"


@pytest.fixture
def cable() -> Iterator[Cable]:
    try:
        cable = Cable()
    except OSError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    yield cable
    cable.close()


@pytest.fixture
def engines(cable: Cable) -> Iterator[Engines]:
    """Ended before their hosts are."""
    yield from made()


def keys(host: Host) -> dict[str, object]:
    return {
        "transport": "mooncake",
        "control_host": host.address,
        "heartbeat_s": 0.5,
        "peer_timeout_s": 2.5,
    }


def encode_engine(engines: Engines, host: Host) -> EncodeEngine:
    place = Place(host.namespace)
    return engines.encode(place=place, send_slab_bytes=LARGE + SMALL, **keys(host))


def prefill_engine(engines: Engines, host: Host) -> PrefillEngine:
    extra = {**keys(host), "receive_slab_bytes": LARGE + 8 * SMALL}
    return engines.prefill(place=Place(host.namespace), extra=extra)


def test_cut_and_mended(engines: Engines, cable: Cable) -> None:
    there, here = cable.hosts
    near, *far = [encode_engine(engines, host) for host in (here, there, there, there)]
    writing, waiting, dying = far
    prefill = prefill_engine(engines, here)
    for encode in (near, *far):
        prefill.load(encode, item(SMALL))
    scenes = [before_it_is_offered(prefill, encode, SMALL) for encode in (waiting, dying)]
    scenes.append(in_the_middle_of_a_write(prefill, writing, LARGE))
    cable.cut()
    writing.child.go_on()
    writing.child.end()
    dying.child.kill()
    for scene in scenes:
        assert SILENT in prefill.failed(scene.asked)
    until(lambda: waiting.idle() and writing.offers().writing == 1)
    tenants = Tenants(prefill, near, SMALL)
    assert prefill.balance().quarantined == LARGE + 2 * SMALL
    assert written(prefill, scenes[-1]) < PROBES
    cable.mend()
    until(lambda: prefill.balance().quarantined == 0)
    assert written(prefill, scenes[-1]) == PROBES
    tenants.leave()
    for encode in (waiting, writing):
        until(encode.idle)
        prefill.load(encode, item(SMALL))
        assert encode.counters()["errors_internal"] == 0
    until(prefill.settled)
    assert prefill.counters()["errors_internal"] == 0


def test_host_that_does_not_come_back(engines: Engines, cable: Cable) -> None:
    there, here = cable.hosts
    near, far = [encode_engine(engines, host) for host in (here, there)]
    prefill = prefill_engine(engines, here)
    prefill.load(far, item(SMALL))
    scene = in_the_middle_of_a_write(prefill, far, LARGE)
    cable.cut()
    far.child.kill()
    assert SILENT in prefill.failed(scene.asked)
    tenants = Tenants(prefill, near, SMALL)
    assert prefill.balance().quarantined == LARGE
    prefill.head.call(sides.say_host_gone, there.address)
    until(lambda: prefill.balance().quarantined == 0)
    tenants.leave()
    prefill.load(near, item(LARGE))
    assert prefill.counters()["errors_internal"] == 0
