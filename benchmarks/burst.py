# SPDX-License-Identifier: Apache-2.0
"""Section `burst`: many items at once, against one bare write of as many bytes.

An encode rank, a prefill head and its rank, each a process, over both transports. All
requests have claimed their items and been granted memory; then all rows are handed over at
once. Measured is the time until the prefill scheduler knows that every item has landed.
"""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.baselines import Baseline
from benchmarks.items import Item, content
from benchmarks.processes import PATIENCE_S, Peer, Processes, Side, Up
from benchmarks.results import Goal, Measured, Series, ratio
from benchmarks.sides import POLL_S, Setup, join_group, leave_group
from epd_connector.testing.ports import Ports

if TYPE_CHECKING:
    import torch

BURSTS = {"64 x 4.2 MB": (64, 1 << 22), "1000 x 64 KB": (1000, 1 << 16)}
"""Items and bytes of each."""
GOAL = "64 x 4.2 MB"
TRANSPORTS = ("mooncake", "shm")
SLAB_NBYTES = 5 << 26
ROUNDS, QUICK_ROUNDS, WARMUP = 9, 4, 1
SETTLE_S = 0.5
_PORTS = 8


@dataclass(frozen=True, slots=True)
class Claim:
    """To the encode rank: these items are going to be encoded; have their rows ready."""

    items: Sequence[Item]


@dataclass(frozen=True, slots=True)
class HandOver:
    """To the encode rank: the rows of all items are there. Answered with the time before."""


@dataclass(frozen=True, slots=True)
class Need:
    """To the prefill head: a request for each of these items of the engine at ``encode``."""

    items: Sequence[Item]
    encode: str


@dataclass(frozen=True, slots=True)
class Await:
    """To the prefill head: answer with the time at which all have landed; then they leave."""


class EncodeSide:
    """The process of the encode engine. See ``processes.Side``."""

    def __init__(self, setup: Setup) -> None:
        join_group(setup, 0, ranks=1, name="encode")
        from benchmarks import ours

        self._encoder = ours.Encoder(setup)
        self._cache: dict[str, torch.Tensor] = {}

    @property
    def address(self) -> str:
        """``host:port`` of its head."""
        return self._encoder.address

    def handle(self, order: object) -> object:
        """See ``processes.Side``."""
        if isinstance(order, Claim):
            self._cache = {item.hash: content(item) for item in order.items}
            for item in order.items:
                self._encoder.announce(item, "")
            return None
        assert isinstance(order, HandOver)
        begun_ns = time.monotonic_ns()
        for hash in self._cache:
            self._encoder.hand_over(self._cache, hash)
        return begun_ns

    def close(self) -> None:
        """See ``processes.Side``."""
        self._encoder.close()
        leave_group()


class HeadSide:
    """The process of the prefill scheduler. See ``processes.Side``."""

    address = ""

    def __init__(self, setup: Setup) -> None:
        from benchmarks import ours

        self._crowd = ours.Crowd(setup)

    def handle(self, order: object) -> object:
        """See ``processes.Side``."""
        if isinstance(order, Need):
            self._crowd.need(order.items, order.encode)
            return None
        assert isinstance(order, Await)
        end = time.monotonic() + PATIENCE_S / 2
        while not self._crowd.ready():
            if time.monotonic() > end:
                raise RuntimeError("not all items have come")
            time.sleep(POLL_S)
        ready_ns = time.monotonic_ns()
        self._crowd.leave()
        return ready_ns

    def close(self) -> None:
        """See ``processes.Side``."""
        self._crowd.close()


class RankSide:
    """The process of the prefill rank, which only receives. See ``processes.Side``."""

    address = ""

    def __init__(self, setup: Setup) -> None:
        join_group(setup, 0, ranks=1, name="prefill")
        from benchmarks import ours

        self._rank = ours.Rank(setup, 0)

    def handle(self, order: object) -> object:
        """See ``processes.Side``."""
        raise ValueError(f"a rank that only receives knows no {order!r}")

    def close(self) -> None:
        """See ``processes.Side``."""
        self._rank.close()
        leave_group()


def _make(kind: type[Side], setup: Setup) -> Side:
    return kind(setup)  # type: ignore[call-arg]


class Engines:
    """An encode and a prefill engine, up."""

    def __init__(self, setup: Setup, processes: Processes) -> None:
        start = partial(processes.start, setup.key)
        self._rank = start(_make, RankSide, setup)
        self._head = start(_make, HeadSide, setup)
        self._encode: Peer = start(_make, EncodeSide, setup)
        self._rank.receive(Up)
        self._head.receive(Up)
        self._address = self._encode.receive(Up).address
        self._next = 0

    def burst(self, count: int, nbytes: int) -> float:
        """Milliseconds from the first hand-over until all items have landed."""
        items = [Item(self._next + n, nbytes) for n in range(count)]
        self._next += count
        self._head.ask(Need(items, self._address), type(None))
        self._encode.ask(Claim(items), type(None))
        time.sleep(SETTLE_S)
        self._head.send(Await())
        begun_ns = self._encode.ask(HandOver(), int)
        return (self._head.receive(int) - begun_ns) / 1e6


def run(rounds: int) -> dict[tuple[str, str], tuple[float, ...]]:
    """Milliseconds by transport (or ``raw``) and burst, of the rounds after the warm-up."""
    found: dict[tuple[str, str], list[float]] = {}
    processes = Processes()
    with tempfile.TemporaryDirectory(prefix="epd-burst-") as scratch:
        engines = {}
        for transport in TRANSPORTS:
            path = Path(scratch) / transport
            path.mkdir()
            key = f"burst-{transport}-{os.getpid()}"
            ports = Ports(_PORTS)
            setup = Setup("epd", transport, "whole", 1, SLAB_NBYTES, key, str(path), ports.first)
            engines[transport] = Engines(setup, processes)
        raw = Baseline(replace(setup, connector="raw"), processes)
        raw.wait()
        try:
            for _ in range(WARMUP + rounds):
                for name, (count, nbytes) in BURSTS.items():
                    for transport, pair in engines.items():
                        taken_ms = pair.burst(count, nbytes)
                        found.setdefault((transport, name), []).append(taken_ms)
                    bare = raw.send(Item(0, count * nbytes), check=False)
                    found.setdefault(("raw", name), []).append(bare.ready_ms)
        finally:
            processes.close()
            for left in Path("/dev/shm").glob(f"burst-*-{os.getpid()}-*"):
                left.unlink()
    return {key: tuple(taken[WARMUP:]) for key, taken in found.items()}


def measure(quick: bool) -> Measured:
    """See ``results``."""
    return compare(run(QUICK_ROUNDS if quick else ROUNDS))


def compare(taken: Mapping[tuple[str, str], Sequence[float]]) -> Measured:
    """A series for each, and the goal: the rate of a bare write."""
    series = [
        Series("burst", f"{name}, {transport}", "ms", tuple(values))
        for (transport, name), values in taken.items()
    ]
    value = ratio(taken["mooncake", GOAL], taken["raw", GOAL])
    return Measured(series, [Goal(f"burst of {GOAL} over raw", "x", 1.1, value)])
