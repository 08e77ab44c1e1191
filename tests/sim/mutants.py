# SPDX-License-Identifier: Apache-2.0
"""Machines that are broken on purpose, each in one place, and the rule that each breaks.

The one place where a machine's method is replaced. A simulator that plays worlds of broken
machines and finds nothing would be of no use.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from epd_connector.core.admission import PrefillHead
from epd_connector.core.deadlines import Deadlines
from epd_connector.core.effects import RequestFailed
from epd_connector.core.encode_desk import EncodeDesk
from epd_connector.core.placement import Placement
from epd_connector.core.receive import PrefillRank
from epd_connector.core.receive_senders import SenderDesk
from epd_connector.core.send_grants import GrantDesk
from epd_connector.core.send_peers import PeerDesk
from epd_connector.core.send_rooms import RoomTable
from epd_connector.core.send_state import GrantState
from epd_connector.core.topology import Topology
from epd_connector.core.transfers import TransferDesk
from epd_connector.core.turns import Turns
from epd_connector.memory.slab import Slab
from epd_connector.protocol.frames import Cancelled
from tests.sim import invariants as rules
from tests.sim.invariants import Invariant
from tests.sim.weather import Shape, Weather

Method = Callable[..., Any]
STORM = Weather(
    lost=0.05,
    repeated=0.1,
    late=0.1,
    slow_writes=0.3,
    failed_writes=0.05,
    cuts=0.05,
    encode_deaths=0.06,
    prefill_deaths=0.03,
    freezes=0.1,
    aborts=0.3,
    preemptions=0.3,
)
CUTS = Weather(slow_writes=0.6, cuts=0.3, breaks=0.5, freezes=0.4)
DEATHS = Weather(slow_writes=0.6, encode_deaths=0.25)
CROWD = Weather(preemptions=3.0)
CROWDED = Shape(
    (1,), (1,), 1024, cache_items=2, items=4, small_items=False, encodable=0.9, bursts=True
)
"""Of four items that requests ask for, two have room in the slab and in the host's cache."""


STAGING = Shape((2,), (2,), 1 << 15)
LENDING = Shape((2,), (2,), 1 << 15, lendable=1.0)


