# SPDX-License-Identifier: Apache-2.0
"""The transports under the contract suite, and what a test needs around one.

Owns how a case makes transports and slabs, peers in other processes, and waiting for writes.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import epd_connector
from epd_connector.memory.segment import Segment, sweep_stale_segments
from epd_connector.testing.memory_transport import MemoryFabric, MemoryTransport
from epd_connector.transport.base import Completion, Transport, TransportOptions
from epd_connector.transport.mooncake import MooncakeTransport
from epd_connector.transport.shm import ShmTransport

LIMIT_S = 30.0
PEER_SCRIPT = Path(__file__).with_name("transport_peer.py")


@dataclass(frozen=True)
class TransportCase:
    name: str
    make: Callable[[MemoryFabric], Transport]
    shared_slabs: bool


def options() -> TransportOptions:
    return TransportOptions(host="127.0.0.1", protocol="tcp", write_threads=2)


SHM = TransportCase("shm", lambda _: ShmTransport(options()), True)
MOONCAKE = TransportCase("mooncake", lambda _: MooncakeTransport(options()), False)
MEMORY = TransportCase("memory", lambda fabric: MemoryTransport(fabric), False)

ALL_CASES = (SHM, MOONCAKE, MEMORY)
PROCESS_CASES = (SHM, MOONCAKE)


def child_environment() -> dict[str, str]:
    """This process's environment, in which a child finds the package."""
    root = str(Path(epd_connector.__file__).parents[1])
    paths = [root, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


class PeerProcess:
    """A process whose slab of `nbytes` bytes, each 0xEE, is the destination of writes."""

    def __init__(self, transport: str, nbytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PEER_SCRIPT), transport, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        self.pid = self._process.pid
        self.session = self._line()

    def digest(self, offset: int, nbytes: int) -> str:
        """SHA-256 of a part of the slab, in hex."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{offset} {nbytes}\n")
        self._process.stdin.flush()
        return self._line()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it the hard way, whatever it is doing. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._close_pipes()

    def close(self) -> None:
        """Let it end by itself, unless it was killed. Idempotent."""
        self._close_pipes()
        try:
            self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, f"the peer process ended with {self._process.wait()}"
        return line


class Stage:
    """Makes the transports, slabs and peers of one test, and takes them down in that order."""

    def __init__(self, case: TransportCase) -> None:
        self.case = case
        self._fabric = MemoryFabric()
        self._stack = ExitStack()
        # What a killed peer leaves behind is what the sweep is for.
        self._stack.callback(sweep_stale_segments)

    def slab(self, nbytes: int, fill: bytes = b"\xee") -> Segment:
        slab = Segment.create(nbytes, shared=self.case.shared_slabs, owner_tag="test")
        self._stack.callback(slab.close)
        slab.buffer[:] = (fill * (nbytes // len(fill) + 1))[:nbytes]
        return slab

    def transport(self) -> Transport:
        transport = self.case.make(self._fabric)
        self._stack.callback(transport.close)
        return transport

    def writer(self, nbytes: int) -> tuple[Transport, bytes]:
        """A transport with a source slab, and the slab's contents."""
        content = os.urandom(nbytes)
        slab = self.slab(nbytes, content)
        transport = self.transport()
        transport.register_source(slab)
        return transport, content

    def receiver(self, nbytes: int) -> tuple[str, Segment]:
        """The session of a destination slab of bytes 0xEE, and the slab."""
        slab = self.slab(nbytes)
        return self.transport().register_destination(slab), slab

    def peer(self, nbytes: int) -> PeerProcess:
        peer = PeerProcess(self.case.name, nbytes)
        self._stack.callback(peer.close)
        return peer

    def close(self) -> None:
        self._stack.close()


def wait_for(transport: Transport, handles: Iterable[int]) -> dict[int, Completion]:
    """The completions of `handles`, each seen exactly once, and of no other handle."""
    wanted = set(handles)
    seen: dict[int, Completion] = {}
    woken = threading.Event()
    transport.set_waker(woken.set)
    deadline = time.monotonic() + LIMIT_S
    while wanted - seen.keys():
        assert time.monotonic() < deadline, f"writes {wanted - seen.keys()} did not end"
        for completion in transport.poll():
            assert completion.handle in wanted
            assert completion.handle not in seen
            seen[completion.handle] = completion
        if wanted - seen.keys():
            woken.wait(transport.poll_interval_s or max(0.0, deadline - time.monotonic()))
            woken.clear()
    return seen
