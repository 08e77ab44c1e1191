# SPDX-License-Identifier: Apache-2.0
"""What must always hold: one class for each rule, whose docstring is the rule.

Owns the wording of rules and how a world that breaks one is told from others. What is
remembered in order to hold them is in ``audits`` (of processes), ``memory`` (of bytes) and
``jobs`` (of requests).
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class Invariant:
    """One rule. Never instantiated: it is its own name."""

    @classmethod
    def sentence(cls) -> str:
        return inspect.cleandoc(cls.__doc__ or "").replace("\n", " ")

    @classmethod
    def broken(cls, detail: object) -> NoReturn:
        raise Violation(cls, str(detail))

    @classmethod
    def hold(cls, holds: object, detail: object) -> None:
        """``detail`` is made into words only where the rule is broken."""
        if not holds:
            cls.broken(detail() if callable(detail) else detail)

    @classmethod
    @contextmanager
    def holds(cls, where: str) -> Iterator[None]:
        """Whatever is asserted within is this rule."""
        try:
            yield
        except Violation:
            raise
        except AssertionError as error:
            raise Violation(cls, f"{where}: {error}") from error


class Violation(AssertionError):
    """A rule was broken."""

    def __init__(self, invariant: type[Invariant], detail: str) -> None:
        super().__init__(f"{invariant.__name__}: {invariant.sentence()} [{detail}]")
        self.invariant = invariant
        self.detail = detail


class MemoryBalances(Invariant):
    """Memory balances on every slab, and a machine's tables agree with each other."""


class MachinesDoNotRaise(Invariant):
    """Nothing that a machine is told makes it raise."""


class WritersAreGranted(Invariant):
    """Nothing is written into a region that is not granted to that very writer, room and grant."""


class OnlyTheDeadAreGone(Invariant):
    """Nobody who lives, however silent, is taken for gone."""


class PublishedBytesAreRight(Invariant):
    """Every published byte is right: of this item, this row, and of the writer that was granted."""


class LentRowsStay(Invariant):
    """Rows that are lent to writes stay until the last of these has ended."""


class PromisesAreKept(Invariant):
    """What the scheduler was told can be loaded is there until it is loaded."""


class RequestsEndOnce(Invariant):
    """Every request ends once: loaded, failed with a reason, aborted, or with its engine."""


class RoomsConcludeOnce(Invariant):
    """Every room begins once and is over once on each side, and each rank says so once."""


class GrantsAreAnsweredOneWay(Invariant):
    """Every grant is answered in one way only, however often it is answered."""


class NothingIsLeft(Invariant):
    """After quiet time nothing is left: no room, transfer, grant, copy, row, region or wait."""


class NothingIsKeptForNobody(Invariant):
    """What nobody needs any more is let go of at once, not when its offer times out."""


class NobodyWaitsForEachOther(Invariant):
    """While a request waits, something is under way that may end its wait, besides deadlines."""


class DeadlinesAreKept(Invariant):
    """No deadline is missed by more than a tick: of requests, of rooms, of writes."""


class SilenceIsNoticed(Invariant):
    """A peer that does not answer is noticed within peer_timeout_s, on both sides."""


class TheNextRequestWorks(Invariant):
    """Once it is calm, every engine that is up serves every other: the next request is loaded."""


ALL: tuple[type[Invariant], ...] = (
    MemoryBalances,
    MachinesDoNotRaise,
    WritersAreGranted,
    OnlyTheDeadAreGone,
    PublishedBytesAreRight,
    LentRowsStay,
    PromisesAreKept,
    RequestsEndOnce,
    RoomsConcludeOnce,
    GrantsAreAnsweredOneWay,
    NothingIsLeft,
    NothingIsKeptForNobody,
    NobodyWaitsForEachOther,
    DeadlinesAreKept,
    SilenceIsNoticed,
    TheNextRequestWorks,
)
