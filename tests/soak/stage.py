# SPDX-License-Identifier: Apache-2.0
"""Engines that are killed, stopped and started again, and single transfers through them.

Owns the engines of one module of tests, and what is seen of a process from outside. What has to
be true of them is judged by the tests.
"""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from epd_connector.runtime.report import fetch_report, fetch_state
from epd_connector.testing.chat import ChatResult, JSONValue, Message, user_message
from epd_connector.testing.engines import (
    EngineProcess,
    EngineRole,
    connector_spec,
    encode_request,
    epd_params,
    mint_room,
    wait_until,
)
from epd_connector.testing.pictures import random_picture
from epd_connector.testing.tiny_models import ModelKind
from tests.engine.fleet import FLOAT32, Monolithics

KIND = ModelKind.QWEN3_VL
MAX_TOKENS = 16
ENGINE_CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker"
SMALL, LARGE = (160, 160), (1200, 1200)
"""Pictures of 25 rows, and of 1,369: two megabytes, more than a socket takes that nobody reads."""

BOUND_S = 120.0
"""Longer than anything here lasts that is to end at all; what ends later has not ended."""

SETTINGS: Mapping[str, JSONValue] = {
    "transport": "mooncake",
    "send_slab_bytes": "32MiB",
    "receive_slab_bytes": "32MiB",
    # Engines start beside others on two cores: one that is starved for seconds is not dead.
    "peer_timeout_s": 40.0,
    "resolve_timeout_s": 30.0,
    "receive_timeout_s": 80.0,
}


@dataclass
class Errand:
    """One item from an encode engine to a prefill engine. Nothing is sent before it is said."""

    encode: EngineProcess
    prefill: EngineProcess
    messages: Sequence[Message]
    pool: ThreadPoolExecutor
    room: str = field(default_factory=mint_room)
    _answer: Future[ChatResult] | None = None
    _encoded: Future[ChatResult] | None = None

    @property
    def params(self) -> Mapping[str, JSONValue]:
        return epd_params([(self.room, self.encode.control_address)])

    def ask(self) -> Self:
        """Send the prefill request; the encode engine knows of it when this returns."""
        opened = counter(self.prefill, "rooms_opened")
        self._answer = self.pool.submit(
            self.prefill.chat,
            self.messages,
            max_tokens=MAX_TOKENS,
            timeout_s=2 * BOUND_S,
            ec_transfer_params=self.params,
        )
        until(lambda: counter(self.prefill, "rooms_opened") > opened)
        return self

    def feed(self) -> Self:
        """Send the encode request."""
        self._encoded = self.pool.submit(encode_request, self.encode, self.messages, self.params)
        return self

    def answer(self) -> ChatResult:
        """What the prefill engine answers, in time."""
        assert self._answer is not None
        return self._answer.result(BOUND_S)

    def broken_off(self) -> bool:
        """The prefill request ends with the engine that had it, or with an error before that."""
        assert self._answer is not None
        try:
            return not self._answer.result(BOUND_S).ok
        except OSError:
            return True

    def encoded(self) -> bool:
        """Waits for the end of the encode request; whether it was answered."""
        assert self._encoded is not None
        try:
            return self._encoded.result(BOUND_S).ok
        except OSError:
            return False


