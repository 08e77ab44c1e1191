# SPDX-License-Identifier: Apache-2.0
"""What Mooncake adds to the contract: peers that stall, and the meaning of its return codes.

The first half runs the real library against real processes. The second replaces the library by
a scripted engine, for answers that cannot be had from the real one on demand.
"""

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import ModuleType

import pytest

from epd_connector.errors import TransportError
from epd_connector.memory.segment import Segment
from epd_connector.transport import mooncake
from epd_connector.transport.base import Span, TransportOptions, WriteState
from epd_connector.transport.mooncake import MooncakeTransport

from .transport_cases import LIMIT_S, MOONCAKE, Stage, child_environment, options, wait_for

MIB = 1 << 20
LARGE = 64 * MIB
SESSION = "host:1/1000/4096"
# IPv6 is a mode of the whole process.
IPV6_SCRIPT = """
import threading
from epd_connector.memory.segment import Segment
from epd_connector.transport.base import Span, TransportOptions
from epd_connector.transport.mooncake import MooncakeTransport

transport = MooncakeTransport(TransportOptions(host="::1"))
slabs = [Segment.create(4096, shared=False, owner_tag="test") for _ in range(2)]
transport.register_source(slabs[0])
session = transport.register_destination(slabs[1])
woken = threading.Event()
transport.set_waker(woken.set)
transport.write(session, [Span(0, 0, 10)])
while not (ended := transport.poll()):
    woken.wait(transport.poll_interval_s)
    woken.clear()
print(transport.advert(), session, ended[0].state)
transport.close()
"""


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(MOONCAKE)
    yield stage
    stage.close()


def test_write_to_a_stopped_peer_is_pending_until_the_peer_goes_on(stage: Stage) -> None:
    transport, content = stage.writer(LARGE)
    peer = stage.peer(LARGE)
    wait_for(transport, [transport.write(peer.session, [Span(0, 0, 4096)])])
    peer.signal(signal.SIGSTOP)
    handle = transport.write(peer.session, [Span(0, 0, LARGE)])
    assert transport.poll() == []
    peer.signal(signal.SIGCONT)
    assert wait_for(transport, [handle])[handle].state is WriteState.DONE
    assert peer.digest(0, LARGE) == hashlib.sha256(content).hexdigest()


def test_peer_killed_during_a_write_fails_it(stage: Stage) -> None:
    transport, _ = stage.writer(LARGE)
    peer = stage.peer(LARGE)
    wait_for(transport, [transport.write(peer.session, [Span(0, 0, 4096)])])
    peer.signal(signal.SIGSTOP)
    handle = transport.write(peer.session, [Span(0, 0, LARGE)])
    assert transport.poll() == []
    peer.kill()
    completion = wait_for(transport, [handle])[handle]
    assert completion.state is WriteState.FAILED
    assert peer.session.partition("/")[0] in completion.reason


def test_silent_peer_does_not_delay_another(stage: Stage) -> None:
    """Without a probe of its own the first write holds the engine's lock for a minute."""
    transport, content = stage.writer(MIB)
    silent, good = stage.peer(MIB), stage.peer(MIB)
    silent.signal(signal.SIGSTOP)
    stalled = [transport.write(silent.session, [Span(0, 0, MIB)]) for _ in range(3)]
    handle = transport.write(good.session, [Span(0, 0, MIB)])
    assert wait_for(transport, [handle])[handle].state is WriteState.DONE
    silent.signal(signal.SIGCONT)
    ended = wait_for(transport, stalled).values()
    assert {completion.state for completion in ended} == {WriteState.DONE}
    assert silent.digest(0, MIB) == hashlib.sha256(content).hexdigest()


