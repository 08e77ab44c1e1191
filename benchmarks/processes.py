# SPDX-License-Identifier: Apache-2.0
"""Processes of a measurement, and the words between them.

Every process serves orders that come over one pipe, one after the other, until the pipe
closes. All are forked from one server that has imported the host already, so that dozens of
them start in seconds. Those that are not measured are held, so that they cost nothing: every
member of a gloo group wakes a hundred times a second. Owns processes and pipes; knows nothing
of connectors.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol, TypeVar

# What imports no Mooncake: its library starts threads when it is loaded, and those do not
# survive a fork.
PRELOAD = (
    "benchmarks.sides",
    "epd_connector.hosts.vllm.rank",
    "epd_connector.hosts.vllm.head",
    "vllm._custom_ops",
    "vllm.config",
    "vllm.distributed.parallel_state",
    "vllm.distributed.ec_transfer.ec_connector.base",
    "vllm.distributed.ec_transfer.ec_connector.utils",
    "vllm.v1.outputs",
)
ENVIRONMENT = {
    "MC_FORCE_TCP": "1",
    "MC_LOG_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""The same for both connectors. One thread per process is what the host gives its workers."""
_PR_SET_PDEATHSIG = 1
PATIENCE_S = 120.0
"""How long an order may take before the measurement is given up."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Up:
    """The process is ready. ``address``: what its peers have to know of it."""

    address: str


@dataclass(frozen=True, slots=True)
class Broken:
    """An order could not be carried out."""

    text: str


class Side(Protocol):
    """What a process serves."""

    @property
    def address(self) -> str:
        """What peers have to know of it, or nothing."""

    def handle(self, order: object) -> object:
        """Carries out one order; the answer goes back. Any exception ends the measurement."""

    def close(self) -> None:
        """Frees what the process holds."""


class Peer:
    """A process and the other end of its pipe."""

    def __init__(self, name: str, pid: int, connection: Connection) -> None:
        self.name = name
        self._pid = pid
        self._connection = connection

    def hold(self) -> None:
        """Stops the process where it is. RuntimeError if it is gone."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Lets it go on; nothing happens if it is not held. RuntimeError if it is gone."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.kill(self._pid, number)
        except ProcessLookupError:
            raise RuntimeError(f"{self.name} died; was there too little memory?") from None

    def send(self, order: object) -> None:
        """Gives an order; its answer is to be received."""
        self._connection.send(order)

    def receive(self, kind: type[Answer]) -> Answer:
        """The next answer. RuntimeError if the process failed, died or takes too long."""
        if not self._connection.poll(PATIENCE_S):
            raise RuntimeError(f"{self.name} did not answer within {PATIENCE_S:.0f} seconds")
        try:
            answer = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} died; was there too little memory?") from None
        if isinstance(answer, Broken):
            raise RuntimeError(f"{self.name} failed:\n{answer.text}")
        if not isinstance(answer, kind):
            raise RuntimeError(f"{self.name} answered {answer!r}, not with a {kind.__name__}")
        return answer

    def ask(self, order: object, kind: type[Answer]) -> Answer:
        """Gives an order and waits for its answer."""
        self.send(order)
        return self.receive(kind)

    def close(self) -> None:
        """Lets the process end."""
        self._connection.close()


def serve(connection: Connection, make: Callable[..., Side], *arguments: object) -> None:
    """What a process does from its start to its end."""
    # What came with the fork is shared memory as long as nobody writes to it.
    gc.freeze()
    # Should memory run out, nobody else is to pay for the measurement.
    Path("/proc/self/oom_score_adj").write_text("1000")
    # Whoever is held when the measurement dies must come to see that its pipe is closed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
    side = None
    try:
        side = make(*arguments)
        connection.send(Up(side.address))
        while True:
            connection.send(side.handle(connection.recv()))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass
    except Exception:
        connection.send(Broken(traceback.format_exc()))
    finally:
        if side is not None:
            side.close()


class Processes:
    """Starts processes, and ends those that it started."""

    def __init__(self) -> None:
        os.environ.update(ENVIRONMENT)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOAD))
        self._running: list[tuple[Peer, BaseProcess]] = []

    def start(self, name: str, make: Callable[..., Side], *arguments: object) -> Peer:
        """A process that makes its side of ``arguments`` and serves it."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=serve, args=(theirs, make, *arguments), name=name, daemon=True
        )
        process.start()
        theirs.close()
        assert process.pid is not None
        peer = Peer(name, process.pid, ours)
        self._running.append((peer, process))
        return peer

    def close(self, timeout_s: float = 15.0) -> None:
        """Ends all of them: by a word, then by force."""
        for peer, process in self._running:
            if process.is_alive():
                with contextlib.suppress(RuntimeError):
                    peer.go_on()
            peer.close()
        for _, process in self._running:
            process.join(timeout_s)
            if process.is_alive():
                process.kill()
                process.join()
