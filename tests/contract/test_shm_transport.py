# SPDX-License-Identifier: Apache-2.0
"""What shared memory adds to the contract: whose memory may be mapped, and for how long."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_connector.errors import TransportError
from epd_connector.memory.segment import Segment
from epd_connector.transport import shm
from epd_connector.transport.base import Span, WriteState

from .transport_cases import SHM, Stage, wait_for

KIB = 1024


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(SHM)
    yield stage
    stage.close()


def mapped_segments() -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("/dev/shm/epd-")


def test_private_memory_cannot_be_a_destination(stage: Stage) -> None:
    private = Segment.create(KIB, shared=False, owner_tag="test")
    with pytest.raises(TransportError, match="create it shared"):
        stage.transport().register_destination(private)
    private.close()


def test_sessions_of_other_memory_are_refused(stage: Stage, tmp_path: Path) -> None:
    transport, _ = stage.writer(KIB)
    session, slab = stage.receiver(KIB)
    name, _, host = session.split("/")
    plain = tmp_path / "file"
    plain.write_bytes(b"\0" * KIB)
    link = Path("/dev/shm") / f"{name[:-16]}{'0' * 16}"
    link.symlink_to(plain)
    try:
        for bad, reason in {
            f"{name}/{KIB}/other-host": "another host",
            f"{name}/{KIB * 2}/{host}": "its session says",
            f"{name}x/{KIB}/{host}": "does not name",
            f"../{name}/{KIB}/{host}": "not a session",
            f"../{KIB}/{host}": "does not name",
            f"{link.name}/{KIB}/{host}": "cannot be opened",
        }.items():
            handle = transport.write(bad, [Span(0, 0, 8)])
            completion = wait_for(transport, [handle])[handle]
            assert completion.state is WriteState.FAILED
            assert reason in completion.reason
    finally:
        link.unlink()
    assert plain.read_bytes() == b"\0" * KIB
    assert slab.buffer[:] == b"\xee" * KIB


def test_segment_that_is_gone_fails(stage: Stage) -> None:
    transport, _ = stage.writer(KIB)
    session, slab = stage.receiver(KIB)
    slab.close()
    handle = transport.write(session, [Span(0, 0, 8)])
    completion = wait_for(transport, [handle])[handle]
    assert completion.state is WriteState.FAILED
    assert "cannot be opened" in completion.reason


def test_mappings_are_kept_forgotten_and_bounded(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "_MAX_PEERS", 2)
    transport, _ = stage.writer(KIB)
    before = mapped_segments()
    sessions = [stage.receiver(KIB)[0] for _ in range(4)]
    for session in sessions + sessions:
        wait_for(transport, [transport.write(session, [Span(0, 0, 8)])])
    assert mapped_segments() == before + 4 + 2
    transport.forget(sessions[-1])
    assert mapped_segments() == before + 4 + 1
    transport.close()
    assert mapped_segments() == before + 4
