# SPDX-License-Identifier: Apache-2.0
"""Host engines as child processes, and the pair of requests a router would send to them.

Owns start, readiness, logs and the end of an engine, on a machine without a GPU. It knows the host
by its server's command line only and imports none of it. Does not judge answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from epd_connector.testing import chat as http
from epd_connector.testing.chat import ChatResult, JSONValue, Message
from epd_connector.testing.ports import Ports
from epd_connector.testing.processes import group_members, title_of

SERVER = "vllm.entrypoints.openai.api_server"
BASE_FLAGS = (
    "--enforce-eager",
    "--dtype=bfloat16",
    "--max-model-len=4096",
    "--max-num-seqs=8",
    f"--kv-cache-memory-bytes={256 << 20}",
    "--disable-uvicorn-access-log",
    "--enable-prompt-tokens-details",
)
GRACEFUL = ("--shutdown-timeout=15",)
"""Lets the host's workers close what they hold, in about 8 s; by default its server kills them."""

BASE_ENV: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_MEDIA_LOADING_THREAD_COUNT": "1",
    # The host measures towers one modality after the other, in the order of a set, on every rank
    # by itself: with hashes of their own, ranks disagree about the order and break each other's
    # collectives.
    "PYTHONHASHSEED": "0",
}
V2_RUNNER_ENV: Mapping[str, str] = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Puts one consumer on the host's second model runner, whose kernels are then interpreted."""
ONE_THREAD: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}
"""For engines of several ranks, which spin while they wait for each other: with more threads than
cores they keep each other, and the connector's threads, from running for seconds."""

CONNECTOR = "EPDConnector"
MAX_RANKS = 16  # of one engine: so many ports are kept for them
# Written by the hundred when a process ends.
_LOG_NOISE = (" - leaked ", " - ... skipped", "nanobind:", "See https://nanobind")
_POLL_S = 0.2
_TERM_S = 20.0
_KILL_S = 10.0
_IN_HAND_S = 30.0

EngineRole = Literal["ec_producer", "ec_consumer", "ec_both"]
Order = Literal["both", "encode_first", "prefill_first"]


class EngineError(RuntimeError):
    """An engine did not start or did not stop; the message ends with the tail of its log."""


@dataclass(frozen=True)
class EngineSpec:
    """How to start one engine."""

    name: str
    """Names the log file and the engine in messages."""
    model: Path
    ec_transfer: Mapping[str, JSONValue] | None = None
    """Value of --ec-transfer-config; None for an engine on its own."""
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    control_address: str = ""
    """host:port of the connector's head; empty for an engine on its own."""
    ports: Ports | None = None
    """Keeps the control ports for this engine."""
    host: str = "127.0.0.1"
    """Address on which its HTTP server listens, and which stands for its control host."""
    launcher: Sequence[str] = ()
    """A command that becomes the server, given its command line: `ip netns exec NAME`."""


def connector_spec(
    name: str,
    model: Path,
    role: EngineRole,
    extra: Mapping[str, JSONValue] | None = None,
    *,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    launcher: Sequence[str] = (),
) -> EngineSpec:
    """A spec of an engine that uses the connector, on free control ports of this machine.

    `extra` is put over the control address in `ec_connector_extra_config`.
    """
    ports = Ports(1 + MAX_RANKS)
    settings: dict[str, JSONValue] = {
        "control_host": host,
        "control_port": ports.first,
        **(extra or {}),
    }
    transfer: dict[str, JSONValue] = {
        "ec_connector": CONNECTOR,
        "ec_role": role,
        "ec_connector_extra_config": settings,
    }
    address = f"{settings['control_host']}:{settings['control_port']}"
    return EngineSpec(
        *(name, model, transfer, tuple(flags), dict(env or {}), address, ports),
        host=host,
        launcher=tuple(launcher),
    )


