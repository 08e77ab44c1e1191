# SPDX-License-Identifier: Apache-2.0
"""One configuration, up and running: an encode engine, a prefill engine and its ranks.

Owns which process makes what, and how one item is sent through. The connectors' modules are
imported in those processes alone: they need the host, which takes long to import.
"""

import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.items import Item
from benchmarks.processes import Peer, Processes, Side, Up
from benchmarks.sides import (
    Announce,
    CountSent,
    EncodeEngine,
    HandOver,
    PrefillEngine,
    PrefillRank,
    Receive,
    Received,
    Setup,
)

MODULES = {"epd": "ours", "stages": "stages", "in-tree": "in_tree", "example": "shared_storage"}
"""Connectors, and the modules that drive them."""
TOWER_S = 0.03
"""Between the announcement of an item and its hand-over: the tower runs, both engines talk."""
SETTLE_S = 0.06
"""After an item, before the processes are held: what they still tell each other is told."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds from ``save_caches`` until the prefill engine knows that the item is there,
    and until the last rank has published it."""

    ready_ms: float
    published_ms: float


class Deployment:
    """The processes of one configuration. Starts at once; ``wait`` returns when it is up.
    Between items it is held."""

    def __init__(self, setup: Setup, processes: Processes) -> None:
        self.setup = setup
        self.nbytes = 0
        Path(setup.scratch).mkdir()
        ranks = [
            processes.start(f"{setup.key} rank {rank}", _prefill_rank, setup, rank)
            for rank in range(setup.ranks)
        ]
        self._prefill = processes.start(f"{setup.key} prefill", _prefill_engine, setup, ranks)
        self._encode = processes.start(f"{setup.key} encode", _encode_engine, setup)
        self._all = [*ranks, self._prefill, self._encode]
        # The prefill engine has them now. It alone must hold them, or they would never end.
        for rank in ranks:
            rank.close()
        self._addresses = ("", "")

    def wait(self) -> None:
        """Returns when all processes are up, and holds them."""
        self._addresses = (
            self._encode.receive(Up).address,
            self._prefill.receive(Up).address,
        )
        self._hold()

    def send(self, item: Item, *, check: bool) -> Timing:
        """``item`` from the encode engine to all prefill ranks; with ``check``, their bytes too."""
        encode, prefill = self._addresses
        self._go_on()
        self._prefill.send(Receive(item, encode, check))
        self._encode.ask(Announce(item, prefill), type(None))
        time.sleep(TOWER_S)
        began_ns = self._encode.ask(HandOver(), int)
        received = self._prefill.receive(Received)
        self.nbytes += item.nbytes
        self._hold()
        return Timing(
            ready_ms=(received.ready_ns - began_ns) / 1e6,
            published_ms=(max(received.published_ns) - began_ns) / 1e6,
        )

    def sent_share(self) -> float:
        """Bytes that the encode engine has sent so far, over those of the items."""
        self._go_on()
        sent_nbytes = self._encode.ask(CountSent(), int)
        self._hold()
        return sent_nbytes / self.nbytes

    def sweep(self) -> None:
        """Removes what the host's group left in shared memory; once the processes are gone."""
        for path in Path("/dev/shm").glob(f"{self.setup.key}-*"):
            path.unlink()

    def _go_on(self) -> None:
        for peer in self._all:
            peer.go_on()

    def _hold(self) -> None:
        time.sleep(SETTLE_S)
        for peer in self._all:
            peer.hold()


def _connector(setup: Setup) -> ModuleType:
    """The module with the parts of the connector that is measured."""
    return import_module(f"benchmarks.{MODULES[setup.connector]}")


def _encode_engine(setup: Setup) -> Side:
    return EncodeEngine(_connector(setup).Encoder, setup)


def _prefill_engine(setup: Setup, ranks: list[Peer]) -> Side:
    return PrefillEngine(_connector(setup).Head, setup, ranks)


def _prefill_rank(setup: Setup, rank: int) -> Side:
    return PrefillRank(_connector(setup).Rank, setup, rank)
