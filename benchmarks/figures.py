# SPDX-License-Identifier: Apache-2.0
"""What a run of measurements comes to: figures, their table, their file.

Owns statistics and their looks. Pure.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One configuration and size. Times are milliseconds from ``save_caches``.

    ``sent_share``: bytes sent by the encode engine over the items' bytes, in the whole run.
    """

    connector: str
    transport: str
    layout: str
    ranks: int
    megabytes: str
    nbytes: int
    rounds: int
    median_ms: float
    p90_ms: float
    ready_median_ms: float
    sent_share: float
    published_ms: tuple[float, ...]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    return statistics.median(values)


def table(figures: Sequence[Figure]) -> str:
    """For people: one line per figure."""
    head = (
        f"{'connector':<10}{'transport':<10}{'layout':<8}{'ranks':>5}{'MB':>7}"
        f"{'median ms':>11}{'p90 ms':>9}{'ready ms':>10}{'sent':>6}"
    )
    lines = [
        f"{f.connector:<10}{f.transport:<10}{f.layout:<8}{f.ranks:>5}{f.megabytes:>7}"
        f"{f.median_ms:>11.2f}{f.p90_ms:>9.2f}{f.ready_median_ms:>10.2f}{f.sent_share:>6.2f}"
        for f in figures
    ]
    return "\n".join([head, *lines])


def write_json(path: Path, figures: Sequence[Figure], conditions: dict[str, object]) -> None:
    """For programs: the conditions of the run and all figures, with every round."""
    document = {"conditions": conditions, "figures": [dataclasses.asdict(f) for f in figures]}
    path.write_text(json.dumps(document, indent=2) + "\n")
