# SPDX-License-Identifier: Apache-2.0
"""What is left of a killed engine: nothing, neither on its host nor in those that survive it."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from epd_connector.memory.segment import SHARED_DIRECTORY
from tests.process import sides
from tests.process.engines import KIB, MIB, Engines, item
from tests.process.scenes import before_it_is_offered
from tests.process.sides import Holdings, Place
from tests.unit.pair_bench import until

SOON: dict[str, object] = {"heartbeat_s": 0.5, "peer_timeout_s": 2.5}
ENGINES = 5
"""How many are killed, one after the other."""


@pytest.fixture(params=["shm", "mooncake"])
def keys(request: pytest.FixtureRequest) -> dict[str, object]:
    return {**SOON, "transport": request.param}


def socket_names(*names: str) -> set[str]:
    """Which of these abstract sockets somebody on this host has."""
    held = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    return {name for name in names if name.removeprefix("ipc://") in held}


def test_killed_prefill_engines_leave_nothing(engines: Engines, keys: dict[str, object]) -> None:
    encode = engines.encode(write_parallelism=1, **keys)
    dying = [
        engines.prefill(place=Place(own_tracker=keys["transport"] == "shm"), extra=keys)
        for _ in range(ENGINES)
    ]
    # The first connection of each kind starts what is kept for all that come later.
    engines.prefill(extra=keys).load(encode, item(MIB))
    before = encode.child.call(sides.holdings)
    links = [prefill.head.call(sides.link_name) for prefill in dying]
    segments = [name for prefill in dying for name in prefill.segments]
    assert len(segments) == (ENGINES if keys["transport"] == "shm" else 0)
    assert socket_names(*links) == set(links)
    for prefill in dying:
        prefill.load(encode, item(MIB))
        before_it_is_offered(prefill, encode, KIB)
    for prefill in dying:
        prefill.kill()
    until(lambda: not any((SHARED_DIRECTORY / name).exists() for name in segments))
    until(encode.idle)
    until(lambda: lets_go(encode.child.call(sides.holdings), before, keys["transport"]))
    assert socket_names(*links) == set()


def lets_go(now: Holdings, before: Holdings, transport: object) -> bool:
    """Mooncake keeps one connection for each peer that it ever had: it has no call to close it."""
    if transport == "shm":
        return now == before
    kept = now.descriptors - before.descriptors
    return 0 <= kept <= ENGINES and replace(now, descriptors=before.descriptors) == before


def same(now: Holdings, before: Holdings) -> bool:
    """But for threads that probe: a few, which start with the first deaths."""
    probing = [name for name in now.threads if name.startswith("epd-probe-")]
    threads = tuple(name for name in now.threads if name not in probing)
    return replace(now, threads=threads, tasks=now.tasks - len(probing)) == before


def test_killed_encode_engines_leave_nothing(engines: Engines) -> None:
    """Not at once: an engine that does not answer is told for a while what is not needed."""
    keys: dict[str, object] = {**SOON, "transport": "mooncake"}
    prefill = engines.prefill(extra=keys)
    dying = [engines.encode(**keys) for _ in range(ENGINES)]
    links = [encode.child.call(sides.link_name) for encode in dying]
    prefill.load(engines.encode(**keys), item(MIB))
    before = prefill.head.call(sides.holdings)
    for encode in dying:
        prefill.load(encode, item(MIB))
    scenes = [before_it_is_offered(prefill, encode, KIB) for encode in dying[1:]]
    for encode in dying:
        encode.child.kill()
    for scene in scenes:
        prefill.failed(scene.asked)
    until(prefill.settled)
    until(lambda: same(prefill.head.call(sides.holdings), before))
    assert socket_names(*links) == set()


def test_next_start_sweeps_where_the_tracker_was_killed_too(engines: Engines) -> None:
    extra: dict[str, object] = {"transport": "shm"}
    prefill = engines.prefill(place=Place(own_tracker=True), extra=extra)
    [segment] = prefill.segments
    os.kill(prefill.head.call(sides.tracker_pid), signal.SIGKILL)
    prefill.kill()
    assert (SHARED_DIRECTORY / segment).exists()
    encode = engines.encode(**extra)
    assert not (SHARED_DIRECTORY / segment).exists()
    engines.prefill(extra=extra).load(encode, item(MIB))
