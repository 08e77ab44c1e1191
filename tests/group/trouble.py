# SPDX-License-Identifier: Apache-2.0
"""A prefill engine whose last rank is in trouble, and what must hold afterwards."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from epd_connector.hosts.vllm.plan import StepPlan
from epd_connector.protocol.frames import Grant
from epd_connector.rows import Layout, wanted_rows
from tests.group import rank_side
from tests.group.child import Child
from tests.group.conftest import KEYS
from tests.group.engines import Asked, EncodeEngine, Group, PrefillEngine
from tests.group.material import Rows
from tests.group.rank_side import RankSide, Step
from tests.unit.pair_bench import until

ENCODE_RANKS = 2
ROWS = 37
SOON: dict[str, object] = {"heartbeat_s": 0.5, "peer_timeout_s": 3, "shutdown_timeout_s": 0.5}
"""How long the silence of an encode engine may last."""


@dataclass
class World:
    """A prefill engine that lives through all tests, and an encode engine that stays well."""

    layout: Layout
    prefill: PrefillEngine
    well: EncodeEngine
    names: Iterator[int] = field(default_factory=itertools.count)

    @property
    def ranks(self) -> int:
        return len(self.prefill.group)

    @property
    def last(self) -> Child[RankSide]:
        return self.prefill.group.ranks[-1]

    @property
    def others(self) -> set[int]:
        """All ranks but the last one."""
        return set(range(self.ranks - 1))

    def rows(self, rows: int = ROWS) -> Rows:
        """An item that there has not been yet."""
        return Rows(f"{self.layout}-{self.ranks}-{next(self.names)}", rows)

    def sent(self, item: Rows, *ranks: int) -> int:
        """Bytes that these ranks receive of ``item``."""
        shards = [
            wanted_rows(item.rows, self.ranks, rank, sharded=self.layout.sharded) for rank in ranks
        ]
        return sum(shard.rows for shard in shards) * item.nbytes // item.rows

    def goes_on(self) -> None:
        """No rank is left in a collective, and what comes next is right on every rank."""
        group = self.prefill.group
        assert group.all(rank_side.load, StepPlan()) == [Step({}, 0)] * self.ranks
        assert group.all(rank_side.meet) == [list(range(self.ranks))] * self.ranks
        self.prefill.load(self.well, self.rows(), self.rows(1))
        until(self.prefill.settled)
        assert self.prefill.report().counters["errors_internal"] == 0

    def hold_grants_of_the_last(self) -> None:
        self.last.call(rank_side.gate, frozenset({Grant}))

    def others_land(self, asked: Asked) -> None:
        until(lambda: self.prefill.landed(asked.rooms[0]) == self.others)

    def close(self) -> None:
        self.prefill.close()
        self.well.close()


def make_world(layout: Layout, group: Group) -> World:
    well = EncodeEngine(1, transport="shm")
    prefill = PrefillEngine(group, extra={**KEYS[layout], **SOON, "transport": "shm"})
    return World(layout, prefill.up(), well)


def encode_engine() -> EncodeEngine:
    """One that a test may break."""
    return EncodeEngine(ENCODE_RANKS, transport="shm")
