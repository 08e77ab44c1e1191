# SPDX-License-Identifier: Apache-2.0
"""A head's lines to the ranks of its own engine: who is up, and what they are still to hear.

Owns how each rank is reached, whether its process is still there, and the words that found a
rank's queue full. Does not own what is said or what follows from it. Used by the head's loop
thread only.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from epd_connector.core.effects import Effect, TellRanks
from epd_connector.errors import Code, Failure
from epd_connector.link.base import PeerId
from epd_connector.protocol.frames import (
    MAX_FRAMES,
    Abandon,
    AnyFrame,
    Describe,
    HeadUp,
    Open,
    RoomFailed,
    RoomReleased,
)
from epd_connector.runtime.switchboard import Switchboard

logger = logging.getLogger(__name__)

RETRY_S = 0.05
"""Seconds between two attempts to say what found a rank's queue full: nothing tells when
there is room again."""
BEAT_S = 1.0
"""Seconds between two looks at whether the ranks are still there, while rooms are open."""
MAX_WAITING = 1 << 16
"""Words that wait for one rank, at most: one for each of as many rooms as a head has open."""


class Missed(NamedTuple):
    """``rank`` was not told ``frame``, and never will be; why."""

    rank: int
    frame: AnyFrame
    failure: Failure


class Lost(NamedTuple):
    """The process of ``rank`` has ended."""

    rank: int
    failure: Failure


@dataclass(slots=True)
class _Line:
    """How a rank is reached, and what it is to hear as soon as its queue has room.

    ``lost``: the connection that it made is gone; if it lives, it makes another and speaks.
    """

    rank: int
    peer: PeerId
    incarnation: int
    lost: bool = False
    waiting: deque[AnyFrame] = field(default_factory=deque)


class OwnRanks:
    """The ``count`` ranks of one engine, reached through ``switch``."""

    def __init__(self, count: int, switch: Switchboard) -> None:
        self._count = count
        self._switch = switch
        self._lines: dict[int, _Line] = {}
        self._news: list[_Line] = []

    def up(self) -> int:
        """How many ranks have announced themselves and are not known to be gone."""
        return sum(not line.lost for line in self._lines.values())

    def announced(self, rank: int, peer: PeerId, incarnation: int) -> bool:
        """Rank ``rank`` is up and reached as ``peer``; False where there is no such rank."""
        if rank >= self._count:
            return False
        line = self._lines.setdefault(rank, _Line(rank, peer, incarnation))
        line.peer, line.incarnation, line.lost = peer, incarnation, False
        return True

    def heard(self, peer: PeerId, incarnation: int) -> int | None:
        """Which rank of ``incarnation`` spoke as ``peer``: it is reached so from now on."""
        for rank, line in self._lines.items():
            if line.incarnation == incarnation:
                line.peer, line.lost = peer, False
                return rank
        return None

    def tell(self, frames: Sequence[AnyFrame]) -> list[Missed]:
        """Tells every rank ``frames``, as many as one envelope holds; what was missed by whom.

        An ``Open`` that cannot be queued at once is missed: somebody waits for the room and
        is better off without it. So is a question. Any other word ends something that the
        rank may be busy with, so it waits for room in the queue.
        """
        missed = []
        for rank in range(self._count):
            line = self._lines.get(rank)
            if line is None:
                failure = Failure(Code.UNREACHABLE, f"rank {rank} of this engine is not up")
                missed += [Missed(rank, frame, failure) for frame in frames]
            elif line.waiting or not self._say(line, frames):
                missed += self._not_told(rank, line, frames)
        return missed

    def _not_told(self, rank: int, line: _Line, frames: Sequence[AnyFrame]) -> list[Missed]:
        """Keeps what can wait; the rest is missed."""
        failure = _lost(rank)
        wait: list[AnyFrame] = []
        if not line.lost:
            reason = f"the queue of frames to rank {rank} of this engine is full"
            failure = Failure(Code.OVERLOADED, reason)
            wait = [frame for frame in frames if not isinstance(frame, Open | Describe)]
        for frame in wait:
            self._wait(rank, line, frame)
        return [Missed(rank, frame, failure) for frame in frames if frame not in wait]

    def lost(self) -> list[Lost]:
        """Looks whether the ranks are still there; those that have been lost since the last
        look, each once."""
        for line in self._lines.values():
            if not line.lost and not line.waiting:
                self._say(line, [HeadUp()])
        news, self._news = self._news, []
        return [Lost(line.rank, _lost(line.rank)) for line in news if line.lost]

    def retry(self) -> None:
        """Says what waits, as far as there is room for it."""
        for line in self._lines.values():
            while line.waiting and self._say(line, [line.waiting[0]]):
                line.waiting.popleft()

    def next_wait(self) -> float | None:
        """Seconds until ``retry`` is due, or None while nothing waits."""
        return RETRY_S if any(line.waiting for line in self._lines.values()) else None

    def _say(self, line: _Line, frames: Sequence[AnyFrame]) -> bool:
        if self._switch.deliver(line.peer, line.incarnation, frames):
            return True
        if self._switch.gone(line.peer) and not line.lost:
            # What waits would end what its process did, which has ended with it.
            logger.error("%s", _lost(line.rank))
            line.lost = True
            line.waiting.clear()
            self._news.append(line)
        return False

    def _wait(self, rank: int, line: _Line, frame: AnyFrame) -> None:
        if len(line.waiting) < MAX_WAITING:
            line.waiting.append(frame)
            return
        logger.error(
            "rank %d does not take frames, and %d wait for it: %s is lost, and what it would end "
            "goes on; is the worker process alive?",
            rank,
            MAX_WAITING,
            frame,
        )


def take_words(effects: deque[Effect]) -> list[AnyFrame]:
    """What ranks are to be told next, up to the next effect of another kind and as far as an
    envelope has room for it behind the first."""
    frames: list[AnyFrame] = []
    while effects and len(frames) < MAX_FRAMES - 1 and isinstance(effects[0], TellRanks):
        effect = effects.popleft()
        assert isinstance(effect, TellRanks)
        frames.append(effect.frame)
    return frames


def answers_of(missed: Missed) -> list[AnyFrame]:
    """What a rank that was not told something is taken to answer."""
    match missed.frame:
        case Open(room=room):
            # It has granted nothing for a room that it does not know.
            return [RoomFailed(room, missed.failure), RoomReleased(room)]
        case Abandon(room=room):
            return [RoomReleased(room)]
    return []


def _lost(rank: int) -> Failure:
    reason = f"rank {rank} of this engine is gone: its worker process has ended"
    return Failure(Code.PEER_DEAD, reason)
