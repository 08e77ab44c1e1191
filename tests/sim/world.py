# SPDX-License-Identifier: Apache-2.0
"""A world of one encode engine and one prefill engine, made from one seed.

Owns who is there and what happens to them. What must hold is asserted where it can be
seen: by the processes after every event, by the memory at every write, by the head at
every landing, and by ``assert_at_rest`` at the end.
"""

from epd_connector.core.send_events import Claim, Ended, Skipped
from epd_connector.errors import Code, Failure
from tests.sim.encode import EncodeEngine, EncodeProcess
from tests.sim.ground import Ground
from tests.sim.network import Weather
from tests.sim.prefill import PrefillEngine, PrefillProcess
from tests.sim.scripted import RECEIVE_SLAB, ScriptedHead

OVER = Failure(Code.ENCODE_FAILED, "the request is over")
MAX_ROWS = 24


class World(Ground):
    """Two engines, the network between them, and ``rooms`` items to transfer until calm."""

    def __init__(self, seed: int, weather: Weather, rooms: int) -> None:
        super().__init__(seed, weather)
        self.landed = 0
        self.encode = EncodeEngine(self, "encode", self.rng.randint(1, 3))
        self.ranks = self.rng.randint(1, 4)
        self.prefill = self._new_prefill()
        self.dead_prefills: list[PrefillEngine] = []
        for number in range(1, rooms + 1):
            self._plan_room(number)
        self.plan(weather.cuts, self._cut)
        self.plan(weather.encode_deaths, self._restart_encode)
        self.plan(weather.prefill_deaths, self._restart_prefill)

    def encode_ranks(self) -> list[EncodeProcess]:
        return self.encode.ranks

    def prefill_ranks(self) -> list[PrefillProcess]:
        return self.prefill.ranks

    def run(self) -> None:
        """To the end of all deadlines after the weather has calmed."""
        self.timeline.run(self.weather.calm_at + 120.0)

    def assert_at_rest(self) -> None:
        for encode in self.encode.ranks:
            encode.assert_at_rest()
        assert isinstance(self.prefill.head, ScriptedHead)
        self.prefill.head.assert_at_rest()
        for prefill in self.prefill.ranks:
            assert prefill.machine.idle(), prefill.machine.rooms()
            assert not prefill.memory.owners

    def skip(self, room: int) -> None:
        """The prefill head tells the encode head that it does not need ``room`` any more."""
        if not self.unlucky(0.3):
            self.encode.tell(Skipped(room))

    # --- what happens -----------------------------------------------------------------

    def _plan_room(self, number: int) -> None:
        """A request brings one item to both engines, in any order, or to one of them only."""
        rng, when = self.rng, self.rng.uniform(0.0, self.weather.calm_at)
        hash = f"item-{rng.randrange(1 + number // 2)}"
        rows = 1 + sum(map(ord, hash)) * 7 % MAX_ROWS
        claim = when + rng.uniform(0.0, 0.5)
        rough = self.weather.mishaps
        if not rough or rng.random() > 0.05:
            self.timeline.at(claim, lambda: self.encode.tell(Claim(number, hash, rows)))
        if not rough or rng.random() > 0.05:
            encoded = claim + 0.05 + rng.uniform(0.0, 0.5)
            self.timeline.at(encoded, lambda: self.encode.encoded(hash, rows))
        else:
            self.timeline.at(claim + 1.0, lambda: self.encode.tell(Ended(number, OVER)))
        if not rough or rng.random() > 0.05:
            wanted = when + rng.uniform(0.0, 0.5)
            self.timeline.at(wanted, lambda: self._want(number, hash, rows))

    def _want(self, room: int, hash: str, rows: int) -> None:
        assert isinstance(self.prefill.head, ScriptedHead)
        self.prefill.head.want(room, hash, rows)

    def _cut(self) -> None:
        encode = self.rng.choice(self.encode.ranks)
        prefill = self.rng.choice(self.prefill.ranks)
        self.network.cut(encode.incarnation, prefill.incarnation, self.rng.choice((0.5, 3.0, 8.0)))

    def _restart_encode(self) -> None:
        self.encode.restart()

    def _restart_prefill(self) -> None:
        self.prefill.kill()
        self.dead_prefills.append(self.prefill)
        self.prefill = self._new_prefill()

    def _new_prefill(self) -> PrefillEngine:
        engine = PrefillEngine(self, self.ranks, RECEIVE_SLAB)
        engine.head = ScriptedHead(self, engine)
        return engine
