# SPDX-License-Identifier: Apache-2.0
"""Engines as the tests drive them: every engine is one or more processes of its own.

The test is the scheduler, the tower and the operator; it holds nothing of an engine itself.
"""

import functools
import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import TypeVar

from epd_connector.core.admission_state import ItemSpec, RequestState
from epd_connector.memory.segment import SHARED_DIRECTORY
from epd_connector.memory.slab import Balance
from epd_connector.testing.ports import Ports
from tests.group import encode_side
from tests.group.child import Child
from tests.group.host_config import WIDTH, host_config
from tests.group.material import Print, Rows, print_of
from tests.process import sides
from tests.process.sides import Encode, Place, Prefill
from tests.unit.pair_bench import new_id, until

S = TypeVar("S")

KIB, MIB = 1 << 10, 1 << 20
ROW = 2 * WIDTH
"""Bytes of one row."""
_serial = itertools.count()


def item(nbytes: int) -> Rows:
    """One that there has not been yet."""
    return Rows(f"item-{next(_serial)}", nbytes // ROW)


@functools.lru_cache(maxsize=256)
def expected(rows: Rows) -> Print:
    """What every rank must have of an item that is received whole."""
    return print_of(rows.tensor())


class Process(Child[S]):
    """A child that tests stop and kill."""

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


@dataclass(frozen=True)
class Asked:
    """A request of the test, with the room of each of its items."""

    name: str
    rooms: list[int]
    items: list[Rows]


class EncodeEngine:
    """An encode engine of ``ranks`` ranks, one process. ``extra``: keys of its configuration.

    ``ports``: the ones it is to have; it takes others where there are none given.
    """

    def __init__(
        self,
        ranks: int = 1,
        place: Place = Place(),  # noqa: B008
        ports: Ports | None = None,
        **extra: object,
    ) -> None:
        if ports is not None:
            extra["control_port"] = ports.first
        host = host_config("ec_producer", ranks, secrets.token_hex(8), extra)
        self.transport = extra.get("transport", "auto")
        self.child: Process[Encode] = Process("encode engine", Encode, host, place)
        self.child.end()
        self.address = self.child.call(sides.control)

    def claim(self, asked: Asked) -> None:
        """The request comes here, too."""
        for room, rows in zip(asked.rooms, asked.items, strict=True):
            self.child.call(encode_side.claim, room, rows)

    def encoded(self, *items: Rows) -> None:
        """The tower has run."""
        self.child.call(sides.tower, *items)

    def granted(self, asked: Asked, grants: int = 1) -> None:
        """Comes back when every room of ``asked`` has so many grants."""
        for room in asked.rooms:
            until(lambda room=room: self.child.call(encode_side.grants, room) == grants)  # type: ignore[misc]

    def offers(self) -> sides.Offers:
        return self.child.call(sides.offers)

    def idle(self) -> bool:
        """Whether it has nothing to do with any room, and all of its memory is free."""
        return self.offers() == sides.IDLE

    def all_concluded(self) -> bool:
        """Whether every room that it ever had is known to be over."""
        counters = self.counters()
        return counters["rooms_concluded"] == counters["rooms_opened"] > 0

    def counters(self) -> dict[str, float]:
        return self.child.call(sides.counters)


@dataclass
class PrefillEngine:
    """A prefill engine; every item is received whole on every rank.

    ``apart``: its head and its ranks are processes of their own.
    """

    ranks: int = 1
    apart: bool = False
    place: Place = field(default_factory=Place)
    extra: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        keys: dict[str, object] = {"share_slab": False, "shard": "never", **self.extra}
        host = host_config("ec_consumer", self.ranks, secrets.token_hex(8), keys)
        seats: list[tuple[bool, tuple[int, ...]]] = [(True, tuple(range(self.ranks)))]
        if self.apart:
            seats = [(True, ()), *((False, (rank,)) for rank in range(self.ranks))]
        self.parts: list[Process[Prefill]] = [
            Process("prefill engine", Prefill, host, self.place, *seat) for seat in seats
        ]
        for part in self.parts:
            part.end()
        self.segments = [name for part in self.parts for name in part.call(sides.holdings).segments]
        self.head.call(sides.await_ranks, self.ranks)
        self._names = itertools.count()

    @property
    def head(self) -> Process[Prefill]:
        """The process that has the head."""
        return self.parts[0]

    @property
    def rank_parts(self) -> list[Process[Prefill]]:
        return self.parts[-self.ranks :] if self.apart else self.parts

    def kill(self) -> None:
        """All of its processes end at once. Idempotent."""
        for part in self.parts:
            part.kill()

    def clear_away(self) -> None:
        """What the tracker that all tests share would clear away, and complain, at their end."""
        if self.place.own_tracker:
            return
        for name in self.segments:
            (SHARED_DIRECTORY / name).unlink(missing_ok=True)
            resource_tracker.unregister(f"/{name}", "shared_memory")

    # --- requests ---------------------------------------------------------------------

    def ask(self, encode: EncodeEngine, *items: Rows, claims: bool = True) -> Asked:
        """A request for ``items`` comes to both engines."""
        asked = Asked(f"r{next(self._names)}", [new_id() for _ in items], list(items))
        if claims:
            encode.claim(asked)
        specs = tuple(
            ItemSpec(rows.hash, rows.rows, rows.modality, room, encode.address)
            for room, rows in zip(asked.rooms, items, strict=True)
        )
        self.head.call(sides.ask, asked.name, specs)
        return asked

    def state(self, asked: Asked) -> RequestState:
        return self.head.call(sides.decided, asked.name)[0]

    def waits(self, asked: Asked) -> bool:
        return self.state(asked) is RequestState.WAITING

    def ready(self, asked: Asked) -> None:
        """Comes back when the request may run; what it needs is right on every rank."""
        until(lambda: not self.waits(asked))
        assert self.head.call(sides.decided, asked.name) == (RequestState.READY, [])
        self.right(asked)

    def right(self, asked: Asked) -> None:
        """Whether the items of a request that may run are right, byte for byte."""
        for rows in asked.items:
            where = self.head.call(sides.region, rows.hash)
            for part in self.rank_parts:
                for lies in part.call(sides.lies, where):
                    assert lies == expected(rows), rows

    def failed(self, asked: Asked) -> str:
        """Comes back when the request has failed, which it does once; why."""
        until(lambda: not self.waits(asked))
        for _ in range(3):
            assert self.state(asked) is RequestState.FAILED
        [reason] = self.head.call(sides.leave, asked.name)
        return reason

    def leave(self, *asked: Asked) -> None:
        """The requests are over and did not fail."""
        for each in asked:
            assert self.head.call(sides.leave, each.name) == []

    def loaded(self, asked: Asked) -> None:
        """The request's items come and are published; then it is over."""
        self.ready(asked)
        for rows in asked.items:
            where = self.head.call(sides.begin_load, asked.name, rows.hash)
            for part in self.rank_parts:
                for published in part.call(sides.load, where):
                    assert published == expected(rows), rows
        self.leave(asked)

    def load(self, encode: EncodeEngine, *items: Rows) -> None:
        """Items the whole way."""
        asked = self.ask(encode, *items)
        encode.encoded(*items)
        self.loaded(asked)

    # --- what is known ----------------------------------------------------------------

    def balance(self) -> Balance:
        return self.head.call(sides.balance)

    def receiving(self) -> dict[int, str]:
        return self.head.call(sides.receiving)

    def settled(self) -> bool:
        """Whether nothing is being received or waited for, and nobody may write here."""
        balance = self.balance()
        rooms = sum(part.call(sides.receiving_ranks) for part in self.rank_parts)
        return balance.leased == balance.landed == balance.quarantined == rooms == 0

    def placed(self, room: int) -> tuple[int, int]:
        """Offset and bytes of the region of a room, once it has one."""
        until(lambda: self.head.call(sides.placed_at, room) is not None)
        place = self.head.call(sides.placed_at, room)
        assert place is not None
        return place

    def counters(self) -> dict[str, float]:
        return self.head.call(sides.counters)


class Tenants:
    """Items that take all of a prefill engine's slab that is free, and wait to be loaded."""

    def __init__(self, prefill: PrefillEngine, encode: EncodeEngine, nbytes: int) -> None:
        self._prefill = prefill
        balance = prefill.balance()
        self.asked = [
            prefill.ask(encode, item(nbytes))
            for _ in range((balance.free + balance.resident) // nbytes)
        ]
        for asked in self.asked:
            encode.encoded(*asked.items)
        for asked in self.asked:
            prefill.ready(asked)
        assert prefill.balance().free == prefill.balance().resident == 0

    def right(self) -> None:
        for asked in self.asked:
            self._prefill.right(asked)

    def leave(self) -> None:
        """Whatever has happened since they came, they are right."""
        self.right()
        self._prefill.leave(*self.asked)


class Engines:
    """All engines of one test, and their end."""

    def __init__(self) -> None:
        self._encode: list[EncodeEngine] = []
        self._prefill: list[PrefillEngine] = []

    def encode(self, *args: object, **extra: object) -> EncodeEngine:
        """See ``EncodeEngine``."""
        engine = EncodeEngine(*args, **extra)  # type: ignore[arg-type]
        self._encode.append(engine)
        return engine

    def prefill(self, *args: object, **kwargs: object) -> PrefillEngine:
        """See ``PrefillEngine``."""
        engine = PrefillEngine(*args, **kwargs)  # type: ignore[arg-type]
        self._prefill.append(engine)
        return engine

    def end(self) -> None:
        for encode in self._encode:
            encode.child.kill()
        for prefill in self._prefill:
            prefill.kill()
            prefill.clear_away()


def made() -> Iterator[Engines]:
    """A fixture's body."""
    engines = Engines()
    yield engines
    engines.end()
