# SPDX-License-Identifier: Apache-2.0
"""A world of several encode and prefill engines with their real heads, made from one seed.

Owns who is there, how frames find their way, and the requests: of several items, shared between
them. What goes wrong is drawn in ``disasters``. What must hold is held where it can be seen,
now and then of everything (``sweep``), and at the end (``hold_rest``).
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from epd_connector.core.admission_state import ItemSpec
from epd_connector.core.effects import Reply
from epd_connector.core.encode_head import RequestOver
from epd_connector.core.send_events import Claim
from epd_connector.errors import Code, Failure
from tests.sim.disasters import Disasters
from tests.sim.encode import MODALITY, EncodeEngine, EncodeHeadProcess, EncodeProcess
from tests.sim.ground import Ground
from tests.sim.heads import PrefillHeadProcess
from tests.sim.invariants import NothingIsKeptForNobody, RequestsEndOnce, TheNextRequestWorks
from tests.sim.jobs import End, Job
from tests.sim.network import Host
from tests.sim.prefill import PrefillEngine, PrefillProcess
from tests.sim.process import MachineProcess, Process
from tests.sim.scheduler import Scheduler
from tests.sim.trace import KEPT
from tests.sim.weather import Shape, Weather, draw_shape

RECOVERY_S = 45.0
"""Seconds of calm after which everything works again."""
REST_S = 100.0
"""Seconds of calm after which nothing is left of what was before."""
SOON_S = 5.0
"""Seconds after which an encode engine holds nothing of a request that was served; before
``offer_timeout_s`` would end it."""
SWEEP_S = 1.0
OVER = Failure(Code.ENCODE_FAILED, "the request is over")
MAX_ROWS = 60
LAST = "last"


class Fleet(Ground):
    """Encode and prefill engines, and ``requests`` until it is calm.

    Long after that, every prefill engine gets one last request for each encode engine.
    """

    def __init__(
        self,
        seed: int | random.Random,
        weather: Weather,
        requests: int,
        shape: Shape | None = None,
        kept: int | None = KEPT,
    ) -> None:
        rng = seed if isinstance(seed, random.Random) else random.Random(seed)
        super().__init__(rng, weather, kept)
        self.shape = shape or draw_shape(rng)
        self.fabric.direct = self.shape.direct
        self.encodes: dict[str, EncodeEngine] = {}
        self.schedulers: dict[int, Scheduler] = {}
        self.gone: list[Scheduler] = []
        self.asked = 0
        self._starts = 0
        for place in range(len(self.shape.encode)):
            self.start_encode(place, f"encode-{place}")
        for place in range(len(self.shape.prefill)):
            self.start_prefill(place, f"prefill-{place}")
        when = 0.0
        for number in range(requests):
            # Some come at once, so that they want the same items and the same memory.
            if not (self.shape.bursts and rng.random() < 0.6):
                when = rng.uniform(0.0, weather.calm_at)
            self.timeline.at(when, partial(self._request, f"request-{number}"))
        self.timeline.at(weather.calm_at + RECOVERY_S, self._last_requests)
        self._plan_sweeps()
        self.disasters = Disasters(self)

    # --- who is there -----------------------------------------------------------------

    def start_encode(self, place: int, host: str) -> EncodeEngine:
        """The encode engine at ``place`` starts, at the address it had there, or another."""
        self._starts += 1
        name, ranks = f"encode-{place}#{self._starts}", self.shape.encode[place]
        engine = EncodeEngine(self, name, self.network.host(host), 100 * (place + 1), ranks)
        self.encodes[f"encode-{place}"] = engine
        self.processes.update((p.incarnation, p) for p in engine.processes())
        self.note(name, f"starts at {engine.address}")
        return engine

    def start_prefill(self, place: int, host: str) -> Scheduler:
        self._starts += 1
        shape, name = self.shape, f"prefill-{place}#{self._starts}"
        ranks = shape.prefill[place]
        shares = shape.shares[place] if shape.shares is not None else self._draw_shares(ranks)
        where = self.network.host(host)
        engine = PrefillEngine(self, name, where, ranks, shape.slab_nbytes, shares)
        head = PrefillHeadProcess(self, name, where, engine)
        scheduler = self.schedulers[place] = Scheduler(head, shape.cache_items)
        self.processes.update((p.incarnation, p) for p in head.processes())
        self.note(name, f"starts on {host}, {ranks} ranks")
        return scheduler

    def _draw_shares(self, ranks: int) -> bool:
        return ranks > 1 and self.rng.random() < 0.4

    def encode_ranks(self) -> Iterator[EncodeProcess]:
        for engine in self.encodes.values():
            yield from (process for process in engine.ranks if process.alive)

    def prefill_ranks(self) -> Iterator[PrefillProcess]:
        for scheduler in self.schedulers.values():
            yield from scheduler.head.engine.ranks

    # --- how frames of encode engines find their way ----------------------------------

    def to_prefill_rank(self, sender: EncodeProcess, effect: Reply) -> None:
        def deliver(receiver: Process) -> None:
            assert isinstance(receiver, PrefillProcess)
            receiver.hear(sender.endpoint, sender.incarnation, effect.addressee, effect.frame)

        self.network.carry(sender, self.processes[effect.route], deliver)

    def to_prefill_head(self, sender: EncodeHeadProcess, effect: Reply) -> None:
        def deliver(receiver: Process) -> None:
            assert isinstance(receiver, PrefillHeadProcess)
            receiver.hear_head(sender.address, effect.frame)

        self.network.carry(sender, self.processes[effect.route], deliver)

    # --- requests ---------------------------------------------------------------------

    def plan_item(
        self, name: str, when: float, encode: str, *places: int, encoded_after_s: float = 0.1
    ) -> None:
        """A request of one item comes to encode engine ``encode`` and a prefill engine at ``when``.

        More ``places`` than one is what must not be: they are told of one room.
        """

        def arrive() -> None:
            self._item_for_all(name, encode, places, encoded_after_s)

        self.timeline.at(when, arrive)

    def _item_for_all(
        self,
        name: str,
        encode: str,
        places: tuple[int, ...],
        encoded_after_s: float,
        twice: bool = False,
    ) -> set[int]:
        engine = self.encodes[encode]
        spec = ItemSpec(name, MAX_ROWS, MODALITY, self.new_id(), engine.address)
        specs = (spec, self._same_item(spec)) if twice else (spec,)
        for place in places:
            self._start(place, name, specs)
        for each in specs:
            assert each.room is not None
            engine.tell(Claim(each.room, spec.hash, spec.rows))
        self.timeline.after(encoded_after_s, lambda: engine.encoded(spec.hash, spec.rows))
        return {each.room for each in specs if each.room is not None}

    def crowd(self, encode: str, names: Iterable[str]) -> None:
        """Requests of one item each come at once, to ``encode`` in another order than to the
        prefill engines."""
        engine = self.encodes[encode]
        for name in names:
            room = self.new_id()
            spec = ItemSpec(name, MAX_ROWS, MODALITY, room, engine.address)
            place = self.rng.choice(list(self.schedulers))
            self.timeline.after(
                self.rng.uniform(1.0, 1.5), partial(self._start, place, name, (spec,))
            )
            self.timeline.at(1.0, partial(self._encode, spec, room))

    def _request(self, name: str) -> None:
        """A request of some items comes to a prefill engine and to their encode engines."""
        rng = self.rng
        items = tuple(self._draw_item() for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4))))
        if len(items) > 1 and self.unlucky(0.15):
            # One picture, twice: each with a room of its own.
            first = items[0]
            items = (first, self._same_item(first), *items[2:])
        if not self.schedulers:
            return
        place = rng.choice(list(self.schedulers))
        self.timeline.after(rng.uniform(0.0, 0.5), partial(self._start, place, name, items))
        for spec in items:
            if spec.room is not None:
                self._encode(spec, spec.room)

    def _draw_item(self) -> ItemSpec:
        number = self.rng.randrange(self.shape.items)
        hash = f"item-{number}"
        rows = 1 + number * 17 % MAX_ROWS if self.shape.small_items else MAX_ROWS - number
        encodable = self.unlucky(self.shape.encodable)
        if self.unlucky(0.05):
            return ItemSpec(hash, rows, MODALITY, encodable=encodable)
        engine = self.rng.choice(list(self.encodes.values()))
        if not engine.alive and self.rng.random() < 0.7:
            # Whoever sends requests around notices after a while who is not there.
            engine = self.rng.choice(list(self.encodes.values()))
        return ItemSpec(hash, rows, MODALITY, self.new_id(), engine.address, encodable)

    def _same_item(self, spec: ItemSpec) -> ItemSpec:
        room = None if spec.room is None else self.new_id()
        return ItemSpec(spec.hash, spec.rows, spec.modality, room, spec.address, spec.encodable)

    def _start(self, place: int, name: str, items: tuple[ItemSpec, ...]) -> None:
        scheduler = self.schedulers.get(place)
        if scheduler is None or not scheduler.head.alive:
            return
        self.asked += 1
        scheduler.start(name, items)
        if self.unlucky(self.weather.aborts):
            self.soon(lambda: scheduler.abort(name), 5.0)
        elif items and self.unlucky(0.1):
            self.soon(lambda: scheduler.spare(name, items[0].hash), 2.0)

    def _encode(self, spec: ItemSpec, room: int) -> None:
        """The encode engine's half of one item; it may come late, halfway, or not at all."""
        engine = next(e for e in self.encodes.values() if e.address == spec.address)
        after = self.timeline.after
        claim = self.rng.uniform(0.0, 0.5)
        over = partial(after, 0.2, partial(engine.head.tell, RequestOver((room,), OVER)))
        encoded = claim + 0.06 + self.rng.uniform(0.0, 0.5)
        if not self.unlucky(0.04):
            after(claim, partial(engine.tell, Claim(room, spec.hash, spec.rows)))
            if not self.unlucky(0.04):
                after(encoded, partial(engine.encode, room, spec.hash, spec.rows, over))
                return
        after(encoded, over)

    def _last_requests(self) -> None:
        """One after the other, each for an item that is twice in its prompt."""
        wait = 0.0
        for place in self.schedulers:
            for name, engine in self.encodes.items():
                if engine.alive:
                    self.timeline.after(wait, partial(self._last_request, place, name))
                    wait += 1.0

    def _last_request(self, place: int, encode: str) -> None:
        rooms = self._item_for_all(f"{LAST}-{place}-{encode}", encode, (place,), 0.1, True)
        self.timeline.after(SOON_S, partial(self._hold_nothing_kept, rooms))

    def _hold_nothing_kept(self, rooms: set[int]) -> None:
        for process in self.encode_ranks():
            kept = rooms & process.machine.rooms().keys()
            NothingIsKeptForNobody.hold(
                not kept, lambda process=process, kept=kept: f"{process.name}: rooms {kept}"
            )

    # --- what must hold ---------------------------------------------------------------

    def run(self, seconds_of_calm: float = REST_S) -> None:
        self.timeline.run(self.weather.calm_at + seconds_of_calm)

    def jobs(self) -> list[Job]:
        """Every request that has ended."""
        return [job for s in [*self.gone, *self.schedulers.values()] for job in s.ended]

    def ends(self) -> Counter[End | None]:
        """How many requests ended in which way, the last ones aside."""
        return Counter(job.end for job in self.jobs() if not job.request.startswith(LAST))

    def sweep(self) -> None:
        """Holds what no event may ever come to show: silence, and deadlines that were forgotten."""
        for process in list(self.processes.values()):
            if process.alive and not process.frozen and isinstance(process, MachineProcess):
                process.audit()
        for scheduler in self.schedulers.values():
            scheduler.head.hold_held()
            scheduler.head.hold_progress()

    def _plan_sweeps(self) -> None:
        when = SWEEP_S
        while when < self.weather.calm_at + RECOVERY_S:
            self.timeline.at(when, self.sweep, counts=False)
            when += SWEEP_S

    def hold_rest(self) -> None:
        """Everything works again, and nothing is left of what was before."""
        jobs = self.jobs()
        for job in jobs:
            TheNextRequestWorks.hold(
                not job.request.startswith(LAST) or job.end is End.LOADED,
                lambda job=job: f"{job.request} after the storm: {job.failure}",
            )
        for scheduler in self.schedulers.values():
            left = list(scheduler.jobs)
            RequestsEndOnce.hold(not left, lambda left=left: f"{left} never ended")
        RequestsEndOnce.hold(
            len(jobs) == self.asked, lambda: f"{self.asked} requests came, {len(jobs)} ended"
        )
        for scheduler in self.schedulers.values():
            scheduler.head.hold_rest()
        self.hold_encode_rest()

    def hold_encode_rest(self) -> None:
        for process in self.encode_ranks():
            process.hold_rest()

    def host_of(self, name: str) -> Host:
        return self.network.host(name)
