# SPDX-License-Identifier: Apache-2.0
"""How bad a world is, and what it consists of: values, drawn from a seed or chosen by a test."""

import random
from dataclasses import dataclass, fields, replace
from typing import Any

STORM_S = 25.0
_FAULTS: dict[str, tuple[float, float]] = {
    "lost": (0.01, 0.15),
    "repeated": (0.02, 0.2),
    "late": (0.02, 0.15),
    "deaf_heads": (0.2, 0.8),
    "slow_writes": (0.05, 0.3),
    "failed_writes": (0.02, 0.15),
    "cuts": (0.03, 0.2),
    "breaks": (0.03, 0.3),
    "encode_deaths": (0.02, 0.1),
    "prefill_deaths": (0.02, 0.07),
    "rank_deaths": (0.02, 0.07),
    "vanishings": (0.02, 0.05),
    "freezes": (0.03, 0.2),
    "pauses": (0.02, 0.1),
    "aborts": (0.1, 0.5),
    "preemptions": (0.1, 0.6),
}
"""What can go wrong, and how much or how often, at the least and at the most."""


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad things are until ``calm_at``; from then on nothing goes wrong.

    ``mishaps``: requests that are given up early, copies that fail, sides that never hear of
    an item. Shares: of frames that are ``lost``, ``repeated``, ``late``; of skips and words of
    receivers that are lost besides (``deaf_heads``); of writes that are slow, that fail; of
    requests whose clients leave (``aborts``). How often, per second: a pair of engines is cut
    off (``cuts``), connections break (``breaks``), an engine, a rank, a host ends, some process is
    stopped (``freezes``), a scheduler pauses, a request is preempted.
    """

    calm_at: float = STORM_S
    mishaps: bool = True
    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    deaf_heads: float = 0.0
    slow_writes: float = 0.0
    failed_writes: float = 0.0
    cuts: float = 0.0
    breaks: float = 0.0
    encode_deaths: float = 0.0
    prefill_deaths: float = 0.0
    rank_deaths: float = 0.0
    vanishings: float = 0.0
    freezes: float = 0.0
    pauses: float = 0.0
    aborts: float = 0.0
    preemptions: float = 0.0

    def words(self) -> str:
        """What is bad about it."""
        bad = [
            f"{f.name} {getattr(self, f.name):.2f}"
            for f in fields(self)
            if f.name in _FAULTS and getattr(self, f.name)
        ]
        return ", ".join(bad) or "calm"


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranks of each encode engine and of each prefill engine, and what they have.

    ``slab_nbytes``: receive slabs; ``send_nbytes``: send slabs; ``direct``: writes need nothing
    of the process that is written to, as over shared memory or RDMA; over a socket they do.
    ``shares``: which prefill engines have one slab for all ranks, by place; None: drawn.
    ``cache_items``: items that a host's encoder cache holds. ``items``: different ones that
    requests ask for; ``small_items``: of all sizes, not of the same large one. ``encodable``: share
    of items whose pixels the host has. ``bursts``: many requests come at once. ``ahead_rows``:
    rows that towers make before they hear of a full slab. ``lendable``: share of items whose rows
    writes may read where towers made them.
    """

    encode: tuple[int, ...]
    prefill: tuple[int, ...]
    slab_nbytes: int
    send_nbytes: int = 4096
    direct: bool = False
    shares: tuple[bool, ...] | None = None
    cache_items: int = 8
    items: int = 12
    small_items: bool = True
    encodable: float = 0.4
    bursts: bool = False
    ahead_rows: int = 0
    lendable: float = 0.0


STORMS = {
    "loops": Weather(
        late=0.3,
        repeated=0.2,
        slow_writes=0.3,
        encode_deaths=0.6,
        freezes=0.2,
        breaks=0.3,
    ),
    "ends": Weather(
        late=0.2,
        repeated=0.2,
        slow_writes=0.3,
        prefill_deaths=0.3,
        rank_deaths=0.2,
        freezes=0.2,
    ),
    "stops": Weather(slow_writes=0.5, freezes=0.8, aborts=0.4, late=0.2),
    "cuts": Weather(slow_writes=0.4, cuts=0.6, breaks=0.6, aborts=0.4, repeated=0.2),
    "voids": Weather(slow_writes=0.4, vanishings=0.15, aborts=0.3, freezes=0.1, cuts=0.1),
    "crowds": Weather(preemptions=3.0, aborts=0.3, late=0.1, failed_writes=0.1, pauses=0.2),
    "all": Weather(**dict[str, Any]((name, most) for name, (_, most) in _FAULTS.items())),
}
"""Worlds in which a few things go wrong all the time."""


def draw_weather(rng: random.Random) -> Weather:
    """From calm to everything at once."""
    luck = rng.random()
    if luck < 0.05:
        return Weather(mishaps=False)
    if luck < 0.3:
        return rng.choice(list(STORMS.values()))
    share = 0.15 if luck < 0.55 else 0.45 if luck < 0.9 else 1.0
    drawn: dict[str, Any] = {
        name: rng.uniform(*span) for name, span in _FAULTS.items() if rng.random() < share
    }
    return Weather(**drawn)


def draw_shape(rng: random.Random) -> Shape:
    """From one engine of one rank each, to three of many; slabs for four items, or for all."""
    prefill = tuple(rng.choice((1, 1, 2, 2, 3, 4)) for _ in range(rng.choice((1, 1, 2, 3))))
    shape = Shape(
        encode=tuple(rng.randint(1, 3) for _ in range(rng.choice((1, 1, 2, 2, 3)))),
        prefill=prefill,
        slab_nbytes=rng.choice((1024, 1024, 1536, 2048, 4096, 1 << 15)),
        send_nbytes=rng.choice((1024, 2048, 4096)),
        direct=rng.random() < 0.4,
        shares=tuple(ranks > 1 and rng.random() < 0.4 for ranks in prefill),
        cache_items=rng.choice((1, 2, 3, 8)),
        items=rng.choice((3, 4, 6, 12)),
        small_items=rng.random() < 0.5,
        encodable=rng.choice((0.0, 0.3, 0.9)),
        bursts=rng.random() < 0.5,
    )
    # Drawn from what is there, so that a seed goes on to mean the rest of its world.
    return replace(shape, lendable=random.Random(repr(shape)).choice((0.0, 0.5, 1.0)))
