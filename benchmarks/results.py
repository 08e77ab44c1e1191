# SPDX-License-Identifier: Apache-2.0
"""What a run of the benchmark comes to: series, goals, their tables, their file.

Owns statistics of series and their looks. Does not own what is measured: each section module
has ``measure(quick) -> Measured``. Pure, but for ``write``.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import median, percentile


@dataclass(frozen=True, slots=True)
class Series:
    """One thing that was measured: ``values`` in ``unit``, in the order of their rounds."""

    section: str
    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The value in the middle."""
        return median(self.values)

    def as_json(self) -> dict[str, object]:
        """For the file: with the spread, from the first to the last tenth."""
        return {
            "section": self.section,
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "p10": percentile(self.values, 0.1),
            "p90": percentile(self.values, 0.9),
            "values": list(self.values),
        }


@dataclass(frozen=True, slots=True)
class Goal:
    """``value``, in ``unit``, is to be at most ``goal``."""

    name: str
    unit: str
    goal: float
    value: float

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.value <= self.goal

    def as_json(self) -> dict[str, object]:
        """For the file."""
        return {
            "name": self.name,
            "unit": self.unit,
            "goal": self.goal,
            "value": self.value,
            "met": self.met,
        }


@dataclass(frozen=True, slots=True)
class Measured:
    """What a section has found."""

    series: list[Series] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(self.series + other.series, self.goals + other.goals)


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of ``values`` over ``base``, round by round.

    Raises ValueError where they are not of the same rounds.
    """
    return median([value / under for value, under in zip(values, base, strict=True)])


def excess(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of ``values`` minus ``base``, round by round.

    Raises ValueError where they are not of the same rounds.
    """
    return median([value - under for value, under in zip(values, base, strict=True)])


def series_table(series: Sequence[Series]) -> str:
    """For people: one line per series."""
    wide = max((len(s.name) for s in series), default=0) + 2
    head = f"{'section':<12}{'what':<{wide}}{'median':>10}{'p10':>10}{'p90':>10}  unit"
    lines = [head]
    for s in series:
        spread = f"{percentile(s.values, 0.1):>10.2f}{percentile(s.values, 0.9):>10.2f}"
        lines.append(f"{s.section:<12}{s.name:<{wide}}{s.median:>10.2f}{spread}  {s.unit}")
    return "\n".join(lines)


def goals_table(goals: Sequence[Goal]) -> str:
    """For people: goal and result side by side."""
    wide = max((len(g.name) for g in goals), default=0) + 2
    lines = [f"{'goal':<{wide}}{'at most':>10}{'result':>10}  {'unit':<10}met"]
    for g in goals:
        met = "yes" if g.met else "no"
        lines.append(f"{g.name:<{wide}}{g.goal:>10.2f}{g.value:>10.2f}  {g.unit:<10}{met}")
    return "\n".join(lines)


def write(path: Path, measured: Measured, conditions: Mapping[str, object]) -> None:
    """For programs: the conditions of the run, all series with every round, and the goals."""
    document = {
        "conditions": dict(conditions),
        "series": [s.as_json() for s in measured.series],
        "goals": [g.as_json() for g in measured.goals],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
