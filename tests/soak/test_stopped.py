# SPDX-License-Identifier: Apache-2.0
"""A worker that does not run in the middle of a write, for longer than every timeout, and goes on.

Over Mooncake's TCP, where a write that was given up lands late: never where somebody else is.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from epd_connector.testing.chat import JSONValue
from epd_connector.testing.engines import EngineProcess
from tests.engine.trouble import (
    being_sent_rows,
    counter,
    in_order,
    quarantined,
    settled,
    stopped,
    until,
    worker,
)
from tests.soak.stage import LARGE, SMALL, Stage, failed

pytestmark = pytest.mark.engine

LONGEST_S = 20.0
TIMES: Mapping[str, JSONValue] = {
    "heartbeat_s": 1.0,
    "peer_timeout_s": 8.0,
    "resolve_timeout_s": 8.0,
    "write_timeout_s": 4.0,
    "receive_timeout_s": LONGEST_S,
    "offer_timeout_s": LONGEST_S,
    "failed_peer_s": 5.0,
}
SLAB = "4MiB"
"""Of the prefill engine: one large item, which has 2.1 MB, and not two."""


@dataclass(frozen=True)
class Three:
    """An encode engine that gets into trouble, one that does not, and a prefill engine."""

    stage: Stage
    encode: EngineProcess
    well: EngineProcess
    prefill: EngineProcess

    def tenants(self, number: int = 12) -> None:
        """Others use what is left of the slab, one after the other and all at once."""
        for _ in range(2):
            errands = [self.stage.errand(self.well, self.prefill, SMALL) for _ in range(number)]
            for errand in errands:
                errand.ask().feed()
            for errand in errands:
                self.stage.right(errand)


@pytest.fixture(scope="module")
def three(stage: Stage) -> Iterator[Three]:
    encode, well = (stage.start("ec_producer", TIMES) for _ in range(2))
    prefill = stage.start("ec_consumer", {**TIMES, "receive_slab_bytes": SLAB})
    stage.ready(encode, well, prefill)
    three = Three(stage, encode, well, prefill)
    for each in (encode, well):
        stage.works(each, prefill)
    yield three
    for engine in (encode, well, prefill):
        assert engine.alive()
        assert in_order(engine)


def outlast_all_timeouts(since: float) -> None:
    until(lambda: time.monotonic() > since + LONGEST_S + 5.0)


def test_the_encode_worker_is_stopped(three: Three) -> None:
    """It has written a part of the rows, and writes the rest when all have given it up."""
    stage, encode, prefill = three.stage, three.encode, three.prefill
    errand = stage.granted(encode, prefill)
    receiver, writer = worker(prefill), worker(encode)
    with contextlib.ExitStack() as pause:
        with stopped(receiver):
            errand.feed()
            until(lambda: being_sent_rows(receiver))
            pause.enter_context(stopped(writer))
        since = time.monotonic()
        assert "was silent for 8.0 s (peer_timeout_s)" in failed(errand)
        lost = quarantined(prefill)
        assert lost > 2 * 2**20
        three.tenants()
        outlast_all_timeouts(since)
        three.tenants()
        assert quarantined(prefill) == lost
    three.tenants()
    until(lambda: quarantined(prefill) == 0)
    until(lambda: settled(encode))
    stage.works(encode, prefill)
    stage.right(stage.errand(encode, prefill, LARGE).ask().feed())


def test_the_prefill_worker_is_stopped(three: Three) -> None:
    """The host does nothing without it; what it was sent lies in its kernel, and is given up."""
    stage, encode, prefill = three.stage, three.encode, three.prefill
    late = counter(encode, "writes_late")
    lost = counter(encode, "peers_lost")
    errand = stage.granted(encode, prefill)
    receiver = worker(prefill)
    with stopped(receiver):
        errand.feed()
        until(lambda: being_sent_rows(receiver))
        since = time.monotonic()
        until(lambda: counter(encode, "writes_late") > late)
        until(lambda: counter(encode, "peers_lost") > lost)
        outlast_all_timeouts(since)
    assert failed(errand)
    three.tenants()
    until(lambda: quarantined(prefill) == 0)
    until(lambda: settled(encode))
    stage.works(encode, prefill)
    stage.right(stage.errand(encode, prefill, LARGE).ask().feed())
