# SPDX-License-Identifier: Apache-2.0
"""The engines of a test session: one that answers alone, and pairs joined by the connector.

Owns how many live at once and that each is started once. Fixtures are in `conftest.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from epd_connector.protocol.frames import Report
from epd_connector.runtime.report import fetch_report
from epd_connector.testing.chat import ChatResult, JSONValue, Message, chat
from epd_connector.testing.engines import (
    EngineProcess,
    EngineSpec,
    Order,
    PairResult,
    connector_spec,
    run_pair,
    running,
    wait_until,
)
from epd_connector.testing.tiny_models import ModelKind

# Of the engine that others are compared with: each request is computed from its beginning, so
# what it answers does not depend on what was asked before.
REFERENCE_FLAGS = ("--no-enable-prefix-caching",)
SMALL_SLABS: Mapping[str, JSONValue] = {
    "send_slab_bytes": "32MiB",
    "receive_slab_bytes": "32MiB",
    # Four engines start and run on two cores here: one that is starved for seconds is not dead.
    "peer_timeout_s": 30.0,
    "resolve_timeout_s": 30.0,
}

FLOAT32 = ("--dtype=float32",)
"""For requests that run side by side: how they are batched changes the last bits of a sum, which
bfloat16 now and then turns into another token; float32 does not. Use it on all engines compared."""


class Monolithics:
    """Engines without a connector, started at first use; at most `limit` live at once."""

    def __init__(self, models: Mapping[ModelKind, Path], logs: Path, limit: int = 2) -> None:
        self._models = models
        self._logs = logs
        self._limit = limit
        self._live: OrderedDict[tuple[ModelKind, tuple[str, ...]], EngineProcess] = OrderedDict()
        self._answers: dict[str, ChatResult] = {}
        self._started = 0

    def prepare(self, kind: ModelKind, flags: Sequence[str] = ()) -> EngineProcess:
        """Start the engine of this kind and flags unless it lives, and do not wait for it."""
        key = (kind, tuple(flags))
        if key not in self._live:
            while len(self._live) >= self._limit:
                self._live.popitem(last=False)[1].stop()
            self._started += 1
            name = f"monolithic-{kind}-{self._started}"
            spec = EngineSpec(name, self._models[kind], flags=(*REFERENCE_FLAGS, *flags))
            self._live[key] = EngineProcess(spec, self._logs)
        self._live.move_to_end(key)
        return self._live[key]

    def engine(self, kind: ModelKind, flags: Sequence[str] = ()) -> EngineProcess:
        """The engine of this kind and flags, ready."""
        engine = self.prepare(kind, flags)
        engine.wait_ready()
        return engine

    def answer(
        self,
        kind: ModelKind,
        messages: Sequence[Message],
        *,
        flags: Sequence[str] = (),
        **fields: JSONValue,
    ) -> ChatResult:
        """The reference answer; asked once a session, then remembered."""
        question = json.dumps([kind, list(flags), list(messages), fields], sort_keys=True)
        if question not in self._answers:
            engine = self.engine(kind, flags)
            result = chat(engine.address, messages, fields=_fields(fields))
            assert result.ok, result
            self._answers[question] = result
        return self._answers[question]

    def tokens(
        self,
        kind: ModelKind,
        messages: Sequence[Message],
        *,
        flags: Sequence[str] = (),
        **fields: JSONValue,
    ) -> tuple[int, ...]:
        """Token ids of the reference answer."""
        return self.answer(kind, messages, flags=flags, **fields).token_ids

    def stop(self) -> None:
        """Stop every engine that lives."""
        while self._live:
            self._live.popitem()[1].stop()


@dataclass(frozen=True)
class PairOptions:
    """How to start an encode and a prefill engine that belong together."""

    kind: ModelKind = ModelKind.QWEN3_VL
    transport: str = "shm"
    extra: Mapping[str, JSONValue] = field(default_factory=dict)
    """Over the defaults in `ec_connector_extra_config` of both."""
    encode_extra: Mapping[str, JSONValue] = field(default_factory=dict)
    prefill_extra: Mapping[str, JSONValue] = field(default_factory=dict)
    flags: Sequence[str] = ()
    """Of both engines, and of the monolithic one they are compared with."""
    prefill_flags: Sequence[str] = ()
    prefill_env: Mapping[str, str] = field(default_factory=dict)
    encode_model: Path | None = None
    """Another model for the encode engine than the one of `kind`."""


@dataclass(frozen=True)
class Pair:
    """A running encode and prefill engine."""

    options: PairOptions
    encode: EngineProcess
    prefill: EngineProcess

    def send(
        self,
        messages: Sequence[Message],
        *,
        order: Order = "both",
        per_item: bool = False,
        **fields: JSONValue,
    ) -> PairResult:
        """Send one request through the pair, as a router would; see `run_pair`."""
        return run_pair(
            self.encode,
            self.prefill,
            messages,
            order=order,
            per_item=per_item,
            fields=_fields(fields),
        )

    def encode_report(self) -> Report:
        """The encode engine's counters now."""
        return fetch_report(self.encode.control_address, 5.0)

    def prefill_report(self) -> Report:
        """The prefill engine's counters now."""
        return fetch_report(self.prefill.control_address, 5.0)

    def published(self) -> int:
        """Items that the prefill engine has published since it started."""
        return int(self.prefill_report().counters.get("items_published", 0))

    def wait_for(self, engine: EngineProcess, counter: str, value: float) -> bool:
        """Wait, bounded, until a counter of one engine has reached `value`."""

        def reached() -> bool:
            report = fetch_report(engine.control_address, 5.0)
            return report.counters.get(counter, 0) >= value

        return wait_until(reached, 20.0)


class Pairs:
    """Starts pairs; each lives as long as its context."""

    def __init__(
        self, models: Mapping[ModelKind, Path], logs: Path, monolithics: Monolithics
    ) -> None:
        self._models = models
        self._logs = logs
        self._monolithics = monolithics
        self._started = 0

    @contextlib.contextmanager
    def start(self, options: PairOptions) -> Iterator[Pair]:
        """Start both engines, and the monolithic one beside them, and stop the two at the end."""
        self._monolithics.prepare(options.kind, options.flags)
        with running(self._specs(options), self._logs) as (encode, prefill):
            yield Pair(options, encode, prefill)

    def _specs(self, options: PairOptions) -> list[EngineSpec]:
        self._started += 1
        model = self._models[options.kind]
        extra = {"transport": options.transport, **SMALL_SLABS, **options.extra}
        return [
            connector_spec(
                f"encode-{self._started}",
                options.encode_model or model,
                "ec_producer",
                {**extra, **options.encode_extra},
                flags=options.flags,
            ),
            connector_spec(
                f"prefill-{self._started}",
                model,
                "ec_consumer",
                {**extra, **options.prefill_extra},
                flags=(*options.flags, *options.prefill_flags),
                env=options.prefill_env,
            ),
        ]


def _fields(fields: Mapping[str, JSONValue]) -> dict[str, JSONValue]:
    """Short answers unless a test asks for more: sharp enough, and quick."""
    return {"max_tokens": 16, **fields}
