# SPDX-License-Identifier: Apache-2.0
"""A rank's writes: each reported once when it ends, and asked after ever less often."""

import pytest

from epd_connector.core.effects import Write
from epd_connector.core.send_events import Wrote
from epd_connector.errors import Code
from epd_connector.memory.segment import Segment
from epd_connector.runtime.writes import Writes
from epd_connector.testing.memory_transport import MemoryFabric, MemoryTransport
from epd_connector.transport.base import SlabBuffer

SLAB = 4096


class Bench:
    """Writes over one transport in memory, which ends them when told to."""

    def __init__(self, poll_interval_s: float | None = None) -> None:
        self.transport = MemoryTransport(MemoryFabric(), auto=False)
        self.transport.poll_interval_s = poll_interval_s
        self.slabs = [Segment.create(SLAB, shared=False, owner_tag="test") for _ in range(2)]
        self.transport.register_source(self.slabs[0])
        self.session = self.transport.register_destination(self.slabs[1])
        self.writes = Writes({"memory": self.transport})

    def start(
        self,
        number: int,
        now: float = 0.0,
        transport: str = "memory",
        lent: SlabBuffer | None = None,
    ) -> Wrote | None:
        return self.writes.start(Write(number, transport, self.session, 0, 0, 64), lent, now)

    def end(self, failure: str = "") -> None:
        handle = self.transport.pending()[0].handle
        if failure:
            self.transport.fail(handle, failure)
        else:
            self.transport.complete(handle)


def test_a_write_is_reported_once_when_it_has_ended() -> None:
    bench = Bench()
    assert bench.start(7) is None
    assert bench.writes.ended() == []
    assert bench.writes.in_flight() == 1
    bench.end()
    assert bench.writes.ended() == [Wrote(7)]
    assert bench.writes.ended() == []
    assert bench.writes.in_flight() == 0


def test_lent_memory_is_read_instead_of_the_slab() -> None:
    bench = Bench()
    lent = Segment.create(SLAB, shared=False, owner_tag="test")
    lent.buffer[:64] = b"lent" * 16
    bench.start(7, lent=lent)
    bench.end()
    assert bytes(bench.slabs[1].buffer[:64]) == b"lent" * 16


def test_a_failure_names_the_transport() -> None:
    bench = Bench()
    bench.start(7)
    bench.end("the wire broke")
    (wrote,) = bench.writes.ended()
    assert wrote.failure is not None
    assert wrote.failure.code is Code.WRITE_FAILED
    assert wrote.failure.reason == "memory: the wire broke"


def test_a_transport_that_is_not_there_ends_a_write_before_it_begins() -> None:
    wrote = Bench().start(7, transport="rdma")
    assert wrote is not None
    assert wrote.failure is not None
    for part in ("'rdma'", "memory"):
        assert part in wrote.failure.reason


def test_who_tells_is_not_asked() -> None:
    bench = Bench()
    bench.start(1)
    assert bench.writes.next_poll(1.0) is None


@pytest.mark.parametrize(
    ("age", "wait"), [(0.0, 0.0002), (0.01, 0.0002), (0.1, 0.001), (1.0, 0.01), (3600.0, 0.02)]
)
def test_who_must_be_asked_is_asked_often_at_first_and_seldom_when_a_write_is_stalled(
    age: float, wait: float
) -> None:
    bench = Bench(poll_interval_s=0.0002)
    assert bench.writes.next_poll(0.0) is None
    bench.start(1, now=5.0)
    assert bench.writes.next_poll(5.0 + age) == pytest.approx(wait)


def test_a_stalled_write_does_not_delay_the_news_of_a_new_one() -> None:
    bench = Bench(poll_interval_s=0.0002)
    bench.start(1, now=0.0)
    bench.start(2, now=60.0)
    assert bench.writes.next_poll(60.0) == pytest.approx(0.0002)
