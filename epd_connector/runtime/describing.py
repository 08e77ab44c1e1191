# SPDX-License-Identifier: Apache-2.0
"""What a head says of its engine to whoever asks: counters at once, everything when its ranks
have said how they are.

Owns who has asked and what ranks have answered so far, both bounded; what failed lately; and
the facts of this process. Does not own what machines look like (``core.describe``) or frames'
way. Used by the head's loop thread.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from epd_connector import __version__
from epd_connector.link.base import PeerId
from epd_connector.protocol.codec import MAX_FRAME_BYTES, PROTOCOL_VERSION
from epd_connector.protocol.frames import EngineDescription, Report
from epd_connector.protocol.state import (
    LISTED,
    EncodeState,
    EngineState,
    FailureState,
    PrefillState,
    ProcessState,
    RankState,
    bounded,
    name,
)
from epd_connector.stats import Counters

PATIENCE_S = 1.0
"""Seconds that ranks have to answer in."""
MAX_ASKED = 16
"""Questions that are answered at a time; more are not answered at all."""
MAX_FAILURES = 64
MAX_TEXT_CHARS = 500
_LENGTHS = (LISTED, 50, 25, 12, 6, 3, 1, 0)
"""How long tables are: the first length with which everything fits into a frame."""
_FITS_BYTES = MAX_FRAME_BYTES - 1024


@dataclass(frozen=True, slots=True)
class HeadPlace:
    """Where a head stands. ``control``: endpoint for peers and tools, which are told of it as
    ``advertised``; ``link``: for its ranks, empty where they come through ``control``;
    ``link_token``: what frames of the own engine carry.
    """

    role: str
    fingerprint: str
    incarnation: int
    link_token: int
    ranks: int
    control: str
    link: str
    advertised: str = ""


@dataclass(slots=True, eq=False)
class Asked:
    """Somebody waits for a description of the engine, as ``peer`` of incarnation ``asker``."""

    peer: PeerId
    asker: int
    until: float
    answers: dict[int, RankState] = field(default_factory=dict)


class Describing:
    """Questions to one head, and the failures that it remembers."""

    def __init__(
        self,
        place: HeadPlace,
        ranks_up: Callable[[], int],
        counted: Callable[[], Counters],
        prefill: Callable[[float], PrefillState | None],
        encode: EncodeState | None,
    ) -> None:
        """``counted``: totals of the engine so far; ``prefill``: its head at a time, if any;
        ``encode``: its encode head, if any."""
        self._place = place
        self._ranks_up = ranks_up
        self._counted = counted
        self._prefill = prefill
        self._encode = encode
        self._started = time.monotonic()
        self._asked: list[Asked] = []
        self._failures: deque[tuple[float, str]] = deque(maxlen=MAX_FAILURES)

    # --- failures ---------------------------------------------------------------------

    def failed(self, text: str, now: float) -> None:
        """Something failed that a person may want to read about."""
        self._failures.append((now, bounded(text, MAX_TEXT_CHARS)))

    # --- questions --------------------------------------------------------------------

    def ask(self, peer: PeerId, asker: int, now: float) -> bool:
        """Somebody asks; whether the ranks must be told now, as nobody else waits for them."""
        if len(self._asked) >= MAX_ASKED:
            return False
        self._asked.append(Asked(peer, asker, now + PATIENCE_S))
        return True

    def heard(self, state: RankState) -> None:
        """A rank says how it is: everybody who waits hears of it."""
        for asked in self._asked:
            asked.answers[state.rank] = state

    def answers(self, now: float) -> list[tuple[PeerId, int, EngineDescription]]:
        """To whom to say what: those whose question all ranks have answered, or whose time is
        over."""
        done = [a for a in self._asked if len(a.answers) >= self._place.ranks or now >= a.until]
        if not done:
            return []
        self._asked = [asked for asked in self._asked if asked not in done]
        return [
            (a.peer, a.asker, EngineDescription(_fitting(self._describe(a, now)))) for a in done
        ]

    def next_wait(self, now: float) -> float | None:
        """Seconds until ``answers`` has something to give at the latest, or None."""
        return min((max(0.0, asked.until - now) for asked in self._asked), default=None)

    def report(self) -> Report:
        """What the engine has counted, and what failed lately."""
        totals = self._counted()
        return Report(
            role=self._place.role,
            fingerprint=self._place.fingerprint,
            ranks_up=self._ranks_up(),
            counters=_floats(totals),
            encoded_to_landed_s=tuple(totals.encoded_to_landed_s),
            failures=tuple(text for _, text in self._failures),
        )

    def _describe(self, asked: Asked, now: float) -> EngineState:
        """The engine as it is now, with what its ranks have answered."""
        place = self._place
        answers = sorted(asked.answers.items())
        return EngineState(
            role=place.role,
            address=(place.advertised or place.control).removeprefix("tcp://"),
            protocol=PROTOCOL_VERSION,
            version=__version__,
            incarnation=name(place.incarnation),
            fingerprint=place.fingerprint,
            uptime_s=round(now - self._started, 3),
            ranks_expected=place.ranks,
            ranks_up=self._ranks_up(),
            process=process_state(),
            counters=_floats(self._counted()),
            failures=tuple(
                FailureState(round(now - when, 3), text) for when, text in self._failures
            ),
            prefill=self._prefill(now),
            encode=self._encode,
            ranks=tuple(state for _, state in answers),
            silent_ranks=tuple(sorted(set(range(place.ranks)) - asked.answers.keys())),
        )


def _floats(counters: Counters) -> dict[str, float]:
    return {name: float(count) for name, count in counters.counts().items()}


def _fitting(state: EngineState) -> EngineState:
    """``state`` with tables of the first of ``_LENGTHS`` with which it fits into a frame."""
    encoder = msgspec.msgpack.Encoder()
    for length in _LENGTHS:
        cut = _cut(state, length)
        if len(encoder.encode(cut)) <= _FITS_BYTES:
            break
    return cut


def _cut(state: EngineState, length: int) -> EngineState:
    """``state`` with tables of at most ``length`` entries; what failed lately is kept."""
    prefill = state.prefill
    if prefill is not None:
        prefill = msgspec.structs.replace(
            prefill,
            transfers=prefill.transfers[:length],
            requests=prefill.requests[:length],
            encode_engines=prefill.encode_engines[:length],
        )
    ranks = tuple(_cut_rank(rank, length) for rank in state.ranks)
    return msgspec.structs.replace(state, prefill=prefill, ranks=ranks)


def _cut_rank(rank: RankState, length: int) -> RankState:
    send, receive = rank.send, rank.receive
    if send is not None:
        send = msgspec.structs.replace(send, rooms=send.rooms[:length], peers=send.peers[:length])
    if receive is not None:
        receive = msgspec.structs.replace(
            receive, rooms=receive.rooms[:length], peers=receive.peers[:length]
        )
    return msgspec.structs.replace(rank, send=send, receive=receive)


def process_state() -> ProcessState:
    """This process. Reads ``/proc``; a number that cannot be had is 0."""
    return ProcessState(
        pid=os.getpid(),
        threads=_number(lambda: len(os.listdir("/proc/self/task"))) or threading.active_count(),
        descriptors=_number(lambda: len(os.listdir("/proc/self/fd"))),
        resident_bytes=_number(_resident_bytes),
    )


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _number(read: Callable[[], int]) -> int:
    try:
        return read()
    except OSError:
        return 0
