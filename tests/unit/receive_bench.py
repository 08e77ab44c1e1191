# SPDX-License-Identifier: Apache-2.0
"""A prefill rank on a bench: short words for what it is told, and for what it says."""

from dataclasses import replace
from typing import TypeVar

from epd_connector.core.effects import Effect, Send, TellHead
from epd_connector.core.receive import PrefillRank
from epd_connector.core.receive_state import (
    Abandoned,
    FromSender,
    Opened,
    ReceiveEvent,
    ReceiveSettings,
    RoomState,
    Tick,
)
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import AnyFrame, Grant, Open, RankAddress, RoomFailed
from epd_connector.rows import Layout

ME = 3000
WRITER = 4000
ENDPOINT = "tcp://10.0.0.1:9001"
FENCE_S = 2.0
REASON = Failure(Code.WRITE_FAILED, "the wire broke")
SETTINGS = ReceiveSettings(
    incarnation=ME,
    rank=0,
    ranks=1,
    slab_nbytes=1 << 20,
    sessions={"shm": "slab"},
    fences={"shm": FENCE_S},
    heartbeat_s=1.0,
    peer_timeout_s=5.0,
    max_rooms=8,
)
E = TypeVar("E")


class Bench:
    """One machine, its time, and the invariants held after every event."""

    def __init__(self, **changes: object) -> None:
        self.machine = PrefillRank(replace(SETTINGS, **changes))  # type: ignore[arg-type]
        self.now = 0.0

    def do(self, event: ReceiveEvent) -> list[Effect]:
        effects = list(self.machine.handle(event, self.now))
        self.machine.check()
        return effects

    def open(self, room: int = 1, incarnation: int = WRITER, **changes: object) -> list[Effect]:
        return self.do(Opened(opening(room, incarnation, **changes), "shm"))

    def hear(
        self, frame: AnyFrame, sender: int = WRITER, addressee: int = ME, endpoint: str = ENDPOINT
    ) -> list[Effect]:
        return self.do(FromSender(endpoint, sender, addressee, frame))

    def abandon(self, room: int = 1) -> list[Effect]:
        return self.do(Abandoned(room))

    def tick(self, now: float) -> list[Effect]:
        self.now = now
        return self.do(Tick())

    def run(self, until: float) -> list[Effect]:
        """Ticks whenever one is due, up to ``until``."""
        effects: list[Effect] = []
        while (due := self.machine.next_deadline()) is not None and due <= until:
            effects += self.tick(due)
        self.now = until
        return effects

    def state(self, room: int = 1) -> RoomState | None:
        return self.machine.rooms().get(room)

    def count(self, name: str) -> int:
        return self.machine.counters.counts()[name]


def opening(room: int, incarnation: int = WRITER, **changes: object) -> Open:
    fields: dict[str, object] = {
        "room": room,
        "rows": 10,
        "width": 4,
        "dtype": "bfloat16",
        "itemsize": 2,
        "layout": Layout.WHOLE,
        "offset": 4096,
        "senders": (RankAddress(ENDPOINT, incarnation, {"shm": "host"}),),
    }
    return Open(**(fields | changes))  # type: ignore[arg-type]


def told(effects: list[Effect]) -> list[tuple[str, int]]:
    """What the head was told, as (kind, room)."""
    frames = [effect.frame for effect in effects if isinstance(effect, TellHead)]
    return [(type(frame).__name__, frame.room) for frame in frames if hasattr(frame, "room")]


def sent(effects: list[Effect]) -> list[str]:
    return [type(effect.frame).__name__ for effect in effects if isinstance(effect, Send)]


def grants(effects: list[Effect]) -> list[Grant]:
    frames = [effect.frame for effect in effects if isinstance(effect, Send)]
    return [frame for frame in frames if isinstance(frame, Grant)]


def failure(effects: list[Effect]) -> Failure:
    """The failure that the head was told."""
    told = [effect.frame for effect in effects if isinstance(effect, TellHead)]
    (found,) = [frame.failure for frame in told if isinstance(frame, RoomFailed)]
    return found