class Stage:
    """The engines of one module. Used by one thread; all are ended on the way out."""

    def __init__(self, model: Path, logs: Path, monolithics: Monolithics) -> None:
        self._model = model
        self._logs = logs
        self._monolithics = monolithics
        self._engines: list[EngineProcess] = []
        self._pool = ThreadPoolExecutor(16)
        self._pictures = 0
        monolithics.prepare(KIND, FLOAT32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:
            engine.kill()
        self._pool.shutdown()

    def start(
        self,
        role: EngineRole,
        extra: Mapping[str, JSONValue] | None = None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> EngineProcess:
        """Start an engine, and do not wait for it."""
        name = f"{self._logs.name}-{role}-{len(self._engines)}"
        settings = {**SETTINGS, **(extra or {})}
        spec = connector_spec(name, self._model, role, settings, flags=(*FLOAT32, *flags), env=env)
        return self._keep(EngineProcess(spec, self._logs))

    def again(self, engine: EngineProcess) -> EngineProcess:
        """Start an engine that has ended on the same ports; returns it when it answers."""
        started = self._keep(engine.again())
        started.wait_ready()
        return started

    def _keep(self, engine: EngineProcess) -> EngineProcess:
        self._engines.append(engine)
        return engine

    def errand(
        self,
        encode: EngineProcess,
        prefill: EngineProcess,
        size: tuple[int, int] = SMALL,
    ) -> Errand:
        """A request with a picture that no engine here has seen."""
        self._pictures += 1
        picture = random_picture(*size, seed=9_000 + self._pictures)
        messages = user_message(f"Picture {self._pictures}.", [picture])
        return Errand(encode, prefill, messages, self._pool)

    def granted(
        self,
        encode: EngineProcess,
        prefill: EngineProcess,
        size: tuple[int, int] = LARGE,
    ) -> Errand:
        """An errand whose prefill request has been sent, and whose grant its encode engine has."""
        opened = counter(encode, "rooms_opened")
        errand = self.errand(encode, prefill, size).ask()
        until(lambda: counter(encode, "rooms_opened") > opened)
        return errand

    def right(self, errand: Errand) -> None:
        """The errand is answered, with the tokens of an engine that needs no other."""
        expected = self._monolithics.tokens(
            KIND, errand.messages, flags=FLOAT32, max_tokens=MAX_TOKENS
        )
        answer = errand.answer()
        assert answer.ok, (answer, reasons(errand.prefill), errand.prefill.log_tail())
        assert answer.token_ids == expected

    def works(self, encode: EngineProcess, prefill: EngineProcess) -> None:
        """The next request works, and its item is sent."""
        landed = counter(prefill, "items_landed")
        self.right(self.errand(encode, prefill).ask().feed())
        until(lambda: counter(prefill, "items_landed") == landed + 1)


def until(condition: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    """Polls until ``condition`` holds. AssertionError if it does not in ``bound_s`` seconds."""
    assert wait_until(condition, bound_s), f"not in {bound_s:.0f} s"


def counter(engine: EngineProcess, name: str) -> float:
    """One of an engine's counters, now."""
    return fetch_report(engine.control_address, 30.0).counters[name]


def settled(encode: EngineProcess) -> bool:
    """Whether every room that an encode engine has heard of has concluded."""
    counters = fetch_report(encode.control_address, 30.0).counters
    return counters["rooms_opened"] == counters["rooms_concluded"]


def in_order(engine: EngineProcess) -> bool:
    """Whether nothing has gone wrong in an engine that is its own fault."""
    return counter(engine, "errors_internal") == 0


def quarantined(prefill: EngineProcess) -> int:
    """Bytes of a prefill engine's slab that belong to writers of whom nobody knows."""
    state = fetch_state(prefill.control_address, 30.0).prefill
    assert state is not None
    return state.slab.quarantined


def reasons(engine: EngineProcess) -> list[str]:
    """Why requests of this engine failed, oldest first: in its log, since clients are not told."""
    text = engine.log_path.read_text(errors="replace")
    return re.findall(r"request \S+ fails: (.*)", text)


def failed(errand: Errand) -> str:
    """The errand ends with an error in time; the reason that the prefill engine's log gives."""
    answer = errand.answer()
    assert (answer.ok, answer.status) == (False, 500)
    [reason] = [reason for reason in reasons(errand.prefill) if errand.room in reason]
    return reason


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes do not run, as those of a host that is out of memory or being debugged."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def worker(engine: EngineProcess, rank: int = 0) -> int:
    """The process of one rank."""
    return engine.processes(WORKER)[rank]


def core(engine: EngineProcess) -> int:
    """The process of the scheduler, where the connector's head is."""
    [pid] = engine.processes(ENGINE_CORE)
    return pid


def unread(pid: int) -> int:
    """Bytes that lie in TCP connections of a process, sent to it and not read by it yet."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(entry))
    total = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            # 01: established. The queues are "sent:received", in hexadecimal.
            if words[3] == "01" and f"socket:[{words[9]}]" in sockets:
                total += int(words[4].partition(":")[2], 16)
    return total
