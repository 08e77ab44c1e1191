# SPDX-License-Identifier: Apache-2.0
"""Writes through Mooncake's transfer engine: RDMA or TCP, between hosts or on one.

Owns the engine of this process, what it needs from the environment, and the meaning of its
return codes. Does not own memory. The only module that names mooncake.

A status of -1 must mean that nothing can land any more, and TCP's own time-outs break that: the
library gives up on a stalled peer after 30 s, yet what the kernel has buffered lands when that
peer goes on. They are therefore raised out of reach; a stalled write stays pending until its
connection breaks, and -2 ("timed out", the write goes on, its id stays valid) is pending too.
"""

import logging
import os
import re
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

from epd_connector.errors import TransportError
from epd_connector.transport.base import (
    Completion,
    SlabBuffer,
    Span,
    TransportOptions,
    span_error,
)
from epd_connector.transport.contacts import Contacts
from epd_connector.transport.ledger import WriteLedger
from epd_connector.transport.pace import Pace
from epd_connector.transport.workers import Job, Workers

_log = logging.getLogger(__name__)

_LIBRARY = "mooncake.engine"
_TARGET = r"(?:[A-Za-z0-9_.-]{1,253}|\[[0-9A-Fa-f:.%]{2,60}\]):\d{1,5}"
_SESSION = re.compile(
    rf"(?P<target>{_TARGET})/(?P<base>[0-9a-f]{{1,16}})/(?P<nbytes>[1-9]\d{{0,17}})"
)
_DONE, _FAILED = 1, -1
_REFUSED = frozenset({0, -1, 2**64 - 1})
_NEVER_S = "1000000"
_TCP_GIVE_UP = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
_RDMA_DEVICES = Path("/sys/class/infiniband")
# Each thread serves one peer at a time, so this many silent peers delay nobody else.
_SUBMIT_THREADS = 64
_MAX_BACKLOG = 65536
_CLOSE_WAIT_S = 2.0
# A thread asks after its write for so long, at first so often, and then ever more rarely: asking
# takes time from the transfer, where there are few cores.
_ATTEND_S = 0.1
_ASK_S = 0.00005
_ASK_SHARE = 0.02
_POLL_S = 0.001
_DEBIAN_PACKAGES = "libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4"


