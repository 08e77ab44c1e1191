# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a prefill engine: passes in which it asks, promises and loads.

Owns what the host and the connector's adapter do with a prefill head's machine: what a request
needs, what the encoder cache holds, and which loads a step brings. Requests arrive, leave and
are preempted between two passes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from epd_connector.core.admission_state import (
    ItemSpec,
    Joined,
    Left,
    Loading,
    Needed,
    PassEnded,
    Promised,
    RequestState,
    Spared,
    Transfer,
)
from epd_connector.core.effects import RequestFailed
from epd_connector.core.transfer_words import lost
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import RoomLoaded
from tests.sim.cache import EncoderCache
from tests.sim.heads import PrefillHeadProcess
from tests.sim.invariants import PromisesAreKept, RequestsEndOnce
from tests.sim.jobs import End, Job

STEP_S = 0.25
PASS_S = 0.002
DECODES_S = 1.5


@dataclass(frozen=True, slots=True)
class Load:
    """Item ``hash`` gets an entry of the cache for ``job``; ``promised``: from the slab."""

    job: Job
    hash: str
    promised: bool


class Scheduler:
    """Requests of one start of a prefill engine, looked at in passes."""

    def __init__(self, head: PrefillHeadProcess, cache_items: int) -> None:
        self.head = head
        self.jobs: dict[str, Job] = {}
        self.ended: list[Job] = []
        self.paused = False
        self._machine = head.machine
        self._world = head.world
        self._cache = EncoderCache(cache_items)
        self._arrived: dict[str, Job] = {}
        self._loads: list[Load] = []
        self._promised = False
        self._stepping = False
        self._passing = False
        self._after_pass: list[Callable[[], None]] = []

    # --- what happens to requests -----------------------------------------------------

    def start(self, request: str, items: tuple[ItemSpec, ...]) -> None:
        """A request arrives."""
        job = self._arrived[request] = Job(request, items)
        self._between_passes(partial(self._start, job))

    def abort(self, request: str) -> None:
        """The client is gone."""
        self._between_passes(partial(self._abort, request))

    def spare(self, request: str, hash: str) -> None:
        """The tokens of one of its items are in the prefix cache, for good."""
        self._between_passes(partial(self._spare, request, hash))

    def preempt(self, pick: float) -> None:
        """Some running request (``pick``: which, from 0 to 1) gives everything up."""
        self._between_passes(partial(self._preempt, pick))

    def kill(self) -> None:
        """The engine ends, and everything with it."""
        self.head.kill()
        self.jobs.update(self._arrived)
        for job in list(self.jobs.values()):
            self._forget(job, End.KILLED)

    def _between_passes(self, act: Callable[[], None]) -> None:
        def do() -> None:
            if self._passing:
                self._after_pass.append(act)
            else:
                act()

        self.head.run(do, "scheduler")

    def _start(self, job: Job) -> None:
        self.jobs[job.request] = self._arrived.pop(job.request)
        self._world.note(self.head.name, job)
        if not self._stepping:
            self._stepping = True
            self._pass()

    def _abort(self, request: str) -> None:
        job = self.jobs.get(request)
        if job is not None:
            self._join(job)
            self._over(job, End.ABORTED)

    def _spare(self, request: str, hash: str) -> None:
        job = self.jobs.get(request)
        if job is not None and job.joined and hash in job.pending and hash not in job.refers:
            job.spared.add(hash)
            del job.pending[hash]
            self._tell_spared(job)

    def _preempt(self, pick: float) -> None:
        running = [job for job in self.jobs.values() if job.refers or job.computed_all]
        if running:
            job = running[int(pick * len(running))]
            self._world.note(self.head.name, f"{job.request} is preempted")
            job.starts_over()
            self._cache.left(job.request)

    def _over(self, job: Job, end: End) -> None:
        self._forget(job, end)
        self._cache.left(job.request)
        self.head.decide(Left(job.request))

    def _forget(self, job: Job, end: End) -> None:
        job.ends(end)
        self._world.note(self.head.name, f"{job.request} is {end.value}")
        del self.jobs[job.request]
        self.ended.append(job)

    # --- passes -----------------------------------------------------------------------

    def _pass(self) -> None:
        """One pass, and the next one soon, for as long as there are requests."""
        if not self.jobs:
            self._stepping = False
            return
        if self.paused:
            self._next(self._pass, STEP_S)
            return
        self._passing = True
        for job in list(self.jobs.values()):
            self._follow(job)
            if job.end is None and self._available(job):
                self._schedule(job)
        if self._loads:
            self._next(self._allocate, PASS_S)
        else:
            self._pass_ended()

    def _next(self, act: Callable[[], None], most: float) -> None:
        delay = self._world.rng.uniform(most / 10, most)
        self._world.timeline.after(delay, lambda: self.head.run(act, "scheduler"))

    def _pass_ended(self) -> None:
        self._cache.pass_ended()
        if self._promised:
            self._promised = False
            self.head.decide(PassEnded())
        self._passing = False
        acts, self._after_pass = self._after_pass, []
        for act in acts:
            act()
        self._next(self._pass, STEP_S)

    def _follow(self, job: Job) -> None:
        """What was loaded is computed by now; the rooms of such items are not needed."""
        done = [h for h in job.pending if h in job.refers and not job.loads.get(h)]
        for hash in done:
            if self._world.rng.random() < 0.7:
                del job.pending[hash]
                job.refers.discard(hash)
                self._cache.release(hash, job.request)
        if done:
            self._tell_spared(job)
        if job.joined and not job.pending and not job.computed_all and not any(job.loads.values()):
            job.computed_all = True
            self._world.soon(partial(self.head.run, partial(self._finish, job, job.turn)), 1.5)

    def _finish(self, job: Job, turn: int) -> None:
        """The last token was sampled."""
        if self._passing:
            self._after_pass.append(partial(self._finish, job, turn))
        elif job.end is None and job.turn == turn:
            self._over(job, End.LOADED)

    def _tell_spared(self, job: Job) -> None:
        spared = tuple(hash for hash in job.unspared if hash not in job.pending)
        if spared:
            job.unspared.difference_update(spared)
            job.needed.difference_update(spared)
            job.ticketed.difference_update(spared)
            self.head.decide(Spared(job.request, tuple(sorted(spared))))

    # --- may it run? ------------------------------------------------------------------

    def _join(self, job: Job) -> None:
        if not job.joined:
            job.joined = True
            self.head.decide(Joined(job.request, job.items))

    def _available(self, job: Job) -> bool:
        """Whether everything that the request still has to compute can be had now."""
        self._join(job)
        if self._has_failed(job):
            return False
        needed = [h for h in job.pending if not self._is_cached(job, h)]
        needed = [h for h in needed if not self._host_encodes(job, h)]
        if needed and job.failure is None:
            self._need(job, tuple(hash for hash in needed if hash not in job.needed))
            self._ask(job)
        if self._has_failed(job):
            return False
        missing = [hash for hash in needed if not self._machine.holds(hash)]
        if job.asked is None:
            job.needed.difference_update(missing)
        return not missing

    def _has_failed(self, job: Job) -> bool:
        self._hear()
        if job.failure is not None:
            self._over(job, End.FAILED)
        return job.failure is not None

    def _need(self, job: Job, fresh: tuple[str, ...]) -> None:
        if fresh:
            if self._machine._requests[job.request].state is not RequestState.WAITING:
                job.waits_no_more()
            job.needed.update(fresh)
            self.head.decide(Needed(job.request, fresh))

    def _ask(self, job: Job) -> None:
        state = self._machine.ask(job.request, self._world.now)
        if state is RequestState.WAITING:
            job.waits(self._world.now, self.head.clock())
        else:
            job.waits_no_more()
        self._hear()
        RequestsEndOnce.hold(
            (state is RequestState.FAILED) == (job.failure is not None),
            lambda: f"{job.request} is {state.value}, and the host heard {job.failure}",
        )

    def _is_cached(self, job: Job, hash: str) -> bool:
        mirror = self._cache.mirror
        return mirror.holds(hash) and (job.specs[hash].encodable or mirror.referenced(hash))

    def _host_encodes(self, job: Job, hash: str) -> bool:
        if self._machine.encodes_locally(job.request, hash):
            return True
        if hash in job.ticketed or self._machine.holds(hash):
            return False
        if job.specs[hash].encodable:
            return True
        if job.failure is None:
            reason = f"item {hash} came without pixels and without a room"
            brought = job.specs[hash].room is not None
            job.fails(lost(hash) if brought else Failure(Code.BAD_REQUEST, reason))
        return False

    def _hear(self) -> None:
        outcomes, self.head.outcomes = self.head.outcomes, []
        for effect in outcomes:
            job = self.jobs.get(effect.request)
            if job is None:
                continue
            if isinstance(effect, RequestFailed):
                job.fails(effect.failure)
            else:
                RequestsEndOnce.hold(
                    effect.hash not in job.local, lambda job=job: f"{job.request}: said twice"
                )
                job.local.add(effect.hash)

    # --- it runs ----------------------------------------------------------------------

    def _schedule(self, job: Job) -> None:
        """Gives the request cache entries for what it needs: all, or, as in chunks, the first."""
        chunk = [hash for hash in job.pending if hash not in job.refers]
        if self._world.unlucky(0.3):
            chunk = chunk[:1]
        for hash in chunk:
            if hash in self._cache:
                self._cache.refer(hash, job.request)
            elif not self._cache.allocate(hash, job.request):
                return
            else:
                self._loads.append(Load(job, hash, self._promise(job, hash)))
            job.refers.add(hash)

    def _promise(self, job: Job, hash: str) -> bool:
        if self._machine.holds(hash):
            self._promised = True
            self.head.decide(Promised(hash))
            return True
        RequestsEndOnce.hold(
            job.specs[hash].encodable,
            lambda: f"{job.request}: the host has to encode {hash} and has no pixels",
        )
        return False

    def _allocate(self) -> None:
        """The second half of the pass: what was promised goes to the ranks."""
        loads, self._loads = self._loads, []
        for load in loads:
            self._cache.mirror.allocated(load.hash, load.job.request)
            if load.promised:
                self._load(load.job, load.hash)
        self._pass_ended()

    def _load(self, job: Job, hash: str) -> None:
        PromisesAreKept.hold(self._machine.holds(hash), lambda: f"{hash} for {job.request}")
        transfer = self._machine.held(hash)
        assert transfer.region is not None
        offset = transfer.region.offset
        self.head.decide(Loading(job.request, hash))
        job.needed.discard(hash)
        job.ticketed.discard(hash)
        for rank in range(len(self.head.engine.ranks)):
            job.loads[hash] = job.loads.get(hash, 0) + 1
            read = partial(self._read, job, rank, transfer, offset)
            self._world.soon(partial(self._on_rank, rank, read, False))
            self._world.timeline.after(
                self._world.rng.uniform(0.05, 0.15), partial(self._on_rank, rank, read, True)
            )

    def _on_rank(self, rank: int, read: Callable[[bool], None], is_last: bool) -> None:
        self.head.engine.ranks[rank].run(partial(read, is_last), "worker")

    def _read(self, job: Job, rank: int, transfer: Transfer, offset: int, is_last: bool) -> None:
        """The rank reads the rows: they are right as long as it does."""
        item, engine = transfer.item, self.head.engine
        room = transfer.ticket.room
        where = (item.hash, item.rows, offset, transfer.layout)
        engine.hold_rows_of(engine.ranks[rank], room, *where)
        if is_last:
            engine.to_head(rank, RoomLoaded(room))
            job.loads[item.hash] -= 1