class EngineProcess:
    """One running engine: starts at once, is ready later, and leaves nothing behind.

    Calls may come from any thread, except `stop`, which belongs to the one that started it.
    """

    def __init__(
        self, spec: EngineSpec, log_directory: Path, server_ports: Ports | None = None
    ) -> None:
        """`server_ports`: where its HTTP server listens; by default any free port."""
        self.spec = spec
        self.name = spec.name
        self.control_address = spec.control_address
        self._ports = server_ports or Ports(1)
        self.address = (spec.host, self._ports.first)
        self.log_path = log_directory / f"{spec.name}.log"
        self._started = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **BASE_ENV, **spec.env},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        """Whether the server process still runs."""
        return self._process.poll() is None

    def is_ready(self) -> bool:
        """Whether the server answers. Raises EngineError if it died."""
        if not self.alive():
            code = self._process.returncode
            raise EngineError(f"engine {self.name} ended with code {code}\n{self.log_tail()}")
        try:
            return http.get(self.address, "/health", timeout_s=5.0)[0] == 200
        except OSError:
            return False

    def wait_ready(self, timeout_s: float = 180.0) -> float:
        """Wait until the server answers; returns seconds since the start of the process.

        Raises EngineError with the tail of the log if it died or is not up in `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"engine {self.name} is not up after {timeout_s:.0f} s\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)
        return time.monotonic() - self._started

    def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: bool = False,
        timeout_s: float = 120.0,
        **fields: JSONValue,
    ) -> ChatResult:
        """One chat completion, greedy unless `fields` says otherwise; see `testing.chat.chat`."""
        return http.chat(self.address, messages, stream=stream, timeout_s=timeout_s, fields=fields)

    def metrics(self) -> dict[str, float]:
        """The engine's Prometheus values by name, summed over labels."""
        return http.parse_metrics(http.get(self.address, "/metrics")[1])

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of the engine's log, without what a library says of its own leaks."""
        text = self.log_path.read_text(errors="replace").splitlines()
        told = [line for line in text if not line.startswith(_LOG_NOISE)]
        return "\n".join(told[-lines:])

    def stop(self) -> None:
        """End the engine and every process it started; idempotent.

        SIGTERM to the server first, which ends the others in order; SIGKILL to what is left of
        its process group. Raises EngineError if even that leaves a process.
        """
        try:
            self.terminate()
            # Until all are gone, not the server alone: those that outlive it for a moment give
            # back shared memory, which a SIGKILL now would leave behind.
            wait_until(lambda: not group_members(self.pid), _TERM_S)
        finally:
            # Also when the wait is interrupted: an impatient Ctrl-C must not orphan the engine.
            self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of the engine at once, stopped ones too; returns when all are
        gone. Raises EngineError if one stays."""
        self._signal_group(signal.SIGKILL)
        if not wait_until(lambda: not group_members(self.pid), _KILL_S):
            raise EngineError(f"engine {self.name} left processes {group_members(self.pid)}")
        self._process.wait()

    def again(self) -> EngineProcess:
        """Start the same engine once more, on the same ports; this one must have ended."""
        spec = dataclasses.replace(self.spec, name=f"{self.name}-again")
        return EngineProcess(spec, self.log_path.parent, self._ports)

    def processes(self, title: str) -> list[int]:
        """Ids of the engine's processes whose titles begin with `title`, in order."""
        return [pid for pid in sorted(group_members(self.pid)) if title_of(pid).startswith(title)]

    def terminate(self) -> None:
        """Ask the engine to end, and do not wait; `stop` is needed all the same."""
        if self.alive():
            self._process.terminate()
        else:
            self._signal_group(signal.SIGTERM)

    def _signal_group(self, number: signal.Signals) -> None:
        # The server's id names the group even after the server itself was reaped, but only while
        # a member lives: an empty group's id may be anyone's.
        if group_members(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def _command(self) -> list[str]:
        command = [*self.spec.launcher, sys.executable, "-m", SERVER, f"--model={self.spec.model}"]
        command += [f"--host={self.address[0]}", f"--port={self.address[1]}", *BASE_FLAGS]
        if self.spec.ec_transfer is not None:
            command += ["--ec-transfer-config", json.dumps(self.spec.ec_transfer)]
        return [*command, *self.spec.flags]


@contextlib.contextmanager
def running(
    specs: Sequence[EngineSpec],
    log_directory: Path,
    *,
    timeout_s: float = 300.0,
    progress: Callable[[Mapping[str, bool], float], None] | None = None,
) -> Iterator[list[EngineProcess]]:
    """Start engines side by side, yield them when all answer, and stop all on the way out.

    `progress` is called about twice a second with what is up, by name, and the seconds elapsed.
    """
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(EngineProcess(spec, log_directory)) for spec in specs]
        # First on the way out: they then end side by side.
        for engine in engines:
            stack.callback(engine.terminate)
        started = time.monotonic()
        up = dict.fromkeys((engine.name for engine in engines), False)
        while not all(up.values()):
            elapsed = time.monotonic() - started
            up = {engine.name: up[engine.name] or engine.is_ready() for engine in engines}
            if progress is not None:
                progress(up, elapsed)
            if elapsed > timeout_s:
                late = next(engine for engine in engines if not up[engine.name])
                late.wait_ready(0.0)
            time.sleep(0.0 if all(up.values()) else 0.5)
        yield engines


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll `condition` until it holds or `timeout_s` has passed; returns its last value."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S / 4)
    return True


