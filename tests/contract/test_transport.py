# SPDX-License-Identifier: Apache-2.0
"""What every transport promises, whichever way the bytes travel."""

import ctypes
import hashlib
import os
import weakref
from collections.abc import Iterator

import pytest

from epd_connector.errors import TransportError
from epd_connector.testing.engines import wait_until
from epd_connector.transport.base import Span, Transport, WriteState

from .transport_cases import (
    ALL_CASES,
    LIMIT_S,
    PROCESS_CASES,
    Stage,
    TransportCase,
    wait_for,
)

KIB = 1024
SLAB = 256 * KIB
BAD_SESSIONS = ("", "garbage", "a/b/c", "/" * 500, "x" * 5000, "../../etc/passwd/8/host", "\0\n")
OUTSIDE = (
    Span(0, SLAB - 9, 10),
    Span(SLAB - 9, 0, 10),
    Span(0, 2 * SLAB, 1),
    Span(-1, 0, 10),
    Span(0, -1, 10),
    Span(0, 0, -1),
    Span(0, 1 << 70, 1),
)


@pytest.fixture(params=ALL_CASES, ids=lambda case: case.name)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    case: TransportCase = request.param
    stage = Stage(case)
    yield stage
    stage.close()


@pytest.fixture(params=PROCESS_CASES, ids=lambda case: case.name)
def two_processes(request: pytest.FixtureRequest) -> Iterator[Stage]:
    case: TransportCase = request.param
    stage = Stage(case)
    yield stage
    stage.close()


class Anywhere:
    """Memory of this process that nobody else knows of."""

    path = None

    def __init__(self, content: bytes) -> None:
        self._memory = bytearray(content)
        self.nbytes = len(content)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


def ends(transport: Transport, session: str, spans: list[Span]) -> WriteState:
    handle = transport.write(session, spans)
    return wait_for(transport, [handle])[handle].state


def test_satisfies_the_protocol(stage: Stage) -> None:
    transport = stage.transport()
    assert isinstance(transport, Transport)
    assert transport.name == stage.case.name
    assert transport.fence_s() >= 0.0


def test_one_span_lands_exactly(stage: Stage) -> None:
    transport, content = stage.writer(SLAB)
    session, slab = stage.receiver(SLAB)
    span = Span(source=1001, destination=4097, nbytes=70_001)
    handle = transport.write(session, [span])
    assert handle > 0
    completion = wait_for(transport, [handle])[handle]
    assert (completion.state, completion.reason) == (WriteState.DONE, "")
    expected = bytearray(b"\xee" * SLAB)
    expected[4097 : 4097 + 70_001] = content[1001 : 1001 + 70_001]
    assert slab.buffer[:] == expected


def test_several_spans_of_one_write(stage: Stage) -> None:
    transport, content = stage.writer(SLAB)
    session, slab = stage.receiver(SLAB)
    spans = [Span(0, SLAB - 10, 10), Span(500, 0, 1), Span(9, 9, 0), Span(1000, 5000, 33_333)]
    assert ends(transport, session, spans) is WriteState.DONE
    expected = bytearray(b"\xee" * SLAB)
    for span in spans:
        part = content[span.source : span.source + span.nbytes]
        expected[span.destination : span.destination + span.nbytes] = part
    assert slab.buffer[:] == expected
    assert transport.bytes_written() == 10 + 1 + 33_333


def test_memory_that_was_not_registered(stage: Stage) -> None:
    """As a tower leaves rows: anywhere, and without a source slab, if that is to be."""
    transport = stage.transport()
    assert transport.reads_anywhere
    content = os.urandom(70_001)
    session, slab = stage.receiver(SLAB)
    source = Anywhere(content)
    handle = transport.write(session, [Span(1, 4097, 70_000)], source)
    held = weakref.ref(source)
    del source
    assert wait_for(transport, [handle])[handle].state is WriteState.DONE
    assert slab.buffer[4097 : 4097 + 70_000] == content[1:]
    transport.poll()
    assert wait_until(lambda: held() is None, LIMIT_S), "nobody reads it any more"
    outside = transport.write(session, [Span(1, 0, 10)], Anywhere(bytes(10)))
    assert wait_for(transport, [outside])[outside].state is WriteState.FAILED


def test_whole_slab(stage: Stage) -> None:
    transport, content = stage.writer(SLAB)
    session, slab = stage.receiver(SLAB)
    assert ends(transport, session, [Span(0, 0, SLAB)]) is WriteState.DONE
    assert slab.buffer[:] == content


def test_nothing_to_write_is_done(stage: Stage) -> None:
    transport, _ = stage.writer(SLAB)
    session, slab = stage.receiver(SLAB)
    nothing: list[list[Span]] = [[], [Span(0, 0, 0)], [Span(SLAB, SLAB, 0), Span(1, 2, 0)]]
    for spans in nothing:
        assert ends(transport, session, spans) is WriteState.DONE
    assert slab.buffer[:] == b"\xee" * SLAB
    assert transport.bytes_written() == 0


def test_writes_side_by_side_to_several_peers(stage: Stage) -> None:
    transport, content = stage.writer(SLAB)
    receivers = [stage.receiver(SLAB) for _ in range(3)]
    piece = SLAB // 16
    handles = [
        transport.write(session, [Span(at, SLAB - piece - at, piece)])
        for at in range(0, SLAB, piece)
        for session, _ in receivers
    ]
    assert len(set(handles)) == len(handles) == 48
    completions = wait_for(transport, handles)
    assert {completion.state for completion in completions.values()} == {WriteState.DONE}
    pieces = [content[at : at + piece] for at in range(0, SLAB, piece)]
    for _, slab in receivers:
        assert slab.buffer[:] == b"".join(reversed(pieces))
    assert transport.bytes_written() == 3 * SLAB


