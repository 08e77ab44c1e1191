# SPDX-License-Identifier: Apache-2.0
"""Section `engines`: real engines with a tiny model, alone and in pairs, asked about pictures.

Three ways to the same answer: one engine that does everything (`monolithic`), an encode and a
prefill engine with this connector (`epd`), and such a pair with the host's own connector over
Mooncake (`in-tree`; left out of a quick run). An idle engine with the host's connector does
not take part in its own transfers, so its prefill engine is kept busy by requests that only
generate. Engines whose turn it is not are held. Measured are the time to the first token, from
sending, and requests per second.
"""

import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_hex

from benchmarks.figures import median
from benchmarks.results import Goal, Measured, Series, excess
from epd_connector.memory.segment import sweep_stale_segments
from epd_connector.runtime.report import fetch_report
from epd_connector.testing.chat import ChatResult, JSONValue, user_message
from epd_connector.testing.engines import (
    EngineProcess,
    EngineSpec,
    connector_spec,
    encode_request,
    run_pair,
    running,
)
from epd_connector.testing.pictures import random_picture
from epd_connector.testing.ports import Ports
from epd_connector.testing.tiny_models import ModelKind, build

AT_ONCE = (1, 4, 16)
ROUNDS, QUICK_ROUNDS = 5, 3
ALONE_PER_ROUND = 4
TOKENS = 16
PICTURE = (512, 512)
STEPS = 2
START_TIMEOUT_S, REPORT_TIMEOUT_S = 600.0, 5.0
_BUSY_TOKENS = 100
_GENERATORS = 2
_SETTLE_S = 0.5
_SLABS: dict[str, JSONValue] = {"send_slab_bytes": "32MiB", "receive_slab_bytes": "32MiB"}
_PATIENCE: dict[str, JSONValue] = {"peer_timeout_s": 600, "resolve_timeout_s": 30}

Ask = Callable[[str], ChatResult]
"""Sends a picture, and returns the streamed answer about it."""


@dataclass
class Way:
    """One way to an answer, by ``engines`` that are held (SIGSTOP) when it is not their turn. By
    how many were asked at once: seconds until the first token of each answer, and answers per
    second of each round. ``fails``: it may, and is counted."""

    name: str
    ask: Ask
    engines: Sequence[EngineProcess] = ()
    fails: bool = False
    failed: int = 0
    first_s: dict[int, list[float]] = field(default_factory=dict)
    rate: dict[int, list[float]] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)

    def crowd(self, pictures: Sequence[str]) -> None:
        """All of ``pictures`` at once."""
        self.signal_all(signal.SIGCONT)
        time.sleep(_SETTLE_S)
        try:
            self._ask_all(pictures)
            time.sleep(_SETTLE_S)
        finally:
            self.signal_all(signal.SIGSTOP)

    def forget(self) -> None:
        """What was measured so far does not count."""
        for table in (self.first_s, self.rate, self.step_s):
            table.clear()
        self.failed = 0

    def signal_all(self, number: signal.Signals) -> None:
        """To every process of its engines."""
        for engine in self.engines:
            os.killpg(engine.pid, number)

    def _ask_all(self, pictures: Sequence[str]) -> None:
        count = len(pictures)
        begun = time.monotonic()
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(self.ask, pictures))
        taken_s = time.monotonic() - begun
        good = sum(answer.ok for answer in answers)
        self.rate.setdefault(count, []).append(good / taken_s)
        for answer in answers:
            if not answer.ok or answer.ttft_s is None:
                if not self.fails:
                    raise RuntimeError(f"{self.name}: {answer.status} {answer.error}")
                self.failed += 1
                continue
            self.first_s.setdefault(count, []).append(answer.ttft_s)
            if count == 1:
                self.step_s.append((answer.seconds - answer.ttft_s) / (TOKENS - 1))


def _alone(engine: EngineProcess, picture: str) -> ChatResult:
    messages = user_message("What is it?", [picture])
    return engine.chat(messages, stream=True, max_tokens=TOKENS, ignore_eos=True)


def _epd(encode: EngineProcess, prefill: EngineProcess, picture: str) -> ChatResult:
    messages = user_message("What is it?", [picture])
    fields: dict[str, JSONValue] = {"max_tokens": TOKENS, "ignore_eos": True}
    return run_pair(encode, prefill, messages, stream=True, fields=fields).prefill


def _in_tree(
    encode: EngineProcess, prefill: EngineProcess, consumer: str, picture: str
) -> ChatResult:
    messages = user_message("What is it?", [picture])
    params: dict[str, JSONValue] = {
        "consumer_zmq": consumer,
        "ec_items": [{"transfer_id": token_hex(8)}],
    }
    with ThreadPoolExecutor(2) as pool:
        ask = partial(prefill.chat, max_tokens=TOKENS, ignore_eos=True, ec_transfer_params=params)
        answer = pool.submit(ask, messages, stream=True)
        pool.submit(encode_request, encode, messages, params).result()
        return answer.result()