def test_library_may_not_give_up_on_its_own(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "5")
    stage.transport()
    assert int(os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"]) > 86_400
    assert int(os.environ["MC_TCP_STATUS_TIMEOUT_SEC"]) > 86_400
    assert os.environ["MC_FORCE_TCP"] == "1"
    assert "MC_TCP_PROGRESS_TIMEOUT_SEC=5" in caplog.text


def test_overlapping_slabs_are_refused(stage: Stage) -> None:
    transport = stage.transport()
    slab = stage.slab(MIB)
    transport.register_source(slab)
    with pytest.raises(TransportError, match="receive_slab_bytes"):
        transport.register_destination(slab)


def test_ipv6() -> None:
    script = subprocess.run(
        [sys.executable, "-c", IPV6_SCRIPT],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    advert, session, state = script.stdout.split()
    assert advert == "mooncake/tcp/ipv6"
    assert session.startswith("[::1]:")
    assert state == "WriteState.DONE"


def test_ipv6_after_the_library_was_loaded_for_ipv4(stage: Stage) -> None:
    stage.transport()
    with pytest.raises(TransportError, match="MC_USE_IPV6=1"):
        MooncakeTransport(TransportOptions(host="::1"))


def test_rdma_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    unknown = TransportOptions(protocol="rdma", device_name="no_such_device")
    with pytest.raises(TransportError, match="no_such_device"):
        MooncakeTransport(unknown)
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    with pytest.raises(TransportError, match="MC_FORCE_TCP"):
        MooncakeTransport(unknown)
    with pytest.raises(TransportError, match="neither tcp nor rdma"):
        MooncakeTransport(TransportOptions(protocol="udp"))


def test_unacknowledged_writes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_TCP_PROTO", "1")
    assert "unset it" in str(MooncakeTransport.probe())
    with pytest.raises(TransportError, match="MC_TCP_PROTO"):
        MooncakeTransport(options())


def test_missing_package_and_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    assert "epd-connector[mooncake]" in str(MooncakeTransport.probe())


class ScriptedEngine:
    """Stands in for the library's engine: each transfer answers what its script says next."""

    def __init__(self) -> None:
        self.initialized = 0
        self.registered = 0
        self.probe_answer = 0
        self.refuse_from: int | None = None
        self.statuses: dict[int, list[int]] = defaultdict(lambda: [1])
        self.submitted: list[tuple[str, int, int, int]] = []
        self.unregistered: list[int] = []
        self.was_given_one = threading.Event()

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        return self.initialized

    def get_rpc_port(self) -> int:
        return 1

    def register_memory(self, address: int, nbytes: int) -> int:
        return self.registered

    def unregister_memory(self, address: int) -> int:
        self.unregistered.append(address)
        return 0

    def send_probe(self, target: str) -> int:
        return self.probe_answer

    def transfer_submit_write(self, target: str, source: int, to: int, nbytes: int) -> int:
        if self.refuse_from is not None and len(self.submitted) >= self.refuse_from:
            return 2**64 - 1
        self.submitted.append((target, source, to, nbytes))
        self.was_given_one.set()
        return 100 + len(self.submitted)

    def transfer_check_status(self, transfer: int) -> int:
        # An empty script: a terminal id was asked for again, which the library does not survive.
        return self.statuses[transfer].pop(0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedEngine:
    engine = ScriptedEngine()

    class TransferEngine(ScriptedEngine):
        def __new__(cls) -> ScriptedEngine:  # type: ignore[misc]
            return engine

    module = ModuleType("mooncake.engine")
    vars(module)["TransferEngine"] = TransferEngine
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    return engine


@pytest.fixture
def source() -> Iterator[Segment]:
    segment = Segment.create(4096, shared=False, owner_tag="test")
    yield segment
    segment.close()


@pytest.fixture
def transport(engine: ScriptedEngine, source: Segment) -> Iterator[MooncakeTransport]:
    transport = MooncakeTransport(options())
    transport.register_source(source)
    yield transport
    transport.close()
    assert engine.unregistered == [source.address]


def test_addresses_handed_to_the_engine(
    engine: ScriptedEngine, transport: MooncakeTransport, source: Segment
) -> None:
    wait_for(transport, [transport.write(SESSION, [Span(8, 16, 32)])])
    assert engine.submitted == [("host:1", source.address + 8, 0x1000 + 16, 32)]


def test_timed_out_is_pending(engine: ScriptedEngine, transport: MooncakeTransport) -> None:
    engine.statuses[101] = [0, -2, -2, 0, -2, 1]
    handle = transport.write(SESSION, [Span(0, 0, 8)])
    assert wait_for(transport, [handle])[handle].state is WriteState.DONE
    assert engine.statuses[101] == []


def is_polled(transport: MooncakeTransport) -> bool:
    return transport.poll_interval_s is not None


def test_short_writes_wake_and_those_that_take_long_are_polled(
    engine: ScriptedEngine, transport: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken = threading.Event()
    transport.set_waker(woken.set)
    transport.write(SESSION, [Span(0, 0, 8)])
    assert woken.wait(LIMIT_S)
    assert not is_polled(transport)
    assert len(transport.poll()) == 1
    woken.clear()
    monkeypatch.setattr(mooncake, "_ATTEND_S", 0.0)
    engine.statuses[102] = [0, 0, 1]
    transport.write(SESSION, [Span(0, 0, 8)])
    assert woken.wait(LIMIT_S), "somebody must ask from now on"
    assert is_polled(transport)
    assert transport.poll() == []
    assert len(transport.poll()) == 1
    assert not is_polled(transport)


def test_failure_waits_for_the_other_spans(
    engine: ScriptedEngine, transport: MooncakeTransport
) -> None:
    engine.statuses[101] = [-1]
    engine.statuses[102] = [0, -2, 0, 1]
    handle = transport.write(SESSION, [Span(0, 0, 8), Span(8, 8, 8)])
    assert wait_for(transport, [handle])[handle].state is WriteState.FAILED
    assert engine.statuses[102] == []
    assert transport.bytes_written() == 0


def test_refused_span_waits_for_those_before_it(
    engine: ScriptedEngine, transport: MooncakeTransport
) -> None:
    engine.refuse_from = 1
    engine.statuses[101] = [0, 0, 1]
    handle = transport.write(SESSION, [Span(0, 0, 8), Span(8, 8, 8), Span(16, 16, 8)])
    completion = wait_for(transport, [handle])[handle]
    assert completion.state is WriteState.FAILED
    assert "refused" in completion.reason
    assert engine.statuses[101] == []
    assert len(engine.submitted) == 1


def test_silent_peer_fails_and_is_asked_again(
    engine: ScriptedEngine, transport: MooncakeTransport
) -> None:
    engine.probe_answer = -102
    handle = transport.write(SESSION, [Span(0, 0, 8)])
    completion = wait_for(transport, [handle])[handle]
    assert completion.state is WriteState.FAILED
    assert "host:1" in completion.reason
    assert engine.submitted == []
    engine.probe_answer = 0
    handle = transport.write(SESSION, [Span(0, 0, 8)])
    assert wait_for(transport, [handle])[handle].state is WriteState.DONE


def test_write_that_never_ends_keeps_the_slab(engine: ScriptedEngine, source: Segment) -> None:
    transport = MooncakeTransport(options())
    transport.register_source(source)
    engine.statuses[101] = [0] * 100_000
    transport.write(SESSION, [Span(0, 0, 8)])
    assert engine.was_given_one.wait(LIMIT_S)
    transport.close()
    assert not transport.quiet()
    assert transport.poll() == []


def test_start_and_registration_failures(engine: ScriptedEngine, source: Segment) -> None:
    engine.registered = -1
    transport = MooncakeTransport(options())
    with pytest.raises(TransportError, match="send_slab_bytes"):
        transport.register_source(source)
    with pytest.raises(TransportError, match="receive_slab_bytes"):
        transport.register_destination(source)
    transport.close()
    engine.initialized = -1
    with pytest.raises(TransportError, match="control_host"):
        MooncakeTransport(options())
