# SPDX-License-Identifier: Apache-2.0
"""The parts of two engines that a measurement needs, for whatever connector.

Owns the order of things in an engine: the encode engine's hand-over, the prefill engine's
step, and when the clock is read. Does not own how a connector does it: ``Encoder``, ``Head``
and ``Rank`` are what a connector is asked to bring.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from benchmarks.items import Item, check, content
from benchmarks.processes import PATIENCE_S, Peer, Up

if TYPE_CHECKING:
    import torch

POLL_S = 0.0001
"""How often the prefill engine asks whether the item is there, where nothing tells it when to."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One configuration. ``key`` is its own; ``scratch`` is a directory for it alone."""

    connector: str
    transport: str
    layout: str
    ranks: int
    slab_nbytes: int
    key: str
    scratch: str
    port: int


@dataclass(frozen=True, slots=True)
class Announce:
    """To the encode engine: a request with ``item`` comes, its tower is about to run."""

    item: Item
    prefill: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """To the encode engine: the tower is done. Answered with the time before save_caches."""


@dataclass(frozen=True, slots=True)
class CountSent:
    """To the encode engine: how many bytes of rows has it sent?"""


@dataclass(frozen=True, slots=True)
class Receive:
    """To the prefill engine: a request with ``item`` comes; run it as soon as possible."""

    item: Item
    encode: str
    check: bool


@dataclass(frozen=True, slots=True)
class Received:
    """When the engine knew that it may run, and when each rank had the item published."""

    ready_ns: int
    published_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """To a prefill rank, as part of a step: publish this. Answered with the time after it."""

    item: Item
    what: object


@dataclass(frozen=True, slots=True)
class Drop:
    """To a prefill rank: the encoder cache gives the item up."""

    check: bool


class Encoder(Protocol):
    """An encode engine's connector."""

    @property
    def address(self) -> str:
        """Where prefill engines find it, if they must."""

    def announce(self, item: Item, prefill: str) -> None:
        """As the scheduler does for a step: the item is going to be encoded."""

    def hand_over(self, cache: "dict[str, torch.Tensor]", hash: str) -> None:
        """``save_caches``, and the end of the step."""

    def bytes_sent(self) -> int:
        """Bytes of rows that were written to prefill ranks."""

    def close(self) -> None:
        """Ends it."""


class Head(Protocol):
    """A prefill engine's connector, on its scheduler's side."""

    @property
    def address(self) -> str:
        """Where encode engines find it, if they must."""

    def announce(self, item: Item, encode: str) -> None:
        """A request with ``item`` has come."""

    def ready(self) -> object | None:
        """What the ranks are to load, as soon as the request may run."""

    def wait(self) -> None:
        """Returns when it may be worth to ask again. Bounded."""

    def finished(self) -> None:
        """The step has run and the request is done."""

    def close(self) -> None:
        """Ends it."""


class Rank(Protocol):
    """A prefill engine's connector, on one worker's side."""

    def load(self, what: object, cache: "dict[str, torch.Tensor]") -> None:
        """``start_load_caches``: puts the item into ``cache``."""

    def dropped(self, hash: str, cache: "dict[str, torch.Tensor]") -> None:
        """The encoder cache has let go of the item."""

    def close(self) -> None:
        """Ends it."""


class EncodeEngine:
    """The process of the encode rank, which is the scheduler's too, as with one rank."""

    def __init__(self, make: Callable[[Setup], Encoder], setup: Setup) -> None:
        join_group(setup, 0, ranks=1, name="encode")
        self._encoder = make(setup)
        self._cache: dict[str, torch.Tensor] = {}

    @property
    def address(self) -> str:
        """See ``processes.Side``."""
        return self._encoder.address

    def handle(self, order: object) -> object:
        """See ``processes.Side``."""
        match order:
            case Announce(item=item, prefill=prefill):
                self._encoder.announce(item, prefill)
                self._cache = {item.hash: content(item)}
                return None
            case HandOver():
                (hash,) = self._cache
                began_ns = time.monotonic_ns()
                self._encoder.hand_over(self._cache, hash)
                return began_ns
            case CountSent():
                return self._encoder.bytes_sent()
        raise ValueError(f"an encode engine knows no {order!r}")

    def close(self) -> None:
        """See ``processes.Side``."""
        self._encoder.close()
        leave_group()


