# SPDX-License-Identifier: Apache-2.0
"""Hosts, connections, and a network that loses, repeats, delays and reorders what it carries.

Owns who listens where, who is connected to whom, and whether a frame arrives. Knows nothing
of what is in it.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tests.sim.process import Process
from tests.sim.timeline import Timeline
from tests.sim.weather import Weather

MOST_LATE_S = 3.0
LAST_WORDS_S = 1.0
"""Seconds after the death of a process that what it had sent still arrives."""
GIVEN_UP_S = 15.0
"""Seconds after which a connection is given up over which nothing is heard."""
MOST_QUEUED = 50


@dataclass(slots=True, eq=False)
class Host:
    """A machine with a kernel, as long as it is ``up``."""

    name: str
    up: bool = True


class Dialer(Protocol):
    """A process that connects to others, and hears when a connection broke."""

    name: str
    place: str
    host: Host
    incarnation: int
    alive: bool

    def run(self, act: Callable[[], None], source: str = "") -> None: ...

    def broken(self, endpoint: str) -> None: ...


@dataclass(slots=True, eq=False)
class Endpoint:
    """Who listens at an address of ``host``, who dials it, and what waits for a listener."""

    host: Host
    listener: Process | None = None
    dialers: dict[Dialer, Process | None] = field(default_factory=dict)
    queued: deque[tuple[Dialer, Callable[[Process], None]]] = field(default_factory=deque)


class Network:
    """Carries frames between processes."""

    def __init__(self, timeline: Timeline, weather: Weather, rng: random.Random) -> None:
        self.hosts: dict[str, Host] = {}
        self._timeline = timeline
        self._weather = weather
        self._rng = rng
        self._endpoints: dict[str, Endpoint] = {}
        self._cut: dict[frozenset[int | str], float] = {}
        self._died: dict[int, float] = {}
        self._lines: dict[tuple[int, int], float] = {}

    # --- hosts and connections --------------------------------------------------------

    def host(self, name: str) -> Host:
        return self.hosts.setdefault(name, Host(name))

    def listen(self, endpoint: str, process: Process) -> None:
        """``process`` can be dialed at ``endpoint``; whoever dials it already is connected."""
        place = self._place(endpoint)
        place.listener = process
        for dialer in place.dialers:
            if dialer.alive:
                place.dialers[dialer] = process
        while place.queued:
            dialer, deliver = place.queued.popleft()
            if dialer in place.dialers and dialer.alive:
                self._timeline.after(
                    self._rng.uniform(0.0, 0.1), partial(self._arrive, dialer, process, deliver)
                )

    def ended(self, process: Process) -> None:
        """``process`` has died: its host's kernel says so to everybody, if there is one."""
        self._died[process.incarnation] = self._timeline.now
        for endpoint, place in self._endpoints.items():
            place.dialers = {d: p for d, p in place.dialers.items() if d.alive}
            if place.listener is process:
                place.listener = None
                for dialer in place.dialers:
                    self._breaks(dialer, endpoint, place)

    def hang_up(self, dialer: Dialer, endpoint: str) -> None:
        self._place(endpoint).dialers.pop(dialer, None)

    def reset(self, dialer: Dialer, endpoint: str) -> None:
        """The connection breaks, and nobody has died."""
        place = self._place(endpoint)
        if place.dialers.get(dialer) is not None:
            dialer.run(lambda: dialer.broken(endpoint), endpoint)

    def dialed(self, dialer: Dialer) -> list[str]:
        """Endpoints that ``dialer`` is connected to, or tries to be."""
        return [name for name, place in self._endpoints.items() if dialer in place.dialers]

    def probe(self, dialer: Dialer, endpoint: str, answer: Callable[[bool], None]) -> None:
        """Whether the host of ``endpoint`` refuses connections, as of some moment from now on."""
        place = self._place(endpoint)
        if place.dialers.get(dialer) is not None:
            self._timeline.at(self._timeline.now, lambda: answer(False))
        else:
            self._timeline.after(
                self._rng.uniform(0.0, 0.3), lambda: self._probed(dialer, place, answer)
            )

    def _probed(self, dialer: Dialer, place: Endpoint, answer: Callable[[bool], None]) -> None:
        refuses = place.listener is None and place.host.up
        if self._healed_at(dialer.host.name, place.host.name) > self._timeline.now:
            refuses = False
        self._timeline.after(self._rng.uniform(0.0, 0.05), lambda: answer(refuses))

    def _breaks(self, dialer: Dialer, endpoint: str, place: Endpoint) -> None:
        listener = place.dialers.get(dialer)
        if listener is None:
            return
        silent = not place.host.up or self.is_cut(dialer, listener)
        if silent and self._rng.random() < 0.3:
            return
        delay = GIVEN_UP_S if silent else self._rng.uniform(0.0, 0.05)

        def tell() -> None:
            if place.dialers.get(dialer) is listener:
                place.dialers[dialer] = place.listener
            if dialer in place.dialers:
                dialer.run(lambda: dialer.broken(endpoint), endpoint)

        self._timeline.after(delay, tell)

    def _place(self, endpoint: str) -> Endpoint:
        place = self._endpoints.get(endpoint)
        if place is None:
            name = endpoint.removeprefix("tcp://").partition(":")[0]
            place = self._endpoints[endpoint] = Endpoint(self.host(name))
        return place

    # --- cuts -------------------------------------------------------------------------

    def cut(self, one: int | str, other: int | str, seconds: float) -> None:
        """Nothing passes between two hosts, or two processes (by incarnation), for a while."""
        self._cut[frozenset((one, other))] = self._timeline.now + seconds

    def is_cut(self, one: Dialer | Process, other: Dialer | Process) -> bool:
        return self.healed_at(one, other) > self._timeline.now

    def healed_at(self, one: Dialer | Process, other: Dialer | Process) -> float:
        """When the last cut between two processes is over."""
        return max(
            self._healed_at(one.host.name, other.host.name),
            self._healed_at(one.incarnation, other.incarnation),
        )

    def _healed_at(self, one: int | str, other: int | str) -> float:
        return self._cut.get(frozenset((one, other)), 0.0)

    # --- frames -----------------------------------------------------------------------

    def dial(
        self,
        dialer: Dialer,
        endpoint: str,
        deliver: Callable[[Process], None],
        lost: float = 0.0,
    ) -> None:
        """A frame to whoever listens at ``endpoint``; ``lost``: a share of such that get lost."""
        place = self._place(endpoint)
        place.dialers[dialer] = listener = place.listener
        if self._unlucky(lost):
            return
        if listener is not None:
            self.carry(dialer, listener, deliver)
        elif place.host.up and len(place.queued) < MOST_QUEUED:
            place.queued.append((dialer, deliver))

    def carry(
        self, sender: Dialer | Process, receiver: Process, deliver: Callable[[Process], None]
    ) -> None:
        """``deliver`` happens when the frame arrives: in order, or late, twice, not at all."""
        weather, rng = self._weather, self._rng
        if self._unlucky(weather.lost):
            return
        for _ in range(1 + self._unlucky(weather.repeated)):
            line = (sender.incarnation, receiver.incarnation)
            when = self._timeline.now + rng.uniform(0.0005, 0.005)
            if self._unlucky(weather.late):
                when += rng.uniform(0.0, MOST_LATE_S)
            else:
                when = self._lines[line] = max(when, self._lines.get(line, 0.0) + 1e-9)
            self._timeline.at(when, partial(self._arrive, sender, receiver, deliver))

    def _arrive(
        self, sender: Dialer | Process, receiver: Process, deliver: Callable[[Process], None]
    ) -> None:
        if not receiver.alive:
            return
        now = self._timeline.now
        died = self._died.get(sender.incarnation)
        if died is not None and (not sender.host.up or now > died + LAST_WORDS_S):
            return
        healed_at = self.healed_at(sender, receiver)
        if now < healed_at:
            if self._rng.random() < 0.5:
                again = healed_at + self._rng.uniform(0.0, 0.1)
                self._timeline.at(again, partial(self._arrive, sender, receiver, deliver))
            return
        receiver.run(partial(deliver, receiver), sender.place)

    def _unlucky(self, share: float) -> bool:
        rough = self._timeline.now < self._weather.calm_at
        return rough and share > 0 and self._rng.random() < share