def mint_room() -> str:
    """A new room id: 63 random bits as 16 hex digits."""
    return f"{secrets.randbits(63):016x}"


def epd_params(entries: Sequence[tuple[str, str] | None]) -> dict[str, JSONValue]:
    """`ec_transfer_params`: (room, encode address) per item, None for one not transferred."""
    return {"epd": [e if e is None else {"room": e[0], "encode": e[1]} for e in entries]}


@dataclass(frozen=True)
class PairResult:
    """What the requests of one transfer came to."""

    encodes: tuple[ChatResult, ...]
    prefill: ChatResult
    rooms: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.prefill.ok and all(encode.ok for encode in self.encodes)


def encode_request(
    encode: EngineProcess, messages: Sequence[Message], params: Mapping[str, JSONValue]
) -> ChatResult:
    """Send what a router sends to the encode engine: the media, one token, the rooms."""
    return encode.chat(messages, max_tokens=1, ec_transfer_params=params)


def run_pair(
    encode: EngineProcess,
    prefill: EngineProcess,
    messages: Sequence[Message],
    *,
    order: Order = "both",
    per_item: bool = False,
    stream: bool = False,
    fields: Mapping[str, JSONValue] | None = None,
) -> PairResult:
    """Mint a room per item, send to both engines in `order`, and wait for both.

    The encode engine gets all of `messages` in one request or, with `per_item`, one request per
    item. `fields` go to the prefill engine only. With "prefill_first" the encode requests leave
    when the prefill engine reports a request in hand.
    """
    parts = http.item_parts(messages)
    entries = [(mint_room(), encode.control_address) for _ in parts]
    params = epd_params(entries)
    jobs: list[tuple[Sequence[Message], Mapping[str, JSONValue]]] = [(messages, params)]
    if per_item:
        jobs = [
            ([{"role": "user", "content": [part]}], epd_params([entry]))
            for part, entry in zip(parts, entries, strict=True)
        ]
    asked = {**(fields or {}), "ec_transfer_params": params}
    with ThreadPoolExecutor(max_workers=1 + len(jobs)) as pool:

        def start_prefill() -> Future[ChatResult]:
            return pool.submit(http.chat, prefill.address, messages, stream=stream, fields=asked)

        def start_encodes() -> list[Future[ChatResult]]:
            return [pool.submit(encode_request, encode, *job) for job in jobs]

        if order == "encode_first":
            encodes = start_encodes()
            wait(encodes)
            answer = start_prefill()
        else:
            answer = start_prefill()
            if order == "prefill_first":
                wait_until(lambda: answer.done() or in_hand(prefill) > 0, _IN_HAND_S)
            encodes = start_encodes()
        rooms = tuple(room for room, _address in entries)
        return PairResult(tuple(e.result() for e in encodes), answer.result(), rooms)


def in_hand(engine: EngineProcess) -> int:
    """Requests that the engine's scheduler holds, waiting or running."""
    values = engine.metrics()
    waiting = values.get("vllm:num_requests_waiting", 0.0)
    return int(waiting + values.get("vllm:num_requests_running", 0.0))