class PrefillEngine:
    """The process of the prefill scheduler. It runs its ranks' steps over pipes."""

    def __init__(self, make: Callable[[Setup], Head], setup: Setup, ranks: list[Peer]) -> None:
        self._head = make(setup)
        self._ranks = ranks
        for rank in ranks:
            rank.receive(Up)

    @property
    def address(self) -> str:
        """See ``processes.Side``."""
        return self._head.address

    def handle(self, order: object) -> object:
        """See ``processes.Side``."""
        match order:
            case Receive(item=item, encode=encode, check=check):
                return self._run(item, encode, check)
        raise ValueError(f"a prefill engine knows no {order!r}")

    def _run(self, item: Item, encode: str, check: bool) -> Received:
        self._head.announce(item, encode)
        what = self._wait()
        ready_ns = time.monotonic_ns()
        for rank in self._ranks:
            rank.send(Load(item, what))
        published_ns = tuple(rank.receive(int) for rank in self._ranks)
        self._head.finished()
        for rank in self._ranks:
            rank.send(Drop(check))
        for rank in self._ranks:
            rank.receive(int)
        return Received(ready_ns, published_ns)

    def _wait(self) -> object:
        end = time.monotonic() + PATIENCE_S / 2
        while time.monotonic() < end:
            what = self._head.ready()
            if what is not None:
                return what
            self._head.wait()
        raise RuntimeError("the item did not come")

    def close(self) -> None:
        """See ``processes.Side``."""
        for rank in self._ranks:
            rank.close()
        self._head.close()


class PrefillRank:
    """The process of one prefill rank."""

    def __init__(self, make: Callable[[Setup, int], Rank], setup: Setup, rank: int) -> None:
        join_group(setup, rank, ranks=setup.ranks, name="prefill")
        self._rank = make(setup, rank)
        self._cache: dict[str, torch.Tensor] = {}
        self._item: Item | None = None

    @property
    def address(self) -> str:
        """See ``processes.Side``."""
        return ""

    def handle(self, order: object) -> object:
        """See ``processes.Side``."""
        match order:
            case Load(item=item, what=what):
                self._rank.load(what, self._cache)
                published_ns = time.monotonic_ns()
                if item.hash not in self._cache:
                    raise RuntimeError(f"{item.hash} was not published")
                self._item = item
                return published_ns
            case Drop(check=wanted):
                assert self._item is not None
                published = self._cache.pop(self._item.hash)
                if wanted:
                    check(self._item, published)
                del published
                self._rank.dropped(self._item.hash, self._cache)
                return 0
        raise ValueError(f"a prefill rank knows no {order!r}")

    def close(self) -> None:
        """See ``processes.Side``."""
        self._rank.close()
        leave_group()


def join_group(setup: Setup, rank: int, *, ranks: int, name: str) -> None:
    """The host's own tensor-parallel group over gloo, as its CPU workers make it."""
    import os

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.platforms import current_platform

    # The host's kernels have the group's communicator over shared memory; without them it
    # would be gloo's alone, over sockets.
    current_platform.import_kernels()
    os.environ["VLLM_DIST_IDENT"] = f"{setup.key}-{name}"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=ranks,
            rank=rank,
            distributed_init_method=f"file://{setup.scratch}/{name}",
            local_rank=rank,
            backend="gloo",
        )
        initialize_model_parallel(tensor_model_parallel_size=ranks)


def leave_group() -> None:
    """Gives back what the group holds."""
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    destroy_model_parallel()
    destroy_distributed_environment()
