# SPDX-License-Identifier: Apache-2.0
"""Counters of one process, as plain data that can be added up.

Owns: the names of what is counted, and how two sets of counters become one.
Each process counts for itself; ranks hand what they counted since last time to
their head (``take``), which adds it to its totals (``merge``). Does not own:
how counters travel, or how a host exports them.

Not locked: one Counters belongs to one thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Self

MAX_DURATIONS = 1024
"""Durations kept: the newest ones. Bounds both memory and what travels."""

_QUANTILES = (("p50", 0.50), ("p95", 0.95), ("max", 1.0))


@dataclass
class Counters:
    """What happened since the start, or since the last ``take``. All counts only grow."""

    # Rooms
    rooms_opened: int = 0
    rooms_ready: int = 0
    rooms_failed: int = 0
    rooms_skipped: int = 0
    rooms_cancelled: int = 0
    rooms_concluded: int = 0

    # Items
    items_offered: int = 0
    items_sent: int = 0
    items_landed: int = 0
    items_published: int = 0
    items_reloaded: int = 0
    items_whole: int = 0
    items_sharded: int = 0
    items_shared: int = 0
    items_encoded_locally: int = 0
    items_unavailable: int = 0

    # Bytes
    bytes_staged: int = 0
    bytes_lent: int = 0
    bytes_sent: int = 0
    bytes_landed: int = 0
    embedding_bytes: int = 0

    # What was refused, repeated or went wrong
    grants_refused: int = 0
    grants_repeated: int = 0
    frames_malformed: int = 0
    frames_stale: int = 0
    frames_dropped: int = 0
    writes_failed: int = 0
    writes_late: int = 0
    stagings_deferred: int = 0
    slabs_filled: int = 0
    leases_deferred: int = 0
    peers_lost: int = 0
    errors_internal: int = 0
    loops_stalled: int = 0

    # Durations, newest last, in seconds
    encoded_to_landed_s: list[float] = field(default_factory=list)

    def add(self, name: str, amount: int = 1) -> None:
        """Count ``amount`` more of ``name``; KeyError if nothing of that name is counted."""
        # Several times per room: one look at one table.
        try:
            self.__dict__[name] += amount
        except (KeyError, TypeError):
            listed = ", ".join(COUNTS)
            raise KeyError(f"{name} is not counted; the counters are {listed}") from None

    def add_duration(self, seconds: float) -> None:
        """Note how long one item took from encoded to landed."""
        self.encoded_to_landed_s.append(seconds)
        del self.encoded_to_landed_s[:-MAX_DURATIONS]

    def merge(self, other: Counters) -> None:
        """Add the counts of ``other``, and its durations as the newer ones."""
        for name, count in other.counts().items():
            self.add(name, count)
        self.encoded_to_landed_s.extend(other.encoded_to_landed_s)
        del self.encoded_to_landed_s[:-MAX_DURATIONS]

    def take(self) -> Counters:
        """What was counted since the last ``take``; this one starts again at zero."""
        taken = Counters()
        taken.merge(self)
        for name in COUNTS:
            setattr(self, name, 0)
        self.encoded_to_landed_s.clear()
        return taken

    def counts(self) -> dict[str, int]:
        """The counts alone, by name."""
        return {name: getattr(self, name) for name in COUNTS}

    @classmethod
    def from_peer(cls, counts: Mapping[str, float], durations_s: Sequence[float] = ()) -> Self:
        """Counters as they came over the wire; at most the newest MAX_DURATIONS durations.

        Unknown names are ignored: the sender may be of a newer version.
        """
        made = cls(encoded_to_landed_s=list(durations_s[-MAX_DURATIONS:]))
        for name in COUNTS:
            made.add(name, int(counts.get(name, 0)))
        return made

    def snapshot(self) -> dict[str, float]:
        """Flat, for people and exporters: the counts, and quantiles of the durations.

        A quantile is the smallest kept duration that at least that share of the kept ones
        does not exceed, in seconds; 0 where there is none.
        """
        flat: dict[str, float] = dict(self.counts())
        ordered = sorted(self.encoded_to_landed_s)
        flat["encoded_to_landed_s_count"] = len(ordered)
        for label, share in _QUANTILES:
            flat[f"encoded_to_landed_s_{label}"] = _quantile(ordered, share)
        return flat


COUNTS = tuple(counter.name for counter in fields(Counters) if isinstance(counter.default, int))
"""Names of the counts, in the order of their declaration."""


def _quantile(ordered: list[float], share: float) -> float:
    if not ordered:
        return 0.0
    return ordered[math.ceil(share * len(ordered)) - 1]
