# SPDX-License-Identifier: Apache-2.0
"""Slabs with rows in them that say what they are, and writes that land late, half or never.

Owns the bytes of the world and the rule that nobody writes where they may not. A write
reads its source and lands while it is in flight, piece by piece, as a real one does.
"""

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from epd_connector.core.effects import Write
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import Grant
from tests.sim.invariants import PublishedBytesAreRight, WritersAreGranted
from tests.sim.network import Network
from tests.sim.process import Process
from tests.sim.timeline import Timeline
from tests.sim.weather import Weather

WIDTH, ITEMSIZE, DTYPE = 4, 2, "bfloat16"
ROW_NBYTES = WIDTH * ITEMSIZE
FENCE_S = 3.0
"""Seconds after the death of a writer that its writes can still land, as receivers are told."""
WIRE_S = 1.5
"""Seconds after the death of a writer that its kernel still sends what it had."""
READ_S = 0.3
"""Seconds that bytes lie in a socket's buffer while the process that reads it runs."""
NEVER_WRITTEN = 0xAA


def rows_bytes(hash: str, start: int, count: int, writer: int) -> bytes:
    """Rows of item ``hash`` as process ``writer`` stages them: each says what it is."""
    head = zlib.crc32(hash.encode()).to_bytes(4, "big")
    tail = (writer & 0xFFFF).to_bytes(2, "big")
    return b"".join(head + row.to_bytes(2, "big") + tail for row in range(start, start + count))


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may write into a region, what for, and which process granted it."""

    writer: int
    room: int
    grant: int
    offset: int
    nbytes: int
    grantor: int


@dataclass(slots=True, eq=False)
class ReceiveMemory:
    """A receive slab, and whom its regions were granted to. Not ``alive``: its engine ended."""

    nbytes: int
    alive: bool = True
    owners: dict[tuple[int, int], Owner] = field(default_factory=dict)
    data: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.data = bytearray(self.nbytes)

    def grant(self, grantor: int, writer: int, frame: Grant) -> None:
        """From now on ``writer`` may write what ``frame`` says."""
        key = (grantor, frame.room)
        owner = Owner(writer, frame.room, frame.grant, frame.offset, frame.nbytes, grantor)
        before = self.owners.get(key)
        if before == owner or not frame.nbytes:
            return
        WritersAreGranted.hold(before is None, lambda: f"{before} and {owner} are of one room")
        end = owner.offset + owner.nbytes
        for other in self.owners.values():
            apart = other.offset >= end or owner.offset >= other.offset + other.nbytes
            WritersAreGranted.hold(apart, lambda other=other: f"{other} may still write at {owner}")
        self.owners[key] = owner
        self.data[owner.offset : end] = bytes([NEVER_WRITTEN]) * owner.nbytes

    def revoke(self, grantor: int, room: int) -> None:
        """The grantor is certain that its region of ``room`` is not written to any more."""
        self.owners.pop((grantor, room), None)

    def grantor_died(self, grantor: int) -> None:
        """Its part of every room is lost with it: no item is complete without it."""
        self.owners = {key: o for key, o in self.owners.items() if o.grantor != grantor}

    def hold_rows(self, hash: str, start: int, count: int, offset: int, writer: int) -> None:
        """``count`` rows from ``start`` of the item lie at ``offset``, written by ``writer``."""
        found = bytes(self.data[offset : offset + count * ROW_NBYTES])
        expected = rows_bytes(hash, start, count, writer)
        PublishedBytesAreRight.hold(
            found == expected, lambda: _difference(hash, start, offset, found, expected)
        )


def _difference(hash: str, start: int, offset: int, found: bytes, expected: bytes) -> str:
    size = ROW_NBYTES
    pieces = zip(
        range(start, start + len(expected) // size),
        (found[at : at + size] for at in range(0, len(found), size)),
        (expected[at : at + size] for at in range(0, len(expected), size)),
        strict=True,
    )
    row, is_, should = next((r, f, e) for r, f, e in pieces if f != e)
    return f"row {row} of {hash}, at {offset}: {is_.hex()} instead of {should.hex()}"


@dataclass(frozen=True, slots=True)
class Session:
    """How a slab is addressed: through the prefill rank that registered it."""

    memory: ReceiveMemory
    process: Process


@dataclass(slots=True, eq=False)
class Flight:
    """One write under way. ``landed``: bytes of it that have; ``turn``: of its next move."""

    writer: Process
    source: bytearray
    order: Write
    room: int
    grant: int
    session: Session
    took: float
    fails: bool
    done: Callable[[Failure | None], None]
    landed: int = 0
    turn: int = 0
    on_wire: bool = False


class Fabric:
    """Every receive slab by session, and the writes into them.

    ``direct``: writes need nothing of the process that is written to. Whatever the weather:
    ``broken`` are processes whose writes fail halfway, and no write takes less than
    ``least_s`` seconds.
    """

    def __init__(
        self, timeline: Timeline, network: Network, weather: Weather, rng: random.Random
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self.direct = False
        self.broken: set[int] = set()
        self.least_s = 0.0
        self.endless: dict[int, set[int]] = {}
        self._timeline = timeline
        self._network = network
        self._weather = weather
        self._rng = rng
        self._flights: dict[int, dict[Flight, None]] = {}
        self._reading: dict[int, dict[Flight, None]] = {}
        self._died: dict[int, float] = {}

    # --- begin and end ----------------------------------------------------------------

    def write(
        self,
        writer: Process,
        source: bytearray,
        order: Write,
        grant: Grant,
        done: Callable[[Failure | None], None],
    ) -> None:
        """Carries out ``order`` for ``writer``; ``done`` when nothing more will land."""
        weather, rng = self._weather, self._rng
        rough = self._timeline.now < weather.calm_at
        took = max(rng.uniform(0.0, 0.05), self.least_s)
        if rough and rng.random() < weather.slow_writes:
            took = rng.uniform(0.5, 12.0)
        fails = rough and rng.random() < weather.failed_writes
        fails = fails or writer.incarnation in self.broken
        session = self.sessions[order.session]
        flight = Flight(writer, source, order, grant.room, grant.grant, session, took, fails, done)
        self._hold_grant(flight)
        self._flights.setdefault(writer.incarnation, {})[flight] = None
        self._reading.setdefault(writer.incarnation, {})[flight] = None
        self._again(flight, self._timeline.now + took / 2)

    def reads(self, writer: Process, source: bytearray) -> bool:
        """Whether some write of ``writer`` may still read ``source``."""
        return any(flight.source is source for flight in self._reading.get(writer.incarnation, ()))

    def killed(self, writer: Process) -> None:
        """What ``writer`` had handed to its kernel may land for a while, the rest never."""
        self._died[writer.incarnation] = self._timeline.now
        for flight in list(self._flights.get(writer.incarnation, ())):
            if self._rng.random() < 0.6 and not self.direct and writer.host.up:
                flight.on_wire = True
                self._again(flight, self._timeline.now + self._rng.uniform(0.0, WIRE_S))
            else:
                self._ended(flight)

    def reader_killed(self, reader: Process) -> None:
        """Whoever writes to ``reader`` over a socket will hear of it, or not."""
        if self.direct:
            return
        for flights in self._flights.values():
            for flight in flights:
                if flight.session.process is reader:
                    self._again(flight, self._timeline.now + self._rng.uniform(0.0, 0.1))

    def _ended(self, flight: Flight) -> None:
        flight.turn += 1
        self._flights[flight.writer.incarnation].pop(flight, None)

    # --- on the way -------------------------------------------------------------------

    def _again(self, flight: Flight, when: float) -> None:
        flight.turn += 1
        self._timeline.at(when, partial(self._move, flight, flight.turn))

    def _move(self, flight: Flight, turn: int) -> None:
        """The next piece lands, unless something is in its way."""
        if turn != flight.turn or self._in_the_way(flight):
            return
        if self.direct or not flight.session.process.frozen:
            self._land(flight, turn)
            return
        # It lies in a buffer of the receiver's host, whatever becomes of the writer.
        delay = self._rng.uniform(0.0, READ_S)
        flight.session.process.run(
            lambda: self._timeline.after(delay, partial(self._land, flight, turn)), "transport"
        )

    def _in_the_way(self, flight: Flight) -> bool:
        now, rng = self._timeline.now, self._rng
        writer, reader = flight.writer, flight.session.process
        died = self._died.get(writer.incarnation)
        if died is not None and now > died + WIRE_S:
            self._ended(flight)
            return True
        healed_at = self._network.healed_at(writer, reader)
        if healed_at > now:
            self._again(flight, healed_at + rng.uniform(0.0, 0.1))
            return True
        if died is None and writer.frozen and not flight.on_wire:
            flight.on_wire = not self.direct and rng.random() < 0.5
            if not flight.on_wire:
                delay = rng.uniform(0.0, 0.1)
                writer.run(lambda: self._again(flight, self._timeline.now + delay), "transport")
                return True
        if not reader.alive and not self.direct:
            self._nobody_there(flight)
            return True
        return False

    def _nobody_there(self, flight: Flight) -> None:
        """The host of a process that ended says so; one that is not there says nothing."""
        failure = Failure(Code.WRITE_FAILED, "nobody is there")
        self._ended(flight)
        if flight.session.process.host.up:
            self._report(flight, failure)
        elif self._rng.random() < 0.5:
            delay = self._rng.uniform(5.0, 40.0)
            self._timeline.after(delay, lambda: self._report(flight, failure))
        else:
            self.endless.setdefault(flight.writer.incarnation, set()).add(flight.order.write)

    def _land(self, flight: Flight, turn: int) -> None:
        if turn != flight.turn:
            return
        order = flight.order
        half = order.nbytes // 2
        start, end = (0, half) if flight.landed < half else (flight.landed, order.nbytes)
        if start and flight.fails:
            self._ended(flight)
            self._report(flight, Failure(Code.WRITE_FAILED, "the wire broke"))
            return
        memory = flight.session.memory
        if memory.alive:
            self._hold_grant(flight)
            piece = flight.source[order.source + start : order.source + end]
            memory.data[order.destination + start : order.destination + end] = piece
        flight.landed = end
        if end < order.nbytes:
            self._again(flight, self._timeline.now + flight.took / 2)
        else:
            self._ended(flight)
            self._report(flight, None)

    def _report(self, flight: Flight, failure: Failure | None) -> None:
        self._reading[flight.writer.incarnation].pop(flight)
        flight.writer.run(lambda: flight.done(failure), "transport")

    def _hold_grant(self, flight: Flight) -> None:
        """Bytes for a rank that ended are for nobody: what it received is lost as a whole."""
        memory, grantor = flight.session.memory, flight.session.process
        if not memory.alive or not grantor.alive:
            return
        order = flight.order
        owner = memory.owners.get((grantor.incarnation, flight.room))
        is_granted = owner is not None and (
            (owner.writer, owner.grant, owner.offset, owner.nbytes)
            == (flight.writer.incarnation, flight.grant, order.destination, order.nbytes)
        )
        WritersAreGranted.hold(
            is_granted,
            lambda: (
                f"{flight.writer.name} writes room {flight.room}, grant {flight.grant} to "
                f"{order.destination}, granted: {owner or 'nobody'}"
            ),
        )