def test_span_out_of_bounds_fails_and_writes_nothing(stage: Stage) -> None:
    transport, _ = stage.writer(SLAB)
    session, slab = stage.receiver(SLAB)
    for span in OUTSIDE:
        handle = transport.write(session, [Span(0, 0, 10), span])
        completion = wait_for(transport, [handle])[handle]
        assert completion.state is WriteState.FAILED
        assert "span" in completion.reason
    assert slab.buffer[:] == b"\xee" * SLAB
    assert transport.bytes_written() == 0


def test_bad_session_fails(stage: Stage) -> None:
    transport, _ = stage.writer(SLAB)
    good, _ = stage.receiver(SLAB)
    for session in BAD_SESSIONS:
        handle = transport.write(session, [Span(0, 0, 10)])
        completion = wait_for(transport, [handle])[handle]
        assert completion.state is WriteState.FAILED
        assert completion.reason
        transport.forget(session)
    assert ends(transport, good, [Span(0, 0, 10)]) is WriteState.DONE


def test_write_without_a_source_fails(stage: Stage) -> None:
    transport = stage.transport()
    session, _ = stage.receiver(SLAB)
    assert ends(transport, session, [Span(0, 0, 10)]) is WriteState.FAILED


def test_in_flight_counts_until_polled(stage: Stage) -> None:
    transport, _ = stage.writer(SLAB)
    session, _ = stage.receiver(SLAB)
    assert transport.in_flight() == 0
    handles = [transport.write(session, [Span(0, 0, SLAB)]) for _ in range(3)]
    assert transport.in_flight() == 3
    wait_for(transport, handles)
    assert transport.in_flight() == 0
    assert transport.poll() == []


def test_forget_then_write_again(stage: Stage) -> None:
    transport, content = stage.writer(SLAB)
    session, slab = stage.receiver(SLAB)
    handles = [transport.write(session, [Span(0, 0, SLAB)])]
    transport.forget(session)
    handles.append(transport.write(session, [Span(0, 0, SLAB)]))
    states = {completion.state for completion in wait_for(transport, handles).values()}
    assert states == {WriteState.DONE}
    transport.forget(session)
    transport.forget(session)
    slab.buffer[:] = b"\0" * SLAB
    assert ends(transport, session, [Span(0, 0, SLAB)]) is WriteState.DONE
    assert slab.buffer[:] == content


def test_each_slab_is_registered_once(stage: Stage) -> None:
    transport, _ = stage.writer(SLAB)
    transport.register_destination(stage.slab(SLAB))
    with pytest.raises(TransportError, match="already"):
        transport.register_source(stage.slab(SLAB))
    with pytest.raises(TransportError, match="already"):
        transport.register_destination(stage.slab(SLAB))


def test_both_roles_in_one_transport(stage: Stage) -> None:
    transport, content = stage.writer(SLAB)
    slab = stage.slab(SLAB)
    session = transport.register_destination(slab)
    assert ends(transport, session, [Span(0, 0, SLAB)]) is WriteState.DONE
    assert slab.buffer[:] == content


def test_reaches_its_own_kind_only(stage: Stage) -> None:
    first, second = stage.transport(), stage.transport()
    assert first.reaches(second.advert())
    assert second.reaches(first.advert())
    for advert in ("", "garbage", second.advert() + "x", "\0"):
        assert not first.reaches(advert)


def test_close_is_idempotent_and_ends_writes(stage: Stage) -> None:
    transport, _ = stage.writer(SLAB)
    session, _ = stage.receiver(SLAB)
    handles = [transport.write(session, [Span(0, 0, SLAB)]) for _ in range(4)]
    transport.close()
    transport.close()
    assert transport.quiet()
    ended = transport.poll()
    assert sorted(completion.handle for completion in ended) == handles
    late = transport.write(session, [Span(0, 0, 1)])
    assert wait_for(transport, [late])[late].state is WriteState.FAILED


def test_peer_in_another_process(two_processes: Stage) -> None:
    transport, content = two_processes.writer(SLAB)
    peer = two_processes.peer(SLAB)
    assert ends(transport, peer.session, [Span(100, 5000, 60_000)]) is WriteState.DONE
    assert peer.digest(5000, 60_000) == hashlib.sha256(content[100:60_100]).hexdigest()
    assert peer.digest(0, 5000) == hashlib.sha256(b"\xee" * 5000).hexdigest()
    rest = SLAB - 65_000
    assert peer.digest(65_000, rest) == hashlib.sha256(b"\xee" * rest).hexdigest()


def test_dead_peer_ends_and_the_next_one_works(two_processes: Stage) -> None:
    transport, content = two_processes.writer(SLAB)
    victim = two_processes.peer(SLAB)
    assert ends(transport, victim.session, [Span(0, 0, SLAB)]) is WriteState.DONE
    victim.kill()
    # A shared mapping outlives its peer, so a copy into it may succeed; it must only end.
    for _ in range(2):
        ends(transport, victim.session, [Span(0, 0, SLAB)])
    transport.forget(victim.session)
    ends(transport, victim.session, [Span(0, 0, SLAB)])
    peer = two_processes.peer(SLAB)
    assert ends(transport, peer.session, [Span(0, 0, SLAB)]) is WriteState.DONE
    assert peer.digest(0, SLAB) == hashlib.sha256(content).hexdigest()
