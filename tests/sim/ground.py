# SPDX-License-Identifier: Apache-2.0
"""What every world stands on: one seed, one clock, one network, memory, and bad luck.

Owns how frames of ranks find their way. Who is there, and what happens to them, is up to
the world that is built on it.
"""

import random
from collections.abc import Callable, Iterable
from functools import partial

from epd_connector.core.effects import Reply, Send
from tests.sim.encode import EncodeProcess
from tests.sim.memory import Fabric
from tests.sim.network import Network, Timeline, Weather
from tests.sim.prefill import PrefillProcess


class Ground:
    """Everything is drawn from ``seed``, so that one seed is one world."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.rng = random.Random(seed)
        self.timeline = Timeline()
        self.weather = weather
        self.network = Network(self.timeline, weather, self.rng)
        self.fabric = Fabric(self.timeline, weather, self.rng)
        self._ids = 0

    @property
    def now(self) -> float:
        return self.timeline.now

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def unlucky(self, share: float) -> bool:
        """Whether something with this share goes wrong now."""
        rough = self.weather.mishaps and self.now < self.weather.calm_at
        return rough and self.rng.random() < share

    def soon(self, act: Callable[[], None]) -> None:
        self.timeline.after(self.rng.uniform(0.0, 0.05), act)

    def plan(self, per_second: float, act: Callable[[], None]) -> None:
        """``act`` happens so often, at random times, until it is calm."""
        when = 0.0
        while per_second > 0 and (when := when + self.rng.expovariate(per_second)) < (
            self.weather.calm_at
        ):
            self.timeline.at(when, act)

    def encode_ranks(self) -> Iterable[EncodeProcess]:
        """Every encode rank that is up."""
        raise NotImplementedError

    def prefill_ranks(self) -> Iterable[PrefillProcess]:
        """Every prefill rank that is up."""
        raise NotImplementedError

    def listens(self, endpoint: str) -> bool:
        """Whether a process takes connections at ``endpoint``; its host is up in any case."""
        return any(process.endpoint == endpoint for process in self.encode_ranks())

    def hang_up(self, endpoint: str) -> None:
        """The process at ``endpoint`` was killed: whoever had dialed it sees that."""
        for process in self.prefill_ranks():
            process.hang_up(endpoint)

    def to_encode(self, sender: PrefillProcess, effect: Send) -> None:
        for process in self.encode_ranks():
            if process.endpoint == effect.endpoint:
                hear = partial(process.hear, sender.incarnation, effect.addressee, effect.frame)
                self.network.carry(sender.incarnation, process.incarnation, hear)

    def to_prefill(self, sender: EncodeProcess, effect: Reply) -> None:
        for process in self.prefill_ranks():
            if process.incarnation == effect.route:
                who = (sender.endpoint, sender.incarnation, effect.addressee)
                hear = partial(process.hear, *who, effect.frame)
                self.network.carry(sender.incarnation, process.incarnation, hear)
