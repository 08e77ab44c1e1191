# SPDX-License-Identifier: Apache-2.0
"""The scheduler of a prefill engine: it asks in every step, and loads what may run.

Owns requests from their arrival to their one end, which is asserted here: loaded with the
right rows on every rank, or failed with a reason, and neither of them late.
"""

import enum
from dataclasses import dataclass, field
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
)
from epd_connector.core.effects import RequestFailed
from epd_connector.errors import Failure
from epd_connector.protocol.frames import RoomLoaded
from epd_connector.rows import Shard
from tests.sim.heads import RECEIVE_TIMEOUT_S, PrefillHost

STEP_S = 0.2
MOMENT_S = 1e-6


class End(enum.Enum):
    """How a request ended."""

    LOADED = "loaded"
    FAILED = "failed"
    ABORTED = "aborted"
    KILLED = "killed"  # with its engine


@dataclass(slots=True, eq=False)
class Job:
    """One request. ``needs``: hashes it has not loaded yet; ``loads``: loads under way.

    ``local``: hashes the host encodes itself.
    """

    request: str
    items: tuple[ItemSpec, ...]
    needs: dict[str, None]
    due: float
    loads: int = 0
    local: set[str] = field(default_factory=set)
    failure: Failure | None = None
    end: End | None = None

    def ends(self, end: End) -> None:
        assert self.end is None, f"{self.request} was {self.end}, now {end}"
        self.end = end


class Scheduler:
    """Requests of one prefill engine, looked at in steps."""

    def __init__(self, host: PrefillHost) -> None:
        self.host = host
        self.jobs: dict[str, Job] = {}
        self.ended: list[Job] = []
        self._world = host.world
        self._promised = False
        self._stepping = False

    def start(self, request: str, items: tuple[ItemSpec, ...]) -> None:
        """A request arrives; what it needs is known at once, or a little later."""
        hashes = dict.fromkeys(spec.hash for spec in items)
        job = self.jobs[request] = Job(request, items, hashes, self._world.now + RECEIVE_TIMEOUT_S)
        self.host.tell(Joined(request, items))
        first = tuple(hashes)
        if self._world.unlucky(0.2):
            first = first[:1]
            self._world.soon(lambda: self._need(job, tuple(hashes)))
        self._need(job, first)
        if not self._stepping:
            self._stepping = True
            self._step()

    def abort(self, request: str) -> None:
        """The client is gone."""
        job = self.jobs.get(request)
        if job is not None:
            self._over(job, End.ABORTED)

    def spare(self, request: str, hash: str) -> None:
        """The tokens of one of its items were computed already."""
        job = self.jobs.get(request)
        if job is not None and hash in job.needs:
            del job.needs[hash]
            self.host.tell(Spared(request, (hash,)))

    def kill(self) -> None:
        self.host.kill()
        for job in list(self.jobs.values()):
            self._over(job, End.KILLED)

    def _need(self, job: Job, hashes: tuple[str, ...]) -> None:
        hashes = tuple(hash for hash in hashes if hash in job.needs)
        if job.end is None and hashes:
            job.due = self._world.now + RECEIVE_TIMEOUT_S
            self.host.tell(Needed(job.request, hashes))

    def _step(self) -> None:
        """One scheduling pass, and the next one soon, for as long as there are requests."""
        if not self.jobs:
            self._stepping = False
            return
        self._hear()
        for job in list(self.jobs.values()):
            state = self.host.machine.ask(job.request, self._world.now)
            assert (state is RequestState.FAILED) == (job.failure is not None), job
            if state is RequestState.FAILED:
                self._over(job, End.FAILED)
            elif state is RequestState.READY:
                self._run(job)
            else:
                assert self._world.now <= job.due + MOMENT_S, f"{job.request} waits for too long"
        if self._promised:
            self._promised = False
            self.host.tell(PassEnded())
        self._world.timeline.after(self._world.rng.uniform(0.02, STEP_S), self._step)

    def _hear(self) -> None:
        decided, self.host.decided = self.host.decided, []
        for effect in decided:
            job = self.jobs.get(effect.request)
            if job is None:
                continue
            if isinstance(effect, RequestFailed):
                assert job.failure is None, f"{job.request} failed twice"
                assert effect.failure.reason
                job.failure = effect.failure
            else:
                assert effect.hash not in job.local
                job.local.add(effect.hash)

    def _run(self, job: Job) -> None:
        """Loads what the request needs, all of it or, as prompts in chunks do, the first."""
        chunk = list(job.needs)
        if self._world.unlucky(0.3):
            chunk = chunk[:1]
        for hash in job.needs:
            self._promised = True
            self.host.tell(Promised(hash))
        for hash in chunk:
            if hash not in job.local and not self.host.machine.holds(hash):
                return  # it was not said yet that the item is needed
            del job.needs[hash]
            if hash not in job.local:
                self._load(job, hash)
        if not job.needs and not job.loads:
            self._over(job, End.LOADED)

    def _load(self, job: Job, hash: str) -> None:
        transfer = self.host.machine.held(hash)
        assert transfer.region is not None
        offset, room, ranks = transfer.region.offset, transfer.ticket.room, self.host.engine.ranks
        self.host.tell(Loading(job.request, hash))
        for rank in range(len(ranks)):
            shard = self.host.engine.in_slab(rank, transfer.item.rows, transfer.layout)
            job.loads += 1
            self._world.soon(partial(self._loaded, job, rank, room, hash, shard, offset))

    def _loaded(self, job: Job, rank: int, room: int, hash: str, shard: Shard, offset: int) -> None:
        """Rank ``rank`` has read the rows: they must be what they were when it was told to."""
        if not self.host.alive:
            return
        self.host.engine.ranks[rank].assert_rows(hash, shard, offset)
        self.host.engine.to_head(rank, RoomLoaded(room))
        job.loads -= 1

    def _over(self, job: Job, end: End) -> None:
        job.ends(end)
        del self.jobs[job.request]
        self.ended.append(job)
        self.host.tell(Left(job.request))
