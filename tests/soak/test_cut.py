# SPDX-License-Identifier: Apache-2.0
"""Engines on two hosts, and the network between them cut for longer than the peer timeout."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from epd_connector.testing.chat import JSONValue
from epd_connector.testing.engines import EngineProcess, EngineRole
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
from tests.process.namespaces import Cable, Host
from tests.soak.stage import LARGE, SMALL, Errand, Stage, failed

pytestmark = pytest.mark.engine

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
SILENCE_S = 8.0
TIMES: Mapping[str, JSONValue] = {
    "heartbeat_s": 1.0,
    "peer_timeout_s": SILENCE_S,
    "resolve_timeout_s": SILENCE_S,
    "write_timeout_s": SILENCE_S,
    "failed_peer_s": 5.0,
}


class Inside:
    """A thread on another host: what it calls, and threads started by that, are there."""

    def __init__(self, host: Host) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=_enter, initargs=(host.namespace,))

    def __call__(self, call: Callable[[], T]) -> T:
        return self._thread.submit(call).result()

    def close(self) -> None:
        self._thread.shutdown()


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open("rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    try:
        cable = Cable()
    except OSError as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    yield cable
    cable.close()


@dataclass(frozen=True)
class Apart:
    """An encode engine on one host, and on the other a prefill engine and the client of both."""

    stage: Stage
    cable: Cable
    inside: Inside
    encode: EngineProcess
    prefill: EngineProcess

    def sent(self, size: tuple[int, int] = SMALL) -> Errand:
        """A request to both engines."""
        return self.inside(lambda: self.stage.errand(self.encode, self.prefill, size).ask().feed())

    def until(self, condition: Callable[[], bool]) -> None:
        self.inside(lambda: until(condition))


@pytest.fixture(scope="module")
def apart(cable: Cable, stage: Stage) -> Iterator[Apart]:
    there, here = cable.hosts
    inside = Inside(here)

    def start(role: EngineRole, host: Host) -> EngineProcess:
        launcher = ("ip", "netns", "exec", host.namespace)
        return stage.start(role, TIMES, host=host.address, launcher=launcher)

    encode, prefill = start("ec_producer", there), start("ec_consumer", here)
    inside(lambda: stage.ready(encode, prefill))
    apart = Apart(stage, cable, inside, encode, prefill)
    stage.right(apart.sent())
    yield apart
    for engine in (encode, prefill):
        assert engine.alive()
        assert inside(partial(in_order, engine))
        # Before their hosts are removed.
        engine.kill()
    inside.close()


def test_a_cut_in_the_middle_of_a_write(apart: Apart) -> None:
    """Fails in time, and so do others; what was on its way lands when the network is back."""
    encode, prefill = apart.encode, apart.prefill
    errand = apart.inside(lambda: apart.stage.granted(encode, prefill, LARGE))
    receiver = worker(prefill)
    with stopped(receiver):
        apart.inside(errand.feed)
        until(lambda: being_sent_rows(receiver))
        apart.cable.cut()
    assert f"was silent for {SILENCE_S} s (peer_timeout_s)" in failed(errand)
    assert apart.inside(lambda: quarantined(prefill)) > 2 * 2**20
    other = apart.inside(lambda: apart.stage.errand(encode, prefill).ask())
    assert failed(other)
    apart.cable.mend()
    apart.until(lambda: quarantined(prefill) == 0)
    apart.until(lambda: settled(encode))
    landed = apart.inside(lambda: counter(prefill, "items_landed"))
    apart.stage.right(apart.sent())
    apart.stage.right(apart.sent(LARGE))
    apart.until(lambda: counter(prefill, "items_landed") == landed + 2)