def _in_tree_spec(name: str, model: Path, role: str, port: int) -> EngineSpec:
    transfer: dict[str, JSONValue] = {
        "ec_connector": "ECMooncakeConnector",
        "ec_role": role,
        "ec_buffer_device": "cpu",
        "ec_buffer_size": 32 << 20,
        "ec_ip": "127.0.0.1",
        "ec_port": port,
        "ec_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    return EngineSpec(name, model, transfer, env={"MC_FORCE_TCP": "1"})


@contextmanager
def _kept_busy(engine: EngineProcess) -> Iterator[None]:
    """``engine`` generates text all the while."""
    ended = threading.Event()

    def generate() -> None:
        while not ended.is_set():
            engine.chat(user_message("Go on."), max_tokens=_BUSY_TOKENS, ignore_eos=True)

    # Two by turns: between two requests of one, the other goes on.
    with ThreadPoolExecutor(_GENERATORS) as pool:
        going = [pool.submit(generate) for _ in range(_GENERATORS)]
        try:
            yield
        finally:
            ended.set()
            for generator in going:
                generator.result()


@contextmanager
def _up(model: Path, logs: Path, *, in_tree: bool) -> Iterator[tuple[list[Way], EngineProcess]]:
    """All ways, with their engines up, and this connector's encode engine."""
    extra = {"transport": "mooncake", **_SLABS, **_PATIENCE}
    ports = Ports(4)
    specs = [
        EngineSpec("monolithic", model),
        connector_spec("encode", model, "ec_producer", extra),
        connector_spec("prefill", model, "ec_consumer", extra),
    ]
    if in_tree:
        specs.append(_in_tree_spec("in-tree-encode", model, "ec_producer", ports.first + 2))
        specs.append(_in_tree_spec("in-tree-prefill", model, "ec_consumer", ports.first))
    try:
        with running(specs, logs, timeout_s=START_TIMEOUT_S) as engines:
            alone, encode, prefill, *pair = engines
            ways = [
                Way("monolithic", partial(_alone, alone), [alone]),
                Way("epd", partial(_epd, encode, prefill), [encode, prefill]),
            ]
            if not pair:
                yield ways, encode
                return
            consumer = f"tcp://127.0.0.1:{ports.first}"
            ask = partial(_in_tree, pair[0], pair[1], consumer)
            ways.append(Way("in-tree", ask, pair, fails=True))
            with _kept_busy(pair[1]):
                yield ways, encode
    finally:
        sweep_stale_segments()


def measure(quick: bool) -> Measured:
    """See ``results``."""
    with tempfile.TemporaryDirectory(prefix="epd-engines-") as scratch:
        model = build(ModelKind.QWEN3_VL, Path(scratch) / "model")
        with _up(model, Path(scratch), in_tree=not quick) as (ways, encode):
            try:
                _take_turns(ways, QUICK_ROUNDS if quick else ROUNDS)
            finally:
                for way in ways:
                    way.signal_all(signal.SIGCONT)
            landed_s = fetch_report(encode.control_address, REPORT_TIMEOUT_S).encoded_to_landed_s
    return compare(ways, landed_s)


def _take_turns(ways: Sequence[Way], rounds: int) -> None:
    """All ``rounds``, with all ways in each, after one picture that does not count."""
    seeds = itertools.count(1)

    def pictures(count: int) -> list[str]:
        return [random_picture(*PICTURE, next(seeds)) for _ in range(count)]

    for way in ways:
        way.signal_all(signal.SIGSTOP)
    for way in ways:
        way.crowd(pictures(1))
        way.forget()
    for _ in range(rounds):
        for count in AT_ONCE:
            for _ in range(ALONE_PER_ROUND if count == 1 else 1):
                for way in ways:
                    way.crowd(pictures(count))


def compare(ways: Sequence[Way], landed_s: Sequence[float]) -> Measured:
    """Series of all ``ways``; the goal is that a request alone pays for the transfer and for two
    steps, and for nothing else."""
    found = Measured()
    for way in ways:
        for count, first_s in way.first_s.items():
            name = f"{way.name}, {count} at once"
            first_ms = tuple(1e3 * value for value in first_s)
            found.series.append(Series("engines", f"{name}: first token", "ms", first_ms))
            rate = tuple(way.rate[count])
            found.series.append(Series("engines", f"{name}: rate", "requests/s", rate))
        if way.fails:
            failed = (float(way.failed),)
            found.series.append(Series("engines", f"{way.name}: failed", "requests", failed))
    alone, epd = ways[0], ways[1]
    steps_ms = 1e3 * STEPS * median(epd.step_s)
    most = 1e3 * median(landed_s) + steps_ms
    extra = 1e3 * excess(epd.first_s[1], alone.first_s[1])
    found.series.append(
        Series("engines", "epd: encoded to landed", "ms", tuple(1e3 * s for s in landed_s))
    )
    name = f"first token, epd minus monolithic, under transfer and {STEPS} steps"
    found.goals.append(Goal(name, "ms", most, extra))
    return found
