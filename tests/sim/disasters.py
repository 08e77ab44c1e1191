# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a fleet until it is calm: drawn from the world's seed and weather.

Engines, ranks and hosts end, come back where they were or elsewhere, or never; processes are
stopped for a while; networks are cut; schedulers pause. Once it is calm, an operator says of
every host that vanished that it is dead.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.sim.encode import EncodeEngine
from tests.sim.process import Process
from tests.sim.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet

FOLLOWS_S = 3.0
"""Seconds within which an engine follows a rank of it that ended."""
WORD_S = 30.0
"""Seconds of calm after which an operator says once more which hosts are dead."""
FREEZES_S = (0.3, 0.9, 2.5, 6.0, 14.0)
CUTS_S = (0.5, 3.0, 8.0, 20.0)
PAUSES_S = (1.0, 4.0, 20.0)


class Disasters:
    """Plans everything at once; each disaster then strikes whoever is there."""

    def __init__(self, world: "Fleet") -> None:
        self._world = world
        self._moves = 0
        self._vanished: list[str] = []
        weather, plan = world.weather, world.plan
        plan(weather.cuts, self._cut)
        plan(weather.breaks, self._break)
        plan(weather.encode_deaths, self._encode_engine_ends)
        plan(weather.prefill_deaths, self._prefill_engine_ends)
        plan(weather.rank_deaths, self._rank_ends)
        plan(weather.vanishings, self._host_vanishes)
        plan(weather.freezes, self._freeze)
        plan(weather.pauses, self._pause)
        plan(weather.preemptions, self._preempt)
        if weather.vanishings:
            world.timeline.at(weather.calm_at + WORD_S, self._operator_speaks)

    # --- networks ---------------------------------------------------------------------

    def _cut(self) -> None:
        """No word passes between two hosts for a while."""
        rng, world = self._world.rng, self._world
        encode = self._some_encode()
        prefill = self._some_prefill()
        if encode is not None and prefill is not None:
            seconds = rng.choice(CUTS_S)
            one, other = encode[1].host.name, prefill[1].head.host.name
            world.note("network", f"nothing passes between {one} and {other} for {seconds} s")
            world.network.cut(one, other, seconds)

    def _break(self) -> None:
        """A connection breaks, though nobody has died."""
        world = self._world
        prefill = self._some_prefill()
        if prefill is None:
            return
        dialer = world.rng.choice(prefill[1].head.processes())
        dialed = world.network.dialed(dialer)  # type: ignore[arg-type]
        if dialer.alive and dialed:
            endpoint = world.rng.choice(dialed)
            world.note("network", f"the connection of {dialer.name} to {endpoint} breaks")
            world.network.reset(dialer, endpoint)  # type: ignore[arg-type]

    # --- ends -------------------------------------------------------------------------

    def _encode_engine_ends(self) -> None:
        found = self._some_encode()
        if found is None:
            return
        engine = found[1]
        rng, world = self._world.rng, self._world
        if rng.random() < 0.25:
            world.note(engine.name, "shuts down")
            engine.stop()
            self._world.timeline.after(rng.uniform(0.1, 2.0), partial(self._end_encode, engine))
            return
        self._end_encode(engine)

    def _end_encode(self, engine: EncodeEngine) -> None:
        """The engine ends, and comes back where it was, elsewhere, or never."""
        if not engine.alive:
            return
        world, rng = self._world, self._world.rng
        world.note(engine.name, "ends")
        engine.kill()
        place = next(n for n, e in enumerate(world.encodes.values()) if e is engine)
        luck, after = rng.random(), rng.choice((0.0, 0.3, 1.0, 6.0))
        if luck < 0.6 and engine.host.up:
            self._back(partial(world.start_encode, place, engine.host.name), after)
        elif luck < 0.85:
            self._back(
                partial(world.start_encode, place, self._other_host(engine.host.name)), after
            )

    def _prefill_engine_ends(self) -> None:
        found = self._some_prefill()
        if found is not None:
            self._end_prefill(*found)

    def _end_prefill(self, place: int, scheduler: Scheduler) -> None:
        world, rng = self._world, self._world.rng
        if world.schedulers.get(place) is not scheduler:
            return
        world.note(scheduler.head.name, "ends, with its engine")
        scheduler.kill()
        world.gone.append(scheduler)
        del world.schedulers[place]
        host = scheduler.head.host
        if rng.random() < 0.9:
            where = host.name if host.up else self._other_host(host.name)
            self._back(partial(world.start_prefill, place, where), rng.choice((0.0, 1.0, 6.0)))

    def _back(self, start: Callable[[], object], after: float) -> None:
        """An engine starts again; now and then it ends again very soon."""
        world = self._world

        def do() -> None:
            started = start()
            if isinstance(started, EncodeEngine) and world.unlucky(0.25):
                world.soon(partial(self._end_encode, started), 2.0)

        world.timeline.after(after, do)

    def _rank_ends(self) -> None:
        """One rank ends; its engine follows, as its host sees to it."""
        world, rng = self._world, self._world.rng
        encode, prefill = self._some_encode(), self._some_prefill()
        follows = rng.uniform(0.0, FOLLOWS_S)
        if encode is not None and (prefill is None or rng.random() < 0.5):
            rank = rng.choice(encode[1].ranks)
            if rank.alive:
                world.note(rank.name, "ends alone")
                rank.kill()
                world.timeline.after(follows, partial(self._end_encode, encode[1]))
        elif prefill is not None:
            place, scheduler = prefill
            process = rng.choice(scheduler.head.engine.ranks)
            if process.alive:
                world.note(process.name, "ends alone")
                process.kill()
                head = scheduler.head
                world.soon(partial(head.run, partial(head.rank_ended, process.rank)), 1.0)
                world.timeline.after(follows, partial(self._end_prefill, place, scheduler))

    def _host_vanishes(self) -> None:
        """A host is not there any more: nothing on it says that it has ended."""
        world, rng = self._world, self._world.rng
        encode, prefill = self._some_encode(), self._some_prefill()
        if encode is not None and (prefill is None or rng.random() < 0.7):
            host = encode[1].host
        elif prefill is not None:
            host = prefill[1].head.host
        else:
            return
        world.note(host.name, "vanishes")
        host.up = False
        self._vanished.append(host.name)
        for engine in list(world.encodes.values()):
            if engine.host is host and engine.alive:
                self._end_encode(engine)
        for place, scheduler in list(world.schedulers.items()):
            if scheduler.head.host is host:
                self._end_prefill(place, scheduler)
        if rng.random() < 0.5:
            world.timeline.after(rng.uniform(1.0, 30.0), partial(self._say_gone, host.name))

    def _operator_speaks(self) -> None:
        for host in self._vanished:
            self._say_gone(host)

    def _say_gone(self, host: str) -> None:
        self._world.note("operator", f"host {host} is dead")
        for scheduler in self._world.schedulers.values():
            scheduler.head.host_gone(host)

    # --- pauses -----------------------------------------------------------------------

    def _freeze(self) -> None:
        """Some process, or all of an engine, is stopped for a while."""
        world, rng = self._world, self._world.rng
        encode, prefill = self._some_encode(), self._some_prefill()
        processes: list[Process] = []
        if encode is not None and (prefill is None or rng.random() < 0.5):
            processes = encode[1].processes()
        elif prefill is not None:
            processes = prefill[1].head.processes()
        if rng.random() < 0.7 and processes:
            processes = [rng.choice(processes)]
        seconds, midway = rng.choice(FREEZES_S), rng.random() < 0.5
        for process in processes:
            process.freeze(midway=midway)
            world.timeline.after(seconds, process.thaw)

    def _pause(self) -> None:
        """Admission is paused for a while."""
        prefill = self._some_prefill()
        if prefill is None:
            return
        scheduler, world = prefill[1], self._world
        seconds = world.rng.choice(PAUSES_S)
        world.note(scheduler.head.name, f"pauses for {seconds} s")
        scheduler.paused = True
        world.timeline.after(seconds, lambda: setattr(scheduler, "paused", False))

    def _preempt(self) -> None:
        prefill = self._some_prefill()
        if prefill is not None:
            prefill[1].preempt(self._world.rng.random())

    # --- whom it strikes --------------------------------------------------------------

    def _some_encode(self) -> tuple[str, EncodeEngine] | None:
        alive = [(name, e) for name, e in self._world.encodes.items() if e.alive]
        return self._world.rng.choice(alive) if alive else None

    def _some_prefill(self) -> tuple[int, Scheduler] | None:
        alive = list(self._world.schedulers.items())
        return self._world.rng.choice(alive) if alive else None

    def _other_host(self, name: str) -> str:
        self._moves += 1
        return f"{name.partition('+')[0]}+{self._moves}"
