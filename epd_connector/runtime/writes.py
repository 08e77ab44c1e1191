# SPDX-License-Identifier: Apache-2.0
"""The writes of one rank: started at its transports, asked after, and reported when they end.

Owns which transport carries a write, and how often those that must be asked are asked. Does
not own decisions (``core.send``) or how bytes travel (``transport``). Used by the rank's loop
thread; ``in_flight`` by any.
"""

import logging
from collections.abc import Callable, Mapping

from epd_connector.core.effects import Write
from epd_connector.core.send_events import Wrote
from epd_connector.errors import Code, Failure
from epd_connector.transport.base import SlabBuffer, Span, Transport, WriteState

logger = logging.getLogger(__name__)

_PATIENCE = 100
"""A write is asked after again when its time so far has grown by one part in so many."""
_LONGEST_POLL_S = 0.02
"""So that one that is stalled costs next to nothing, however long it lasts."""


class Writes:
    """Writes over ``transports``, by name, the preferred one first."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self._transports = dict(transports)
        self._numbers: dict[tuple[str, int], int] = {}
        self._newest: dict[str, float] = {}

    def set_waker(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, from any thread, when a write has ended that is not asked after."""
        for transport in self._transports.values():
            transport.set_waker(wake)

    def adverts(self) -> dict[str, str]:
        """What peers are told, so that they can tell which transports reach this process."""
        return {name: transport.advert() for name, transport in self._transports.items()}

    def choose(self, adverts: Mapping[str, str], sessions: Mapping[str, str]) -> str | None:
        """The first transport with one of ``sessions`` that reaches the process of ``adverts``."""
        for name, transport in self._transports.items():
            if name in adverts and name in sessions and transport.reaches(adverts[name]):
                return name
        return None

    def start(self, order: Write, lent: SlabBuffer | None, now: float) -> Wrote | None:
        """Starts a write, from ``lent`` or the send slab; how it ended, if it did not begin."""
        transport = self._transports.get(order.transport)
        if transport is None:
            names = ", ".join(self._transports) or "none"
            reason = f"transport {order.transport!r} is not one of this rank's: {names}"
            return Wrote(order.write, Failure(Code.WRITE_FAILED, reason))
        span = Span(order.source, order.destination, order.nbytes)
        handle = transport.write(order.session, (span,), lent)
        self._numbers[order.transport, handle] = order.write
        self._newest[order.transport] = now
        return None

    def ended(self) -> list[Wrote]:
        """Writes that have ended since the last call."""
        found = []
        for name, transport in self._transports.items():
            if not transport.in_flight():
                continue
            for completion in transport.poll():
                number = self._numbers.pop((name, completion.handle), None)
                if number is None:
                    continue
                failed = completion.state is WriteState.FAILED
                failure = Failure(Code.WRITE_FAILED, f"{name}: {completion.reason}")
                found.append(Wrote(number, failure if failed else None))
        return found

    def next_poll(self, now: float) -> float | None:
        """Seconds until ``ended`` should be called again, or None where a waker will tell."""
        waits = []
        for name, transport in self._transports.items():
            if transport.poll_interval_s is not None and transport.in_flight():
                age = now - self._newest.get(name, now)
                waits.append(max(transport.poll_interval_s, min(age / _PATIENCE, _LONGEST_POLL_S)))
        return min(waits, default=None)

    def in_flight(self) -> int:
        """Writes that have not ended. Any thread."""
        return len(self._numbers)

    def forget(self, transport: str, session: str) -> None:
        """The peer behind ``session`` is gone."""
        if transport in self._transports:
            self._transports[transport].forget(session)

    def close(self) -> None:
        """Ends the transports, and waits a while for what is under way. Idempotent."""
        for transport in self._transports.values():
            transport.close()
            if not transport.quiet():
                logger.warning(
                    "%s: a write has not ended; slabs and sockets are kept until the process ends",
                    transport.name,
                )

    def quiet(self) -> bool:
        """Whether nothing that was started here can read or write any more. After ``close``."""
        return all(transport.quiet() for transport in self._transports.values())
