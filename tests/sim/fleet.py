# SPDX-License-Identifier: Apache-2.0
"""A world of several encode and prefill engines with their real heads, made from one seed.

Owns who is there and what happens to them: requests of several items, shared between them;
engines that are cut off, restarted or killed. What must hold is asserted where it can be
seen, and by ``assert_at_rest`` at the end.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from epd_connector.core.admission_state import ItemSpec
from epd_connector.core.effects import Reply, Send
from epd_connector.core.encode_head import RequestOver
from epd_connector.core.send_events import Claim
from epd_connector.errors import Code, Failure
from tests.sim.encode import EncodeProcess
from tests.sim.ground import Ground
from tests.sim.heads import MODALITY, EncodeHost, PrefillHost
from tests.sim.jobs import End, Job, Scheduler
from tests.sim.network import Weather
from tests.sim.prefill import PrefillProcess

RECOVERY_S = 30.0
"""Seconds of calm after which everything works again."""
OVER = Failure(Code.ENCODE_FAILED, "the request is over")
MAX_ROWS = 60
ITEMS = 12


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranks of each encode engine and of each prefill engine, and its slab's bytes."""

    encode: tuple[int, ...]
    prefill: tuple[int, ...]
    slab_nbytes: int


class Fleet(Ground):
    """Encode and prefill engines, and ``requests`` until it is calm.

    Long after that, every prefill engine gets one last request for each encode engine.
    """

    def __init__(
        self, seed: int, weather: Weather, requests: int, shape: Shape | None = None
    ) -> None:
        super().__init__(seed, weather)
        self.shape = shape or self._draw_shape()
        self.encodes = {
            f"encode-{number}": EncodeHost(self, f"encode-{number}", ranks)
            for number, ranks in enumerate(self.shape.encode)
        }
        self.schedulers = [self._new_prefill(ranks) for ranks in self.shape.prefill]
        self.gone: list[Scheduler] = []
        for number in range(requests):
            self._plan_request(f"request-{number}")
        self._plan_last_requests()
        self.plan(weather.cuts, self._cut)
        self.plan(weather.encode_deaths, self._restart_encode)
        self.plan(weather.prefill_deaths, self._restart_prefill)

    def run(self, seconds_of_calm: float) -> None:
        self.timeline.run(self.weather.calm_at + seconds_of_calm)

    def jobs(self) -> list[Job]:
        """Every request that has ended."""
        return [job for scheduler in [*self.gone, *self.schedulers] for job in scheduler.ended]

    def ends(self) -> Counter[End | None]:
        """How many requests ended in which way, the last ones aside."""
        return Counter(job.end for job in self.jobs() if not job.request.startswith("last"))

    def assert_at_rest(self) -> None:
        last = [job for job in self.jobs() if job.request.startswith("last")]
        assert len(last) == len(self.schedulers) * len(self.encodes)
        for job in last:
            assert job.end is End.LOADED, f"{job.request} after the storm: {job.failure}"
        for scheduler in self.schedulers:
            assert not scheduler.jobs, f"requests {list(scheduler.jobs)} never ended"
            scheduler.host.assert_at_rest()
        self.assert_encode_at_rest()

    def assert_encode_at_rest(self) -> None:
        for process in self.encode_ranks():
            process.assert_at_rest()

    # --- who is there -----------------------------------------------------------------

    def encode_ranks(self) -> Iterator[EncodeProcess]:
        for host in self.encodes.values():
            yield from host.engine.ranks

    def prefill_ranks(self) -> Iterator[PrefillProcess]:
        for scheduler in self.schedulers:
            yield from scheduler.host.engine.ranks

    def to_encode_head(self, sender: PrefillHost, effect: Send) -> None:
        host = self.encodes[effect.endpoint.removeprefix("tcp://")]
        if host.engine.ranks:
            hear = partial(host.hear, sender.incarnation, effect.frame)
            self.network.carry(sender.incarnation, host.incarnation, hear)

    def to_prefill_head(self, sender: EncodeHost, effect: Reply) -> None:
        for scheduler in self.schedulers:
            host = scheduler.host
            if host.incarnation == effect.route:
                hear = partial(host.hear_head, sender.address, effect.frame)
                self.network.carry(sender.incarnation, host.incarnation, hear)

    def _draw_shape(self) -> Shape:
        rng = self.rng
        slab = rng.choice((1024, 2048, 4096)) if self.weather.mishaps else 1 << 15
        encode = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 2)))
        prefill = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 2)))
        return Shape(encode, prefill, slab)

    def _new_prefill(self, ranks: int) -> Scheduler:
        return Scheduler(PrefillHost(self, ranks, self.shape.slab_nbytes))

    # --- requests ---------------------------------------------------------------------

    def plan_item(
        self, name: str, when: float, address: str, *places: int, encoded_after_s: float = 0.1
    ) -> None:
        """A request of one item comes to its encode engine and to a prefill engine, as it should.

        More ``places`` than one is what must not be: they are told of one room.
        """
        spec = ItemSpec(name, MAX_ROWS, MODALITY, self.new_id(), address)
        for place in places:
            self.timeline.at(when, partial(self._start, place, name, (spec,)))
        self.timeline.at(when, partial(self._encode, spec, encoded_after_s))

    def _plan_request(self, name: str) -> None:
        """A request of some items comes to a prefill engine and to their encode engines."""
        rng, when = self.rng, self.rng.uniform(0.0, self.weather.calm_at)
        items = tuple(self._draw_item() for _ in range(rng.randint(1, 4)))
        place = rng.randrange(len(self.schedulers))
        self.timeline.at(when + rng.uniform(0.0, 0.5), lambda: self._start(place, name, items))
        for spec in items:
            if spec.room is not None:
                self._plan_encode(spec, spec.room, when)

    def _plan_last_requests(self) -> None:
        when = self.weather.calm_at + RECOVERY_S
        for place in range(len(self.schedulers)):
            for address in self.encodes:
                self.plan_item(f"last-{place}-{address}", when, address, place)
                when += 1.0

    def _encode(self, spec: ItemSpec, takes_s: float) -> None:
        """The encode engine's half of an item, as it should be."""
        assert spec.room is not None
        engine = self.encodes[spec.address].engine
        engine.tell(Claim(spec.room, spec.hash, spec.rows))
        self.timeline.after(takes_s, lambda: engine.encoded(spec.hash, spec.rows))

    def _draw_item(self) -> ItemSpec:
        hash = f"item-{self.rng.randrange(ITEMS)}"
        rows = 1 + sum(map(ord, hash)) * 7 % MAX_ROWS
        rough = self.weather.mishaps
        if rough and self.rng.random() < 0.03:
            return ItemSpec(hash, rows, MODALITY)
        address = self.rng.choice(list(self.encodes))
        encodable = rough and self.rng.random() < 0.5
        return ItemSpec(hash, rows, MODALITY, self.new_id(), address, encodable)

    def _start(self, place: int, name: str, items: tuple[ItemSpec, ...]) -> None:
        scheduler = self.schedulers[place]
        scheduler.start(name, items)
        after = partial(self.timeline.after, self.rng.uniform(0.0, 5.0))
        if self.unlucky(0.1):
            after(lambda: scheduler.abort(name))
        elif self.unlucky(0.1):
            after(lambda: scheduler.spare(name, items[0].hash))

    def _plan_encode(self, spec: ItemSpec, room: int, when: float) -> None:
        """The encode engine's half of one item; it may come late, halfway, or not at all."""
        rng, host = self.rng, self.encodes[spec.address]
        claim = when + rng.uniform(0.0, 0.5)
        encoded = claim + 0.05 + rng.uniform(0.0, 0.5)
        rough = self.weather.mishaps
        if not rough or rng.random() > 0.03:
            event = Claim(room, spec.hash, spec.rows)
            self.timeline.at(claim, lambda: host.engine.tell(event))
        if not rough or rng.random() > 0.03:
            self.timeline.at(encoded, lambda: host.engine.encoded(spec.hash, spec.rows))
        self.timeline.at(encoded + 0.2, lambda: host.tell(RequestOver((room,), OVER)))

    # --- disasters --------------------------------------------------------------------

    def _cut(self) -> None:
        """No word passes between two engines for a while."""
        encode = self.rng.choice(list(self.encodes.values()))
        prefill = self.rng.choice(self.schedulers).host
        seconds = self.rng.choice((0.5, 3.0, 8.0, 15.0))
        for one in [encode.incarnation, *(rank.incarnation for rank in encode.engine.ranks)]:
            others = [rank.incarnation for rank in prefill.engine.ranks]
            for other in [prefill.incarnation, *others]:
                self.network.cut(one, other, seconds)

    def _restart_encode(self) -> None:
        host = self.rng.choice(list(self.encodes.values()))
        host.stop()
        self.timeline.after(self.rng.choice((0.0, 1.0, 6.0)), host.start)

    def _restart_prefill(self) -> None:
        place = self.rng.randrange(len(self.schedulers))
        before = self.schedulers[place]
        before.kill()
        self.gone.append(before)
        self.schedulers[place] = self._new_prefill(self.shape.prefill[place])
