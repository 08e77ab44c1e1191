# SPDX-License-Identifier: Apache-2.0
"""A process: it lives, may be stopped for a while, goes on with what has piled up, and dies.

Owns whether what is handed to a process reaches it now, later, or not at all. What it runs
is up to those that are built on it.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

from epd_connector.stats import Counters
from tests.sim.invariants import MachinesDoNotRaise, MemoryBalances, Violation
from tests.sim.timeline import Alarm

if TYPE_CHECKING:
    from tests.sim.ground import Ground
    from tests.sim.network import Host


OWN, TIME = "", "time"
"""Sources of what a process does: itself, its clock; others are whoever speaks to it."""


class Machine(Protocol):
    """What every machine with a clock offers."""

    counters: Counters

    def next_deadline(self) -> float | None: ...

    def check(self) -> None: ...


class Process:
    """One process on ``host``. ``name`` is for people; ``place``: what others know it by, and
    whoever comes after it there."""

    def __init__(self, world: "Ground", name: str, host: "Host") -> None:
        self.world = world
        self.name = name
        self.place = name
        self.host = host
        self.incarnation = world.new_id()
        self.alive = True
        self.frozen = False
        self._held: list[tuple[str, Callable[[], None]]] = []
        self._to_do: deque[Callable[[], None]] = deque()
        self._froze_at = 0.0
        self._slept = 0.0
        self._stops_midway = False

    def run(self, act: Callable[[], None], source: str = OWN) -> None:
        """``act`` happens in this process: now, when it goes on, or never.

        What comes from one ``source`` keeps its order; sources are read in any order.
        """
        if not self.alive:
            return
        if self.frozen:
            self._held.append((source, act))
        else:
            act()

    def freeze(self, *, midway: bool) -> None:
        """The process is stopped: now, or ``midway``, when it has decided and not acted yet."""
        if midway:
            self._stops_midway = True
        elif self.alive and not self.frozen:
            self.frozen, self._froze_at = True, self.world.now
            self.world.note(self.name, "is stopped")

    def thaw(self) -> None:
        """The process goes on: with what it had decided, then with what has piled up."""
        self._stops_midway = False
        if not self.frozen:
            return
        self.frozen = False
        self._slept += self.world.now - self._froze_at
        held, self._held = self._held, []
        self.world.note(self.name, f"goes on, {len(held)} things to do")
        if self.world.rng.random() < 0.5:
            sources = {source: self.world.rng.random() for source, _ in held} | {OWN: -1.0}
            held.sort(key=lambda source_and_act: sources[source_and_act[0]])
        for source, act in held:
            self.run(act, source)

    def kill(self) -> None:
        self.alive = False
        self._held.clear()

    def clock(self) -> float:
        """Seconds that this process could have run."""
        frozen_for = self.world.now - self._froze_at if self.frozen else 0.0
        return self.world.now - self._slept - frozen_for

    def counts(self) -> Mapping[str, int]:
        """What its machine has counted."""
        return {}

    def acts(self, effects: list[Callable[[], None]]) -> None:
        """Carries out what was decided, in the order of the decisions, whatever comes between.

        The process may be stopped before the last.
        """
        busy = bool(self._to_do)
        self._to_do.extend(effects)
        if busy:
            return
        while self._to_do:
            if self._stops_midway and self.world.rng.random() < 0.5:
                self._stops_midway = False
                self.freeze(midway=False)
            self.run(self._to_do[0])
            self._to_do.popleft()


class MachineProcess(Process):
    """A process with a machine in it, and an alarm clock for it."""

    machine: Machine

    def __init__(self, world: "Ground", name: str, host: "Host") -> None:
        super().__init__(world, name, host)
        self._alarm: Alarm | None = None

    def counts(self) -> Mapping[str, int]:
        return self.machine.counters.counts()

    def wind_up(self) -> None:
        """The machine is there; its deadlines count from now on."""
        self._alarm = Alarm(
            self.world.timeline, self.machine.next_deadline, lambda: self.run(self._tick, TIME)
        )

    def drive(self, event: object, decide: Callable[[], list[object]]) -> None:
        """The machine takes ``event``; everything that must hold of it is held afterwards."""
        try:
            effects = decide()
        except Violation:
            raise
        except Exception as error:
            self.world.note(self.name, event)
            raise Violation(MachinesDoNotRaise, f"{self.name}: {error!r}") from error
        self.world.note(self.name, event, effects)
        for effect in effects:
            self.decided(effect)
        self.acts([partial(self.carry_out, effect) for effect in effects])
        with MemoryBalances.holds(self.name):
            self.machine.check()
        self.audit()
        if self._alarm is not None:
            self._alarm.set()

    def _tick(self) -> None:
        raise NotImplementedError

    def decided(self, effect: object) -> None:
        """The machine asks for ``effect``: from now on it counts on it."""
        raise NotImplementedError

    def carry_out(self, effect: object) -> None:
        raise NotImplementedError

    def audit(self) -> None:
        """Holds what must hold after every event."""
        raise NotImplementedError
