# SPDX-License-Identifier: Apache-2.0
"""Virtual time, and a network that loses, repeats, delays and reorders what it carries.

Owns when something happens and whether a frame arrives. Knows nothing of what is in it.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass


class Timeline:
    """What is to happen, in the order of its time. Seconds from the start of the world."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, act: Callable[[], None]) -> None:
        """``act`` happens at ``when``, or now if that has passed."""
        self.steps += 1
        heapq.heappush(self._queue, (max(when, self.now), self.steps, act))

    def after(self, delay: float, act: Callable[[], None]) -> None:
        self.at(self.now + delay, act)

    def run(self, until: float) -> None:
        """Everything up to ``until``."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        self.now = until


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

    def set(self) -> None:
        when = self._due()
        if when is not None and (self._when is None or when < self._when):
            self._when = when
            self._timeline.at(when, lambda: self._rings(when))

    def _rings(self, when: float) -> None:
        if self._when == when:
            self._when = None
            self._ring()


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad things are until ``calm_at``; from then on nothing goes wrong.

    ``mishaps``: requests that are given up early, copies that fail, sides that never hear of
    an item. The rest are shares of frames that are lost, repeated, late; of writes that are
    slow, that fail; how often (per second) some pair of processes is cut off, and some
    engine is killed.
    """

    calm_at: float
    mishaps: bool = True
    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    slow_writes: float = 0.0
    failed_writes: float = 0.0
    cuts: float = 0.0
    encode_deaths: float = 0.0
    prefill_deaths: float = 0.0


MOST_LATE_S = 3.0


class Network:
    """Carries frames between processes, which it knows by their incarnations."""

    def __init__(self, timeline: Timeline, weather: Weather, rng: random.Random) -> None:
        self._timeline = timeline
        self._weather = weather
        self._rng = rng
        self._cut: dict[frozenset[int], float] = {}
        self._dead: set[int] = set()

    def kill(self, process: int) -> None:
        """What the process had sent and was sent does not arrive: its connections are gone."""
        self._dead.add(process)

    def cut(self, one: int, other: int, seconds: float) -> None:
        """Nothing passes between two processes for a while."""
        self._cut[frozenset((one, other))] = self._timeline.now + seconds

    def carry(self, sender: int, receiver: int, deliver: Callable[[], None]) -> None:
        """``deliver`` happens when the frame arrives: not at all, once or twice, in any order."""
        weather, rng = self._weather, self._rng
        rough = self._timeline.now < weather.calm_at
        if rough and rng.random() < weather.lost:
            return
        copies = 1 + (rough and rng.random() < weather.repeated)
        for _ in range(copies):
            delay = rng.uniform(0.0005, 0.005)
            if rough and rng.random() < weather.late:
                delay = rng.uniform(0.005, MOST_LATE_S)
            self._timeline.after(delay, lambda: self._arrive(sender, receiver, deliver))

    def _arrive(self, sender: int, receiver: int, deliver: Callable[[], None]) -> None:
        if sender in self._dead or receiver in self._dead:
            return
        if self._timeline.now < self._cut.get(frozenset((sender, receiver)), 0.0):
            return
        deliver()