@dataclass(frozen=True, slots=True)
class Mutant:
    """``owner``'s method ``name`` is ``broken(original)``; that breaks ``invariant``."""

    what: str
    invariant: type[Invariant]
    owner: type
    name: str
    broken: Callable[[Method], Method]
    weather: Weather = STORM
    shape: Shape | None = None

    def __str__(self) -> str:
        return self.what


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Every machine is broken, until the end of the block."""
    original = getattr(mutant.owner, mutant.name)
    setattr(mutant.owner, mutant.name, mutant.broken(original))
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.name, original)


def does(nothing_but: object = None) -> Callable[[Method], Method]:
    """A method that returns ``nothing_but`` and does nothing."""
    return lambda original: lambda *_args, **_keys: nothing_but


def forgets(original: Method) -> Method:
    """What is due is looked up, and nothing follows."""

    def due(*args: Any) -> tuple[()]:
        original(*args)
        return ()

    return due


def _leases_twice(original: Method) -> Method:
    def lease(self: Slab, nbytes: int) -> object:
        holes = list(self._holes)
        region = original(self, nbytes)
        self._holes = holes
        return region

    return lease


def _released_when_abandoned(original: Method) -> Method:
    def abandoned(self: PrefillRank, number: int) -> None:
        original(self, number)
        self._tell_released(number)

    return abandoned


def _released_when_silent(original: Method) -> Method:
    def silence(self: PrefillRank, sender: Any) -> None:
        rooms = list(sender.rooms)
        original(self, sender)
        for room in rooms:
            self._tell_released(room)

    return silence


def _silent_is_gone(original: Method) -> Method:
    def probed(self: SenderDesk, endpoint: str, gone: bool) -> object:
        del gone
        return original(self, endpoint, True)

    return probed


def _cancelled_at_once(original: Method) -> Method:
    def cancel(self: GrantDesk, event: Any, frame: Any) -> None:
        grant = self._find(self._rooms.find(frame.room), event.sender, frame.grant)
        original(self, event, frame)
        if grant is not None and grant.state is GrantState.WITHDRAWN:
            self._reply(event.route, event.sender, Cancelled(frame.room, frame.grant))

    return cancel


def _landed_on_one(original: Method) -> Method:
    def landed(self: TransferDesk, transfer: Any) -> None:
        transfer.landed.update(range(self._settings.ranks))
        original(self, transfer)

    return landed


def _freed_while_read(original: Method) -> Method:
    def pump(self: GrantDesk, grant: Any) -> None:
        original(self, grant)
        room = self._rooms.find(grant.frame.room)
        if room is not None and room.copy is not None:
            self._copies.release(room.copy, room)

    return pump


def _given_back(original: Method) -> Method:
    def give(self: GrantDesk, room: Any) -> None:
        original(self, room)
        if room.copy is not None:
            self._copies.release(room.copy, room)
            room.copy = None

    return give


def _never_ends(original: Method) -> Method:
    del original

    def tick(self: PrefillRank) -> None:
        self._fences.expired(self._now)

    return tick


def _said_twice(original: Method) -> Method:
    def tell(self: PrefillHead, request: Any, failure: Any) -> None:
        original(self, request, failure)
        self._effects.append(RequestFailed(request.request, failure))

    return tell


def _forgets_answers(original: Method) -> Method:
    def reply(self: GrantDesk, route: int, sender: int, answer: Any) -> None:
        original(self, route, sender, answer)
        self._answers.remove((sender, answer.room, answer.grant))

    return reply


MUTANTS = (
    Mutant(
        "a slab leases bytes twice",
        rules.MemoryBalances,
        Slab,
        "lease",
        _leases_twice,
    ),
    Mutant(
        "freed bytes are not free",
        rules.MemoryBalances,
        Placement,
        "free",
        does(),
    ),
    Mutant(
        "deadlines of what is over come all the same",
        rules.MachinesDoNotRaise,
        Deadlines,
        "clear",
        does(),
    ),
    Mutant(
        "an abandoned region is free without an answer",
        rules.WritersAreGranted,
        PrefillRank,
        "_on_abandoned",
        _released_when_abandoned,
    ),
    Mutant(
        "the region of a silent writer is free",
        rules.WritersAreGranted,
        PrefillRank,
        "_on_silence",
        _released_when_silent,
        CUTS,
    ),
    Mutant(
        "a silent writer is taken for one that is gone",
        rules.OnlyTheDeadAreGone,
        SenderDesk,
        "probed",
        _silent_is_gone,
        CUTS,
    ),
    Mutant(
        "no fence",
        rules.WritersAreGranted,
        PrefillRank,
        "_fence_s",
        does(0.0),
        DEATHS,
    ),
    Mutant(
        "a cancel is answered while the write is in flight",
        rules.WritersAreGranted,
        GrantDesk,
        "_on_cancel",
        _cancelled_at_once,
    ),
    Mutant(
        "an item has landed with its first rank",
        rules.PublishedBytesAreRight,
        TransferDesk,
        "_landed",
        _landed_on_one,
    ),
    Mutant(
        "a staged copy is freed while a write reads it",
        rules.PublishedBytesAreRight,
        GrantDesk,
        "_pump",
        _freed_while_read,
        STORM,
        STAGING,
    ),
    Mutant(
        "lent rows are dropped while a write to a lost peer may read them",
        rules.LentRowsStay,
        GrantDesk,
        "_give_rows_back",
        _given_back,
        CUTS,
        LENDING,
    ),
    Mutant(
        "a promise does not pin",
        rules.PromisesAreKept,
        TransferDesk,
        "promise",
        does(),
        CROWD,
        CROWDED,
    ),
    Mutant(
        "a failure is told twice",
        rules.RequestsEndOnce,
        PrefillHead,
        "_fail",
        _said_twice,
    ),
    Mutant(
        "no tombstones",
        rules.RoomsConcludeOnce,
        RoomTable,
        "tomb",
        does(),
    ),
    Mutant(
        "answers are not remembered",
        rules.GrantsAreAnsweredOneWay,
        GrantDesk,
        "_reply",
        _forgets_answers,
    ),
    Mutant(
        "fences never end",
        rules.NothingIsLeft,
        PrefillRank,
        "_tick_fences",
        _never_ends,
        DEATHS,
    ),
    Mutant(
        "skips are not said",
        rules.NothingIsKeptForNobody,
        EncodeDesk,
        "skip",
        does(),
    ),
    Mutant(
        "nobody gives way",
        rules.NobodyWaitsForEachOther,
        Turns,
        "_untangle",
        does(),
        CROWD,
        CROWDED,
    ),
    Mutant(
        "requests wait for ever",
        rules.DeadlinesAreKept,
        PrefillHead,
        "_expire",
        does(),
    ),
    Mutant(
        "offers stand for ever",
        rules.DeadlinesAreKept,
        RoomTable,
        "out_of_time",
        forgets,
    ),
    Mutant(
        "writes take for ever",
        rules.DeadlinesAreKept,
        PeerDesk,
        "overdue",
        forgets,
    ),
    Mutant(
        "silent writers are not missed",
        rules.SilenceIsNoticed,
        PrefillRank,
        "_on_silence",
        does(),
        CUTS,
    ),
    Mutant(
        "silent receivers are not missed",
        rules.SilenceIsNoticed,
        PeerDesk,
        "silent",
        forgets,
        CUTS,
    ),
    Mutant(
        "an address is never asked again",
        rules.TheNextRequestWorks,
        Topology,
        "forget",
        does(),
        DEATHS,
    ),
)
