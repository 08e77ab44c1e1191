# SPDX-License-Identifier: Apache-2.0
"""Engines that are killed, stopped and started again, and single transfers through them.

Owns the engines of one module of tests, and what is seen of a process from outside. What has to
be true of them is judged by the tests.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Self

from epd_connector.testing.chat import GREEDY, ChatResult, JSONValue, Message, chat, user_message
from epd_connector.testing.engines import (
    EngineProcess,
    EngineRole,
    connector_spec,
    epd_params,
    mint_room,
)
from epd_connector.testing.pictures import random_picture
from epd_connector.testing.tiny_models import ModelKind
from tests.engine.fleet import FLOAT32, Monolithics
from tests.engine.trouble import BOUND_S, START_S, counter, reasons, until

KIND = ModelKind.QWEN3_VL
MAX_TOKENS = 16
SMALL, LARGE = (160, 160), (1200, 1200)
"""Pictures of 25 rows, and of 1,369: two megabytes, more than a socket takes that nobody reads."""

_THREADS = 512  # of which as many are started as requests are under way at once

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
    max_tokens: int
    pool: ThreadPoolExecutor
    room: str = field(default_factory=mint_room)
    _answer: Future[ChatResult] | None = None
    _encoded: Future[ChatResult] | None = None
    _connection: HTTPConnection | None = None

    @property
    def params(self) -> Mapping[str, JSONValue]:
        return epd_params([(self.room, self.encode.control_address)])

    def ask(self, stays: bool = True) -> Self:
        """Send the prefill request; its item is being received when this returns.

        A client that does not stay can ``leave``, and gets no answer.
        """
        opened = counter(self.prefill, "rooms_opened")
        fields: dict[str, JSONValue] = {
            "max_tokens": self.max_tokens,
            "ec_transfer_params": self.params,
        }
        if stays:
            ask = partial(chat, timeout_s=2 * BOUND_S, fields=fields)
            self._answer = self.pool.submit(ask, self.prefill.address, self.messages)
        else:
            self._connection = HTTPConnection(*self.prefill.address, timeout=BOUND_S)
            body = json.dumps({**GREEDY, "messages": self.messages, **fields})
            kind = {"Content-Type": "application/json"}
            self._connection.request("POST", "/v1/chat/completions", body, kind)
        until(lambda: counter(self.prefill, "rooms_opened") > opened)
        return self

    def feed(self, leaves_s: float = 2 * BOUND_S) -> Self:
        """Send the encode request. The client closes its connection after ``leaves_s``."""
        self._encoded = self.pool.submit(
            self.encode.chat,
            self.messages,
            max_tokens=1,
            timeout_s=leaves_s,
            ec_transfer_params=self.params,
        )
        return self

    def leave(self) -> None:
        """A client that does not stay closes its connection to the prefill engine. Idempotent."""
        if self._connection is not None:
            self._connection.close()

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
        self._errands: list[Errand] = []
        self._pool = ThreadPoolExecutor(_THREADS)
        self._pictures = 0
        monolithics.prepare(KIND, FLOAT32)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for errand in self._errands:
            errand.leave()
        for engine in self._engines:
            engine.kill()
        self._pool.shutdown()

    def start(
        self,
        role: EngineRole,
        extra: Mapping[str, JSONValue] | None = None,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        launcher: Sequence[str] = (),
    ) -> EngineProcess:
        """Start an engine, and do not wait for it. See ``connector_spec``."""
        name = f"{self._logs.name}-{role}-{len(self._engines)}"
        settings = {**SETTINGS, **(extra or {})}
        spec = connector_spec(
            *(name, self._model, role, settings),
            flags=(*FLOAT32, *flags),
            env=env,
            host=host,
            launcher=launcher,
        )
        return self._keep(EngineProcess(spec, self._logs))

    def again(self, engine: EngineProcess) -> EngineProcess:
        """Start an engine that has ended on the same ports; returns it when it answers."""
        started = self._keep(engine.again())
        self.ready(started)
        return started

    def ready(self, *engines: EngineProcess) -> None:
        """Waits until all of them answer."""
        for engine in engines:
            engine.wait_ready(START_S)

    def _keep(self, engine: EngineProcess) -> EngineProcess:
        self._engines.append(engine)
        return engine

    def errand(
        self,
        encode: EngineProcess,
        prefill: EngineProcess,
        size: tuple[int, int] = SMALL,
        max_tokens: int = MAX_TOKENS,
    ) -> Errand:
        """A request with a picture that no engine here has seen."""
        self._pictures += 1
        picture = random_picture(*size, seed=9_000 + self._pictures)
        messages = user_message(f"Picture {self._pictures}.", [picture])
        errand = Errand(encode, prefill, messages, max_tokens, self._pool)
        self._errands.append(errand)
        return errand

    def granted(
        self,
        encode: EngineProcess,
        prefill: EngineProcess,
        size: tuple[int, int] = LARGE,
        stays: bool = True,
    ) -> Errand:
        """An errand whose prefill request has been sent, and whose grant its encode engine has."""
        opened = counter(encode, "rooms_opened")
        errand = self.errand(encode, prefill, size).ask(stays)
        until(lambda: counter(encode, "rooms_opened") > opened)
        return errand

    def right(self, errand: Errand) -> None:
        """The errand is answered, with the tokens of an engine that needs no other."""
        expected = self._monolithics.tokens(
            KIND, errand.messages, flags=FLOAT32, max_tokens=errand.max_tokens
        )
        answer = errand.answer()
        assert answer.ok, (answer, reasons(errand.prefill), errand.prefill.log_tail())
        assert answer.token_ids == expected

    def works(self, encode: EngineProcess, prefill: EngineProcess) -> None:
        """The next request works, and its item is sent."""
        landed = counter(prefill, "items_landed")
        self.right(self.errand(encode, prefill).ask().feed())
        until(lambda: counter(prefill, "items_landed") == landed + 1)


def failed(errand: Errand) -> str:
    """The errand ends with an error in time; the reason that the prefill engine's log gives."""
    answer = errand.answer()
    assert (answer.ok, answer.status) == (False, 500)
    [reason] = [reason for reason in reasons(errand.prefill) if errand.room in reason]
    return reason
