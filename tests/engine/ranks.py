# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks, and what must be true of them however rows are received.

The encode engines, of one rank and of two, know both transports; the prefill engines are told
which to use, and receive in every layout on two ranks. One has two pipeline stages, of which the
first receives.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from epd_connector.core.transfer_words import COUNTED
from epd_connector.rows import Layout
from epd_connector.runtime.report import fetch_report
from epd_connector.testing.chat import JSONValue, Message, user_message
from epd_connector.testing.engines import (
    ONE_THREAD,
    EngineProcess,
    EngineRole,
    EngineSpec,
    PairResult,
    connector_spec,
    run_pair,
    running,
    wait_until,
)
from epd_connector.testing.pictures import random_picture
from epd_connector.testing.tiny_models import ModelKind
from tests.engine.fleet import FLOAT32, SMALL_SLABS, Monolithics

RANKS = 2
STAGES = (
    "--pipeline-parallel-size=2",
    # The host's CPU worker makes what a later stage receives into only where it compiles; the
    # eager backend needs no compiler.
    "--no-enforce-eager",
    '--compilation-config={"mode": 1, "backend": "eager"}',
)


@dataclass(frozen=True)
class Choice:
    """How a prefill engine receives, and what comes of it."""

    transport: str
    shard: str
    layout: Layout
    ranks: int = RANKS
    stages: int = 1

    def __str__(self) -> str:
        return f"{self.transport}-{self.layout}-{self.ranks}x{self.stages}"


CHOICES: Sequence[Choice] = [
    Choice("mooncake", "always", Layout.SHARDS),
    Choice("shm", "never", Layout.WHOLE),
    Choice("mooncake", "auto", Layout.SHARED),
]
STAGED = Choice("shm", "auto", Layout.WHOLE, ranks=1, stages=2)
OTHER_CHOICES: Sequence[Choice] = [
    Choice("shm", "always", Layout.SHARDS),
    Choice("mooncake", "never", Layout.WHOLE),
    Choice("shm", "auto", Layout.SHARED),
]
"""Between them each transport with each layout. With each number of ranks, too, and byte by byte,
they are in `tests/group`, where ranks start in no time."""


@dataclass(frozen=True)
class Encoders:
    """Encode engines of one model, of one rank and of two."""

    kind: ModelKind
    model: Path
    engines: tuple[EngineProcess, ...]


def ranks_spec(
    name: str,
    model: Path,
    role: EngineRole,
    ranks: int,
    extra: Mapping[str, JSONValue],
    more: Sequence[str] = (),
) -> EngineSpec:
    flags = (*FLOAT32, f"--tensor-parallel-size={ranks}", *more)
    return connector_spec(name, model, role, {**SMALL_SLABS, **extra}, flags=flags, env=ONE_THREAD)


@contextlib.contextmanager
def encode_engines(
    kind: ModelKind, model: Path, logs: Path, monolithics: Monolithics
) -> Iterator[Encoders]:
    """Encode engines of one rank and of two, and the monolithic one beside them."""
    monolithics.prepare(kind, FLOAT32)
    specs = [
        ranks_spec(f"{kind}-encode-{ranks}", model, "ec_producer", ranks, {})
        for ranks in (1, RANKS)
    ]
    with running(specs, logs) as engines:
        yield Encoders(kind, model, tuple(engines))


def pictures(seed: int) -> list[list[str]]:
    """Items of three requests. Of the first, one has fewer rows than there are ranks."""
    several = [
        random_picture(width, height, seed + number)
        for number, (width, height) in enumerate([(28, 28), (300, 200), (64, 128), (100, 160)])
    ]
    return [several, [random_picture(224, 160, seed + 8)], [random_picture(160, 120, seed + 9)]]


@dataclass(frozen=True)
class Figures:
    """What two engines have counted."""

    sent: float
    embeddings: float
    published: float
    landed: Mapping[Layout, float]

    @classmethod
    def of(cls, encode: EngineProcess, prefill: EngineProcess) -> "Figures":
        sender = fetch_report(encode.control_address, 5.0).counters
        receiver = fetch_report(prefill.control_address, 5.0).counters
        return cls(
            sent=sender["bytes_sent"],
            embeddings=receiver["embedding_bytes"],
            published=receiver["items_published"],
            landed={layout: receiver[counter] for layout, counter in COUNTED.items()},
        )


def give_the_tokens_of_one_engine(
    encoders: Encoders, choices: Sequence[Choice], logs: Path, monolithics: Monolithics
) -> None:
    """Prefill engines that receive as ``choices`` say, each from every encode engine."""
    specs = [
        ranks_spec(
            f"{encoders.kind}-prefill-{choice}",
            encoders.model,
            "ec_consumer",
            choice.ranks,
            {"transport": choice.transport, "shard": choice.shard},
            STAGES if choice.stages > 1 else (),
        )
        for choice in choices
    ]
    with running(specs, logs) as prefills:
        for choice, prefill in zip(choices, prefills, strict=True):
            for number, encode in enumerate(encoders.engines):
                items = pictures(100 * number)
                before = Figures.of(encode, prefill)
                tokens_are_equal(encode, prefill, items, encoders.kind, monolithics)
                rows_went_once_or_to_each(encode, prefill, before, sum(map(len, items)), choice)


def tokens_are_equal(
    encode: EngineProcess,
    prefill: EngineProcess,
    items: list[list[str]],
    kind: ModelKind,
    monolithics: Monolithics,
) -> None:
    """One request by itself, then the others at once."""
    messages = [user_message("What is this?", pictures) for pictures in items]

    def send(message: list[Message]) -> PairResult:
        return run_pair(encode, prefill, message, fields={"max_tokens": 16})

    with ThreadPoolExecutor(len(messages)) as pool:
        results = [send(messages[0]), *pool.map(send, messages[1:])]
    for message, result in zip(messages, results, strict=True):
        assert result.ok, result
        expected = monolithics.tokens(kind, message, flags=FLOAT32, max_tokens=16)
        assert result.prefill.token_ids == expected


def rows_went_once_or_to_each(
    encode: EngineProcess, prefill: EngineProcess, before: Figures, items: int, choice: Choice
) -> None:
    """The layout was used for every item, and bytes were sent as often as it says."""
    copies = choice.ranks if choice.layout is Layout.WHOLE else 1
    assert fetch_report(prefill.control_address, 5.0).ranks_up == choice.ranks

    def settled() -> bool:
        now = Figures.of(encode, prefill)
        sent, embeddings = now.sent - before.sent, now.embeddings - before.embeddings
        return (
            now.published - before.published == items
            and now.landed[choice.layout] - before.landed[choice.layout] == items
            and sent == copies * embeddings > 0
        )

    assert wait_until(settled, 20.0), (before, Figures.of(encode, prefill))
