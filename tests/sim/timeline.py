# SPDX-License-Identifier: Apache-2.0
"""Virtual time: what is to happen, in the order of its time.

Owns when something happens. Knows nothing of what it is.
"""

import heapq
from collections.abc import Callable

from tests.sim.invariants import DeadlinesAreKept

MOST_RINGS = 10
"""Times that a machine may be told of one moment."""
TIMER_LATE_S = 1e-6
"""Seconds by which a timer may be late in a world where nothing else is."""


class Timeline:
    """Seconds from the start of the world. ``steps``: how much was handed to somebody so far."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._serial = 0
        self._queue: list[tuple[float, int, Callable[[], None], bool]] = []

    def at(self, when: float, act: Callable[[], None], *, counts: bool = True) -> None:
        """``act`` happens at ``when``, or now if that has passed. ``counts``: it is a step."""
        self._serial += 1
        heapq.heappush(self._queue, (max(when, self.now), self._serial, act, counts))

    def after(self, delay: float, act: Callable[[], None]) -> None:
        self.at(self.now + delay, act)

    def run(self, until: float) -> None:
        """Everything up to ``until``."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, act, counts = heapq.heappop(queue)
            self.steps += counts
            act()
        self.now = max(self.now, until)


class Alarm:
    """Rings when what it watches is due; ``set`` looks again, and an earlier time replaces a later.

    ``due``: when that is, or None. ``ring`` may set the alarm anew.
    """

    def __init__(
        self, timeline: Timeline, due: Callable[[], float | None], ring: Callable[[], None]
    ) -> None:
        self._timeline = timeline
        self._due = due
        self._ring = ring
        self._when: float | None = None
        self._rang_at = -1.0
        self._rings_in_vain = 0

    def set(self) -> None:
        when = self._due()
        if when is not None and (self._when is None or when < self._when):
            self._when = when
            self._timeline.at(when, lambda: self._rings(when), counts=False)

    def _rings(self, when: float) -> None:
        if self._when == when:
            self._when = None
            self._hold_is_new()
            self._timeline.steps += 1
            self._ring()

    def _hold_is_new(self) -> None:
        """A machine that is not content when it was told what time it is would spin."""
        again = self._timeline.now == self._rang_at
        self._rings_in_vain = self._rings_in_vain + 1 if again else 0
        self._rang_at = self._timeline.now
        DeadlinesAreKept.hold(
            self._rings_in_vain < MOST_RINGS, f"the alarm rings for ever at {self._rang_at}"
        )
