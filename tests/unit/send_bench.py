# SPDX-License-Identifier: Apache-2.0
"""An encode rank on a bench: short words for what it is told, and for what it answers."""

from dataclasses import replace
from typing import TypeVar

from epd_connector.core.effects import DropRows, Effect, Reply, Stage, Write
from epd_connector.core.send import EncodeRank, SendSettings
from epd_connector.core.send_events import (
    Claim,
    Encoded,
    FromPeer,
    SendEvent,
    Skipped,
    Staged,
    Tick,
    Wrote,
)
from epd_connector.core.send_state import RoomState
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import AnyFrame, Cancel, Grant, Hello

ME = 1000
ROWS, WIDTH, ITEMSIZE = 10, 4, 2
ROW_NBYTES = WIDTH * ITEMSIZE
BROKEN = Failure(Code.WRITE_FAILED, "the wire broke")
SETTINGS = SendSettings(
    incarnation=ME,
    rank=0,
    ranks=1,
    slab_nbytes=1 << 16,
    ahead_rows=0,
    offer_timeout_s=120.0,
    write_timeout_s=30.0,
    peer_timeout_s=5.0,
    failed_peer_s=30.0,
    write_parallelism=4,
    max_rooms=64,
    tombstone_s=300.0,
)
E = TypeVar("E")


def of(kind: type[E], effects: list[Effect]) -> list[E]:
    """The effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


class Bench:
    """One machine, its time, and the invariants held after every event.

    Prefill rank ``rank`` has incarnation ``2000 + rank`` and speaks over route ``rank``.
    """

    def __init__(self, ranks: int = 1, **changes: int | float) -> None:
        self.machine = EncodeRank(replace(SETTINGS, **changes))  # type: ignore[arg-type]
        self.ranks = ranks
        self.now = 0.0

    def do(self, event: SendEvent) -> list[Effect]:
        effects = list(self.machine.handle(event, self.now))
        self.machine.check()
        return effects

    def tick(self, now: float) -> list[Effect]:
        self.now = now
        return self.do(Tick())

    def hear(self, frame: AnyFrame, rank: int = 0, addressee: int = ME) -> list[Effect]:
        return self.do(FromPeer(rank, 2000 + rank, addressee, frame))

    def hello(self, rank: int = 0, slab_nbytes: int = 1 << 20) -> list[Effect]:
        return self.hear(Hello(rank, self.ranks, slab_nbytes, {"shm": f"slab-{rank}"}), rank)

    def grant(
        self, room: int = 1, number: int = 1, rank: int = 0, **changes: object
    ) -> list[Effect]:
        """Prefill rank ``rank`` grants room for the whole item, unless ``changes`` say else."""
        return self.hear(full_grant(room, number, **changes), rank)

    def asked(self, room: int = 1, number: int = 1, rank: int = 0) -> list[Effect]:
        self.hello(rank)
        return self.grant(room, number, rank)

    def cancel(self, room: int = 1, number: int = 1, rank: int = 0) -> list[Effect]:
        return self.hear(Cancel(room, number), rank)

    def claim(self, room: int = 1, hash: str = "h", rows: int = ROWS) -> list[Effect]:
        return self.do(Claim(room, hash, rows))

    def encode(self, hash: str = "h", token: int = 1, rows: int = ROWS) -> list[Effect]:
        return self.do(Encoded(hash, token, rows, WIDTH, "bfloat16", rows * ROW_NBYTES))

    def stage(self, effects: list[Effect]) -> list[Effect]:
        """Carries out every ``Stage`` in ``effects``; returns what follows."""
        return [e for stage in of(Stage, effects) for e in self.do(Staged(stage.copy))]

    def offer(self, room: int = 1, hash: str = "h") -> list[Effect]:
        """Claims and encodes and stages; returns what the last of these led to."""
        self.claim(room, hash)
        return self.stage(self.encode(hash))

    def wrote(self, effects: list[Effect], failure: Failure | None = None) -> list[Effect]:
        """Ends every ``Write`` in ``effects``; returns what follows."""
        return [e for write in of(Write, effects) for e in self.do(Wrote(write.write, failure))]

    def skip(self, room: int = 1) -> list[Effect]:
        return self.do(Skipped(room))

    def state(self, room: int = 1) -> RoomState | None:
        return self.machine.rooms().get(room)

    def count(self, name: str) -> int:
        return self.machine.counters.counts()[name]

    def at_rest(self) -> bool:
        """Nothing is open and every byte is free."""
        balance = self.machine.balance()
        return self.machine.idle() and balance.free == balance.capacity


def encode_rank(rank: int, ranks: int, prefill_ranks: int, **changes: int | float) -> Bench:
    """Encode rank ``rank`` of ``ranks`` on a bench with ``prefill_ranks`` prefill ranks."""
    bench = Bench(ranks=prefill_ranks)
    changed = replace(SETTINGS, **changes)  # type: ignore[arg-type]
    bench.machine = EncodeRank(replace(changed, rank=rank, ranks=ranks))
    return bench


def full_grant(room: int, number: int, **changes: object) -> Grant:
    """A grant of the whole item of the bench."""
    fields: dict[str, object] = {
        "room": room,
        "grant": number,
        "rows": ROWS,
        "start": 0,
        "count": ROWS,
        "width": WIDTH,
        "dtype": "bfloat16",
        "sharded": False,
        "transport": "shm",
        "offset": 4096,
        "nbytes": ROWS * ROW_NBYTES,
    }
    return Grant(**(fields | changes))  # type: ignore[arg-type]


def replies(effects: list[Effect]) -> list[AnyFrame]:
    return [effect.frame for effect in of(Reply, effects)]


def answers(effects: list[Effect]) -> list[tuple[int, str, int, int]]:
    """Answers to grants as (route, kind, room, grant)."""
    found = []
    for reply in of(Reply, effects):
        room, grant = getattr(reply.frame, "room", None), getattr(reply.frame, "grant", None)
        if room is not None and grant is not None:
            found.append((reply.route, type(reply.frame).__name__, room, grant))
    return found


def reason(effects: list[Effect]) -> Failure:
    """The failure that the one refusing or stalling reply among ``effects`` carries."""
    (failure,) = {f for f in (getattr(r, "failure", None) for r in replies(effects)) if f}
    assert isinstance(failure, Failure)
    return failure


def dropped(effects: list[Effect]) -> list[int]:
    return [drop.token for drop in of(DropRows, effects)]
