# SPDX-License-Identifier: Apache-2.0
"""Section `item`: how long an item takes to all prefill ranks, against what none can beat.

Owns which of ``ranks``' configurations are compared, and the goals. Times are until the item
has landed on every rank and the prefill scheduler knows; publishing is a series of its own.
"""

from collections.abc import Callable, Sequence

from benchmarks import ranks
from benchmarks.ranks import Cell
from benchmarks.results import Goal, Measured, Series, excess, ratio

QUICK = ("--ranks", "1", "4", "--layout", "shared", "--rounds", "5", "--warmup", "1")
FULL = ("--layout", "shards", "shared", "--rounds", "15")

Compare = Callable[[Sequence[float], Sequence[float]], float]
# Size, ranks, what is done with the times and those of the baseline, and at most what.
_MOONCAKE: tuple[tuple[str, int, Compare, float], ...] = (
    ("0.26", 1, excess, 0.6),
    ("4.2", 1, ratio, 1.3),
    ("16.8", 1, ratio, 1.12),
    ("67.1", 1, ratio, 1.06),
    ("67.1", 4, ratio, 1.15),
)
_SHM: tuple[tuple[str, int, Compare, float], ...] = (
    ("16.8", 1, ratio, 1.15),
    ("16.8", 4, ratio, 1.15),
)
_BYTES_RANKS = 4


def measure(quick: bool) -> Measured:
    """See ``results``."""
    return compare(ranks.run(ranks.parse(QUICK if quick else FULL)))


def compare(cells: Sequence[Cell]) -> Measured:
    """Series of all ``cells``, and the goals that they are enough for."""
    found = Measured()
    for cell in cells:
        setup = cell.deployment.setup
        name = f"{setup.connector} {setup.transport} {setup.layout} x{setup.ranks}"
        name = f"{name} {cell.megabytes} MB"
        landed, published = _landed(cell), tuple(t.published_ms for t in cell.timings)
        found.series.append(Series("item", f"{name} landed", "ms", landed))
        found.series.append(Series("item", f"{name} published", "ms", published))
    found.goals.extend(_goals(cells, "mooncake", "raw", _MOONCAKE))
    found.goals.extend(_goals(cells, "shm", "copy", _SHM))
    for cell in _of(cells, "epd", "mooncake", _BYTES_RANKS, "67.1"):
        if cell.deployment.setup.layout != "whole":
            name = f"mooncake {cell.deployment.setup.layout}, {_BYTES_RANKS} ranks: bytes sent"
            found.goals.append(Goal(name, "x item", 1.0, round(cell.sent_share, 4)))
    return found


def _goals(
    cells: Sequence[Cell],
    transport: str,
    baseline: str,
    goals: Sequence[tuple[str, int, Compare, float]],
) -> list[Goal]:
    found = []
    for size, count, how, most in goals:
        base = next(iter(_of(cells, baseline, transport, 1, size)), None)
        for cell in _of(cells, "epd", transport, count, size) if base is not None else ():
            assert base is not None
            word, unit = ("minus", "ms") if how is excess else ("over", "x")
            layout = cell.deployment.setup.layout
            name = f"{transport} {size} MB {layout} x{count} {word} {baseline}"
            found.append(Goal(name, unit, most, how(_landed(cell), _landed(base))))
    return found


def _of(cells: Sequence[Cell], connector: str, transport: str, count: int, size: str) -> list[Cell]:
    return [
        cell
        for cell in cells
        if (connector, transport, count, size)
        == (
            cell.deployment.setup.connector,
            cell.deployment.setup.transport,
            cell.deployment.setup.ranks,
            cell.megabytes,
        )
    ]


def _landed(cell: Cell) -> tuple[float, ...]:
    return tuple(timing.ready_ms for timing in cell.timings)
