# SPDX-License-Identifier: Apache-2.0
"""What the in-memory transport adds to the contract: the test decides when a write ends."""

from collections.abc import Iterator

import pytest

from epd_connector.memory.segment import Segment
from epd_connector.testing.memory_transport import MemoryFabric, MemoryTransport
from epd_connector.transport.base import Completion, Span, WriteState

SPAN = Span(source=2, destination=4, nbytes=3)


@pytest.fixture
def slabs() -> Iterator[tuple[Segment, Segment]]:
    source = Segment.create(16, shared=False, owner_tag="test")
    destination = Segment.create(16, shared=False, owner_tag="test")
    source.buffer[:] = bytes(range(16))
    yield source, destination
    source.close()
    destination.close()


@pytest.fixture
def fabric() -> MemoryFabric:
    return MemoryFabric()


@pytest.fixture
def manual(fabric: MemoryFabric, slabs: tuple[Segment, Segment]) -> MemoryTransport:
    transport = MemoryTransport(fabric, auto=False, fence_s=1.5)
    transport.register_source(slabs[0])
    return transport


@pytest.fixture
def session(fabric: MemoryFabric, slabs: tuple[Segment, Segment]) -> str:
    return MemoryTransport(fabric).register_destination(slabs[1])


def test_bytes_land_at_completion_in_any_order(
    manual: MemoryTransport, session: str, slabs: tuple[Segment, Segment]
) -> None:
    wakes: list[int] = []
    manual.set_waker(lambda: wakes.append(1))
    first, second = manual.write(session, [SPAN]), manual.write(session, [Span(0, 0, 2)])
    assert [write.handle for write in manual.pending()] == [first, second]
    assert slabs[1].buffer[:] == bytes(16)
    assert (manual.poll(), wakes) == ([], [])
    manual.complete(second)
    assert slabs[1].buffer[:8] == bytes([0, 1, 0, 0, 0, 0, 0, 0])
    manual.complete(first)
    assert slabs[1].buffer[:8] == bytes([0, 1, 0, 0, 2, 3, 4, 0])
    assert [end.handle for end in manual.poll()] == [second, first]
    assert len(wakes) == 2
    assert (manual.bytes_written(), manual.writes_started) == (5, 2)


def test_failed_write_lands_nothing(
    manual: MemoryTransport, session: str, slabs: tuple[Segment, Segment]
) -> None:
    handle = manual.write(session, [SPAN])
    manual.fail(handle, "cut")
    assert manual.poll() == [Completion(handle, WriteState.FAILED, "cut")]
    assert slabs[1].buffer[:] == bytes(16)
    with pytest.raises(KeyError):
        manual.complete(handle)
    assert manual.bytes_written() == 0


def test_peer_removed_before_completion(
    manual: MemoryTransport, fabric: MemoryFabric, session: str
) -> None:
    handle = manual.write(session, [SPAN])
    fabric.remove(session)
    manual.complete(handle)
    late = manual.write(session, [SPAN])
    assert [(end.handle, end.state) for end in manual.poll()] == [
        (handle, WriteState.FAILED),
        (late, WriteState.FAILED),
    ]


def test_forgotten_sessions_are_visible_and_fence_is_chosen(manual: MemoryTransport) -> None:
    manual.forget("gone")
    assert manual.forgotten() == ["gone"]
    assert manual.fence_s() == 1.5


def test_fabrics_do_not_reach_each_other(manual: MemoryTransport) -> None:
    assert not manual.reaches(MemoryTransport(MemoryFabric("other")).advert())
