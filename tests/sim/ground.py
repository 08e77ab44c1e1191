# SPDX-License-Identifier: Apache-2.0
"""What every world stands on: one seed, one clock, one network, memory, and bad luck.

Who is there, and what happens to them, is up to the world that is built on it.
"""

import random
from collections.abc import Callable, Iterable

from tests.sim.memory import Fabric
from tests.sim.network import Network
from tests.sim.process import Process
from tests.sim.timeline import Timeline
from tests.sim.trace import KEPT, Trace
from tests.sim.weather import Weather


class Ground:
    """Everything is drawn from ``rng``, so that one seed is one world."""

    def __init__(self, rng: random.Random, weather: Weather, kept: int | None = KEPT) -> None:
        self.rng = rng
        self.timeline = Timeline()
        self.weather = weather
        self.trace = Trace(kept)
        self.network = Network(self.timeline, weather, self.rng)
        self.fabric = Fabric(self.timeline, self.network, weather, self.rng)
        self.processes: dict[int, Process] = {}
        self._ids = 0

    @property
    def now(self) -> float:
        return self.timeline.now

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def note(self, who: str, what: object, asked: Iterable[object] = ()) -> None:
        self.trace.note(self.timeline.now, who, what, asked)

    def unlucky(self, share: float) -> bool:
        """Whether something with this share goes wrong now."""
        rough = self.weather.mishaps and self.now < self.weather.calm_at
        return rough and self.rng.random() < share

    def soon(self, act: Callable[[], None], most: float = 0.05) -> None:
        self.timeline.after(self.rng.uniform(0.0, most), act)

    def plan(self, per_second: float, act: Callable[[], None]) -> None:
        """``act`` happens so often, at random times, until it is calm."""
        when = 0.0
        while per_second > 0 and (when := when + self.rng.expovariate(per_second)) < (
            self.weather.calm_at
        ):
            self.timeline.at(when, act)
