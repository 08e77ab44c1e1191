# SPDX-License-Identifier: Apache-2.0
"""What no connector can beat: the bare transfer of an item's bytes, and a bare copy of them.

Owns two stand-ins for a deployment, which send items the way ``deployment.Deployment`` does:
``raw`` is Mooncake's engine alone, from one registered buffer into another process's; ``copy``
is one memory copy into shared memory that is there already. Neither stages, grants, answers
or publishes.
"""

import ctypes
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from benchmarks.deployment import TOWER_S, Timing
from benchmarks.items import WIDTH, Item, check, content
from benchmarks.processes import Processes, Side, Up
from benchmarks.sides import Setup

if TYPE_CHECKING:
    import torch

BASELINES = {"raw": "mooncake", "copy": "shm"}
"""Their names, and the transports under which they stand."""
LOOK_S = 0.00005
"""How often Mooncake is asked whether a write has ended."""
_DONE, _PENDING = 1, 0


@dataclass(frozen=True, slots=True)
class Prepare:
    """Lay the rows of ``item`` ready where the transfer begins."""

    item: Item


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move the bytes that were prepared. Answered with the nanoseconds that it took."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Check:
    """Raise unless the bytes of ``item`` have arrived."""

    item: Item


class Baseline:
    """The processes of one baseline. See ``deployment.Deployment``."""

    def __init__(self, setup: Setup, processes: Processes) -> None:
        self.setup = setup
        bare = {"raw": _source, "copy": _copier}[setup.connector]
        self._to = None
        if setup.connector == "raw":
            self._to = processes.start(f"{setup.key} target", _target, setup)
            setup = replace(setup, scratch=self._to.receive(Up).address)
        self._from = processes.start(f"{setup.key} source", bare, setup)
        self._all = [self._from] if self._to is None else [self._from, self._to]

    def wait(self) -> None:
        """Returns when all processes are up, and holds them."""
        self._from.receive(Up)
        self._hold()

    def send(self, item: Item, *, check: bool) -> Timing:
        """The bytes of ``item`` from one end to the other; with ``check``, they are compared."""
        for peer in self._all:
            peer.go_on()
        self._from.ask(Prepare(item), type(None))
        time.sleep(TOWER_S)
        taken_ms = self._from.ask(Transfer(item.nbytes), int) / 1e6
        if check:
            (self._to or self._from).ask(Check(item), type(None))
        self._hold()
        return Timing(ready_ms=taken_ms, published_ms=taken_ms)

    def sent_share(self) -> float:
        """A baseline sends what it is given, once."""
        return 1.0

    def sweep(self) -> None:
        """Nothing is left behind: buffers end with their processes."""

    def _hold(self) -> None:
        for peer in self._all:
            peer.hold()


class _Buffer:
    """Bytes whose every page is there, and their address."""

    def __init__(self, nbytes: int, *, shared: bool = False) -> None:
        from epd_connector.memory.tensors import SlabMemory

        self.memory = SlabMemory.on_host(nbytes, shared=shared, pin=False, owner_tag="baseline")
        self.address = self.memory.address
        self.nbytes = nbytes

    def put(self, item: Item) -> None:
        self._rows(item).copy_(content(item))

    def check(self, item: Item) -> None:
        check(item, self._rows(item))

    def _rows(self, item: Item) -> "torch.Tensor":
        import torch

        return self.memory.rows(0, item.rows, WIDTH, torch.bfloat16)

    def close(self) -> None:
        self.memory.close()


class _Bare:
    """A process with one buffer. See ``processes.Side``."""

    address = ""

    def __init__(self, setup: Setup) -> None:
        self.buffer = _Buffer(setup.slab_nbytes)

    def handle(self, order: object) -> object:
        """See ``processes.Side``."""
        match order:
            case Prepare(item=item):
                self.prepare(item)
                return None
            case Transfer(nbytes=nbytes):
                begun_ns = time.monotonic_ns()
                self.transfer(nbytes)
                return time.monotonic_ns() - begun_ns
            case Check(item=item):
                self.buffer.check(item)
                return None
        raise ValueError(f"a baseline knows no {order!r}")

    def prepare(self, item: Item) -> None:
        """Outside the time."""
        self.buffer.put(item)

    def transfer(self, nbytes: int) -> None:
        """What is timed."""
        raise NotImplementedError

    def close(self) -> None:
        """See ``processes.Side``."""
        self.buffer.close()


class _Target(_Bare):
    """Where ``raw`` writes to. ``address``: its session and where its buffer begins."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._engine = _engine(self.buffer)
        self.address = f"127.0.0.1:{self._engine.get_rpc_port()}/{self.buffer.address}"


class _Source(_Bare):
    """Where ``raw`` writes from. ``setup.scratch`` is the address of its target."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._engine = _engine(self.buffer)
        self._session, _, base = setup.scratch.partition("/")
        self._base = int(base)
        # The first contact opens the connection, which is no part of a transfer.
        self.transfer(1)

    def transfer(self, nbytes: int) -> None:
        """Submits the write and asks until it has ended, which beats Mooncake's own wait."""
        write = self._engine.transfer_submit_write(
            self._session, self.buffer.address, self._base, nbytes
        )
        while (state := self._engine.transfer_check_status(write)) == _PENDING:
            time.sleep(LOOK_S)
        if state != _DONE:
            raise RuntimeError(f"Mooncake's write ended with state {state}")


class _Copier(_Bare):
    """One memory copy, from the tower's rows into shared memory."""

    def __init__(self, setup: Setup) -> None:
        self.buffer = _Buffer(setup.slab_nbytes, shared=True)

    def prepare(self, item: Item) -> None:
        """Outside the time."""
        self._rows = content(item)

    def transfer(self, nbytes: int) -> None:
        """As the C library copies."""
        ctypes.memmove(self.buffer.address, self._rows.data_ptr(), nbytes)


def _engine(buffer: _Buffer):  # type: ignore[no-untyped-def]
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    code = code or engine.register_memory(buffer.address, buffer.nbytes)
    if code != 0:
        raise RuntimeError(f"Mooncake's engine did not start: code {code}")
    return engine


def _source(setup: Setup) -> Side:
    return _Source(setup)


def _target(setup: Setup) -> Side:
    return _Target(setup)


def _copier(setup: Setup) -> Side:
    return _Copier(setup)
