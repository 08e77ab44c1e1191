# SPDX-License-Identifier: Apache-2.0
"""The parts that transports share: the ledger of writes, the threads, and finding by name."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_connector.errors import TransportError
from epd_connector.transport.base import Completion, Span, TransportOptions, WriteState, span_error
from epd_connector.transport.ledger import WriteLedger
from epd_connector.transport.pace import Pace
from epd_connector.transport.registry import available, create
from epd_connector.transport.shm import ShmTransport
from epd_connector.transport.workers import Job, Workers

LIMIT_S = 30.0


def test_ledger_ends_each_write_once() -> None:
    ledger = WriteLedger()
    wakes: list[int] = []
    ledger.set_waker(lambda: wakes.append(1))
    first, second = ledger.open(10), ledger.open(20)
    assert (ledger.pending(), ledger.in_flight()) == (2, 2)
    ledger.finish(second)
    ledger.finish(first, "cut")
    assert (ledger.pending(), ledger.in_flight(), len(wakes)) == (0, 2, 2)
    assert ledger.drain() == [
        Completion(second, WriteState.DONE, ""),
        Completion(first, WriteState.FAILED, "cut"),
    ]
    assert (ledger.drain(), ledger.in_flight(), ledger.bytes_written()) == ([], 0, 20)
    for handle in (first, second, 77):
        with pytest.raises(ValueError, match="not pending"):
            ledger.finish(handle)


def test_nobody_asks_about_a_write_before_it_can_have_ended() -> None:
    pace = Pace(longest_s=0.1)
    assert pace.sure_s(1 << 26) == 0.0
    pace.note(1 << 26, 0.02, asked=5)
    assert 0.01 < pace.sure_s(1 << 26) < 0.02
    assert pace.sure_s(1 << 18) == 0.0
    assert pace.sure_s(1 << 32) == 0.1
    before = pace.sure_s(1 << 26)
    pace.note(1 << 26, 0.04, asked=5)
    assert before < pace.sure_s(1 << 26) < 0.02, "a slow one is forgiven little by little"
    pace.note(1 << 26, before, asked=1)
    assert pace.sure_s(1 << 26) < before, "it may have ended long before it was asked about"


def test_span_error_says_which_slab() -> None:
    sizes = {"source_nbytes": 10, "destination_nbytes": 20}
    assert span_error([Span(0, 0, 10), Span(10, 20, 0)], **sizes) is None
    assert "source slab of 10" in str(span_error([Span(0, 0, 1), Span(1, 0, 10)], **sizes))
    assert "peer's slab of 20" in str(span_error([Span(0, 11, 10)], **sizes))


class Gate:
    """Jobs that wait until they are let go, and a record of what ran and what was abandoned."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.ran: list[str] = []
        self.abandoned: list[str] = []
        self._started = threading.Semaphore(0)
        self._ended = threading.Semaphore(0)

    def job(self, name: str, *, waits: bool = False) -> Job:
        def run() -> None:
            self._started.release()
            if waits:
                assert self.opened.wait(LIMIT_S)
            self.ran.append(name)
            self._ended.release()

        return Job(run, lambda: self.abandoned.append(name))

    def await_started(self, count: int) -> None:
        for _ in range(count):
            assert self._started.acquire(timeout=LIMIT_S)

    def await_ended(self, count: int) -> None:
        for _ in range(count):
            assert self._ended.acquire(timeout=LIMIT_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def test_workers_keep_the_order_of_a_lane_and_not_between_lanes(gate: Gate) -> None:
    workers = Workers("test", threads=2, backlog=100)
    workers.submit("slow", gate.job("slow 1", waits=True))
    gate.await_started(1)
    for number in range(2, 6):
        assert workers.submit("slow", gate.job(f"slow {number}"))
    assert workers.submit("fast", gate.job("fast"))
    gate.await_ended(1)
    assert gate.ran == ["fast"]
    gate.opened.set()
    gate.await_ended(5)
    assert gate.ran == ["fast", *(f"slow {number}" for number in range(1, 6))]
    assert workers.close(LIMIT_S)


def test_workers_refuse_beyond_their_backlog_and_after_close(gate: Gate) -> None:
    workers = Workers("test", threads=1, backlog=2)
    workers.submit("a", gate.job("running", waits=True))
    gate.await_started(1)
    assert workers.submit("a", gate.job("waits 1"))
    assert workers.submit("b", gate.job("waits 2"))
    assert not workers.submit("c", gate.job("refused"))
    assert not workers.close(0.0)
    assert sorted(gate.abandoned) == ["waits 1", "waits 2"]
    assert not workers.submit("c", gate.job("late"))
    gate.opened.set()
    assert workers.close(LIMIT_S)
    assert gate.ran == ["running"]


def test_workers_use_no_more_threads_than_allowed(gate: Gate) -> None:
    workers = Workers("counted", threads=3, backlog=100)
    for number in range(20):
        workers.submit(number, gate.job(str(number), waits=True))
    gate.await_started(3)
    names = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith("counted-") for name in names) == 3
    gate.opened.set()
    gate.await_ended(20)
    assert workers.close(LIMIT_S)


def declare(folder: Path, module: str, doors: dict[str, str]) -> None:
    """Make `folder` look like an installed package with these transports."""
    (folder / "some_transport.py").write_text(module)
    metadata = folder / "some_transport-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-transport\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in doors.items()]
    text = "\n".join(["[epd_connector.transports]", *lines])
    (metadata / "entry_points.txt").write_text(text)


MODULE = """
from epd_connector.errors import TransportError
from epd_connector.transport.shm import ShmTransport

def good():
    return ShmTransport

class Unusable(ShmTransport):
    def __init__(self, options):
        raise TransportError("no such device; buy one")

def unusable():
    return Unusable
"""


def test_transports_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doors = {"good": "some_transport:good", "unusable": "some_transport:unusable"}
    declare(tmp_path, MODULE, doors | {"broken": "some_transport:absent"})
    monkeypatch.syspath_prepend(tmp_path)
    assert {"good", "unusable", "broken"} <= available().keys()
    assert available()["good"]() is ShmTransport
    transport = create("good", TransportOptions())
    assert isinstance(transport, ShmTransport)
    transport.close()
    with pytest.raises(TransportError, match="no such device; buy one"):
        create("unusable", TransportOptions())
    with pytest.raises(TransportError, match="some_transport:absent"):
        create("broken", TransportOptions())
    with pytest.raises(TransportError, match=r"'carrier-pigeon'.*broken, good"):
        create("carrier-pigeon", TransportOptions())