class Engine(Protocol):
    """What is used of mooncake's `TransferEngine`."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int: ...
    def get_rpc_port(self) -> int: ...
    def register_memory(self, address: int, nbytes: int, /) -> int: ...
    def unregister_memory(self, address: int, /) -> int: ...
    def send_probe(self, target: str, /) -> int: ...
    def transfer_submit_write(
        self, target: str, source: int, destination: int, nbytes: int, /
    ) -> int: ...
    def transfer_check_status(self, transfer: int, /) -> int: ...


@dataclass(slots=True)
class _Write:
    """A write that the engine has: `transfers` are its ids that are not terminal yet.

    `source` is here so that its memory outlives them.
    """

    handle: int
    target: str
    source: SlabBuffer
    transfers: list[int]
    failure: str | None


class MooncakeTransport:
    """One engine per process. Submission runs on threads, since the first contact with a peer
    blocks until it answers. The library says of no write that it has ended, so the thread that
    submitted it asks for a while; `poll` asks about those that take longer."""

    name = "mooncake"

    def __init__(self, options: TransportOptions) -> None:
        """Raises TransportError where the package is missing or its engine does not start."""
        _check_protocol(options)
        _prepare_environment(options)
        reason = self.probe()
        if reason is not None:
            raise TransportError(reason)
        self._host = f"[{options.host}]" if ":" in options.host else options.host
        family = "ipv6" if "MC_USE_IPV6" in os.environ else "ipv4"
        self._advert = f"mooncake/{options.protocol}/{family}"
        # Over TCP its sockets read any memory; RDMA reads what was registered. Registering rows
        # for each write is no way: whatever is registered can be written to by peers.
        self.reads_anywhere = options.protocol == "tcp"
        self._engine: Engine | None = _start_engine(self._host, options)
        self._engine_alive = weakref.ref(self._engine)
        self._source: SlabBuffer | None = None
        self._destination: SlabBuffer | None = None
        self._ledger = WriteLedger()
        self._wake: Callable[[], None] = lambda: None
        self._pace = Pace(longest_s=_ATTEND_S)
        self._lanes = options.write_threads
        self._contacts = Contacts()
        self._workers = Workers("epd-mooncake", threads=_SUBMIT_THREADS, backlog=_MAX_BACKLOG)
        self._submitted: deque[_Write] = deque()
        self._running: list[_Write] = []
        self._closed = False

    @classmethod
    def probe(cls) -> str | None:
        """None where Mooncake can be used in this process, else the reason and the remedy."""
        if os.environ.get("MC_TCP_PROTO") == "1":
            return (
                "MC_TCP_PROTO=1 makes Mooncake report writes as done before they have landed; "
                "unset it"
            )
        try:
            engine_class = _load_library().TransferEngine
        except ModuleNotFoundError:
            return (
                "the package mooncake is not installed; install epd-connector[mooncake] "
                "(hosts with GPUs) or epd-connector[mooncake-cpu]"
            )
        except ImportError as error:
            return (
                f"mooncake cannot be loaded: {error}; install the Debian packages "
                f"{_DEBIAN_PACKAGES}, and on a host without GPUs epd-connector[mooncake-cpu]"
            )
        if not hasattr(engine_class, "transfer_submit_write"):
            return "this mooncake lacks transfer_submit_write; install version 0.3.13 or later"
        return None

    def register_source(self, buffer: SlabBuffer) -> None:
        if self._source is not None:
            raise TransportError("mooncake: a source slab is registered already")
        self._register(buffer, "send_slab_bytes")
        self._source = buffer

    def register_destination(self, buffer: SlabBuffer) -> str:
        if self._destination is not None:
            raise TransportError("mooncake: a destination slab is registered already")
        engine = self._register(buffer, "receive_slab_bytes")
        self._destination = buffer
        return f"{self._host}:{engine.get_rpc_port()}/{buffer.address:x}/{buffer.nbytes}"

    def advert(self) -> str:
        return self._advert

    def reaches(self, advert: str) -> bool:
        return advert == self._advert

    @property
    def poll_interval_s(self) -> float | None:
        """See `Transport`: only writes that take long are asked about by `poll`."""
        return _POLL_S if self._submitted or self._running else None

    def write(self, session: str, spans: Sequence[Span], source: SlabBuffer | None = None) -> int:
        handle = self._ledger.open(sum(span.nbytes for span in spans))
        wanted = [span for span in spans if span.nbytes]
        failure = self._start(handle, session, wanted, source or self._source)
        if failure is not None:
            self._ledger.finish(handle, f"mooncake: {failure}")
        return handle

    def poll(self) -> list[Completion]:
        self._check_running()
        return self._ledger.drain()

    def in_flight(self) -> int:
        return self._ledger.in_flight()

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._ledger.set_waker(wake)

    def forget(self, session: str) -> None:
        # The engine keeps its own connections and mends them; what it lacks is the probe.
        match = _SESSION.fullmatch(session)
        if match is not None:
            self._contacts.forget(match["target"])

    def fence_s(self) -> float:
        # A dead writer's kernel still delivers what it had buffered. Over loopback that took
        # 54 ms for 2 MB; this leaves room for a slow network and a busy receiver.
        return 5.0

    def bytes_written(self) -> int:
        return self._ledger.bytes_written()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + _CLOSE_WAIT_S
        self._workers.close(_CLOSE_WAIT_S)
        self._check_running()
        while self._ledger.pending() and time.monotonic() < deadline:
            time.sleep(0.001)
            self._check_running()
        engine, self._engine = self._engine, None
        assert engine is not None
        for buffer in (self._source, self._destination):
            if buffer is not None:
                engine.unregister_memory(buffer.address)
        # The end of this function drops the last reference, which ends the engine's threads and
        # with them every transfer, unless a submission still waits for its peer.

    def quiet(self) -> bool:
        return self._closed and (not self._ledger.pending() or self._engine_alive() is None)

    def _register(self, buffer: SlabBuffer, key: str) -> Engine:
        if self._engine is None:
            raise TransportError("mooncake: the transport was closed")
        code = self._engine.register_memory(buffer.address, buffer.nbytes)
        if code != 0:
            raise TransportError(
                f"mooncake: registering {buffer.nbytes} bytes at {buffer.address:#x} failed with "
                f"code {code}; lower {key}, raise the limit of locked memory (ulimit -l) where "
                "mooncake_protocol is rdma, and register each slab once"
            )
        return self._engine

    def _start(
        self, handle: int, session: str, spans: list[Span], source: SlabBuffer | None
    ) -> str | None:
        """Queue the submission, or say why not."""
        if source is None:
            return "no source slab is registered"
        match = _SESSION.fullmatch(session)
        if match is None:
            return f"{session[:200]!r} is not a session of this transport"
        outside = span_error(
            spans, source_nbytes=source.nbytes, destination_nbytes=int(match["nbytes"])
        )
        if outside is not None:
            return outside
        if not spans:
            self._ledger.finish(handle)
            return None
        target, base = match["target"], int(match["base"], 16)
        job = Job(
            run=partial(self._submit, handle, target, base, spans, source, time.monotonic()),
            abandon=partial(self._ledger.finish, handle, "mooncake: the transport was closed"),
        )
        # Those to a peer that has answered go side by side, as many as the engine has threads for.
        lane = handle % self._lanes if self._contacts.known(target) else 0
        if not self._workers.submit((target, lane), job):
            return f"closed, or {_MAX_BACKLOG} writes are waiting already"
        return None

    def _submit(
        self,
        handle: int,
        target: str,
        base: int,
        spans: list[Span],
        source: SlabBuffer,
        queued_at: float,
    ) -> None:
        """On a thread of the pool: hand each span to the engine."""
        engine = self._engine
        if engine is None or not self._contacts.reach(engine, target, queued_at):
            self._ledger.finish(handle, f"mooncake: the peer {target} does not answer")
            return
        write = _Write(handle, target, source, [], None)
        for span in spans:
            # What was submitted before a refusal goes on, and the write with it.
            transfer = 0
            if not self._closed:
                transfer = engine.transfer_submit_write(
                    target, source.address + span.source, base + span.destination, span.nbytes
                )
            if transfer in _REFUSED:
                write.failure = f"mooncake: the engine refused a write to {target}"
                break
            write.transfers.append(transfer)
        self._attend(engine, write, sum(span.nbytes for span in spans))

    def _attend(self, engine: Engine, write: _Write, nbytes: int) -> None:
        """Asks about a new write until it has ended; hands it to `poll` where that takes long."""
        begun = time.monotonic()
        pause = self._pace.sure_s(nbytes)
        asked = 0
        while not self._closed:
            time.sleep(pause or _ASK_S)
            self._check(engine, write)
            asked += 1
            taken = time.monotonic() - begun
            if not write.transfers:
                self._pace.note(nbytes, taken, asked)
                return
            if taken > _ATTEND_S:
                break
            pause = max(_ASK_S, taken * _ASK_SHARE)
        self._submitted.append(write)
        self._wake()

    def _check_running(self) -> None:
        """Ask the engine about every write it has; end those of which no part goes on."""
        while self._submitted:
            self._running.append(self._submitted.popleft())
        if self._engine is not None:
            for write in self._running:
                self._check(self._engine, write)
            self._running = [write for write in self._running if write.transfers]

    def _check(self, engine: Engine, write: _Write) -> None:
        going_on = []
        for transfer in write.transfers:
            status = engine.transfer_check_status(transfer)
            if status == _FAILED:
                write.failure = f"mooncake: a write to {write.target} failed on its way"
            elif status != _DONE:
                going_on.append(transfer)
        # A terminal id is freed by the library: asking for it again would read freed memory.
        write.transfers = going_on
        if not going_on:
            if write.failure is not None:
                self._contacts.forget(write.target)
            self._ledger.finish(write.handle, write.failure)


def _check_protocol(options: TransportOptions) -> None:
    """Mooncake falls back to TCP without a word where it finds no RDMA device: refuse that."""
    if options.protocol == "tcp":
        return
    if options.protocol != "rdma":
        raise TransportError(f"mooncake_protocol: {options.protocol!r} is neither tcp nor rdma")
    if "MC_FORCE_TCP" in os.environ:
        raise TransportError("mooncake_protocol is rdma, but MC_FORCE_TCP is set: unset one")
    present = {path.name for path in _RDMA_DEVICES.glob("*")}
    wanted = {name.strip() for name in options.device_name.split(",")} - {""}
    if not present or not wanted <= present:
        raise TransportError(
            f"mooncake_protocol is rdma: mooncake_device names {sorted(wanted) or 'any device'}, "
            f"{_RDMA_DEVICES} has {sorted(present) or 'none'}; name a device that is there, or "
            "set mooncake_protocol to tcp"
        )


def _prepare_environment(options: TransportOptions) -> None:
    if ":" in options.host and "MC_USE_IPV6" not in os.environ:
        # A mode of the whole process, IPv4 or IPv6, read when the library is loaded.
        if _LIBRARY in sys.modules:
            raise TransportError(
                f"mooncake was loaded for IPv4, but control_host {options.host} is IPv6; set "
                "MC_USE_IPV6=1 in the environment of every engine"
            )
        os.environ["MC_USE_IPV6"] = "1"
    if options.protocol != "tcp":
        return
    os.environ.setdefault("MC_FORCE_TCP", "1")
    for name in _TCP_GIVE_UP:
        if os.environ.get(name, _NEVER_S) != _NEVER_S:
            _log.warning("%s=%s is ignored: it would corrupt data", name, os.environ[name])
        os.environ[name] = _NEVER_S


def _load_library() -> ModuleType:
    # Read when the library is loaded; without it every engine start logs a dozen lines.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    return import_module(_LIBRARY)


def _start_engine(host: str, options: TransportOptions) -> Engine:
    engine: Engine = _load_library().TransferEngine()
    code = engine.initialize(host, "P2PHANDSHAKE", options.protocol, options.device_name)
    if code != 0:
        raise TransportError(
            f"mooncake: the engine did not start on {host} over {options.protocol} (code {code}); "
            "check control_host, mooncake_protocol and mooncake_device"
        )
    return engine
