# SPDX-License-Identifier: Apache-2.0
"""A prefill head's dealings with encode engines: who they are, whom to trust, what to tell them.

Owns what is known of addresses (``topology``), which encode ranks are not trusted for a while,
and the skips that were not answered (``skips``). Does not own transfers. A part of
``admission.PrefillHead``: it appends to the machine's effects.
"""

from epd_connector.core.admission_state import AdmissionSettings, Ticket, Transfer
from epd_connector.core.effects import Effect
from epd_connector.core.skips import Skips
from epd_connector.core.tombstones import Tombstones
from epd_connector.core.topology import Topology
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import AnyFrame, Identity, RoomReceivers, RoomsSkipped
from epd_connector.rows import serving_rank

MAX_DISTRUSTED = 4096
_SOMEBODY_ELSE = (Code.STALE, Code.PEER_DEAD, Code.WRITE_FAILED, Code.SHUTDOWN)
"""Failures after which another engine may be at the address."""


class EncodeDesk:
    """Encode engines of one prefill head. ``now``: monotonic seconds, set by the head."""

    def __init__(self, settings: AdmissionSettings, effects: list[Effect]) -> None:
        self.now = 0.0
        self.topology = Topology(
            settings.expected, settings.resolve_timeout_s, settings.failed_peer_s
        )
        self.topology.effects = effects
        self.skips = Skips(settings.max_rooms)
        self._settings = settings
        # By process, as an engine that was restarted is another one.
        self._distrusted: Tombstones[int, Failure] = Tombstones(
            MAX_DISTRUSTED, settings.failed_peer_s
        )

    def find(self, address: str) -> Identity | Failure | None:
        """The engine at ``address``, why there is none to be used, or None while it is asked."""
        answer = self.topology.find(address, self.now)
        if not isinstance(answer, Identity):
            return answer
        self._distrusted.forget(self.now)
        return self.distrust(answer, address, self.now) or answer

    def distrust(self, identity: Identity, address: str, now: float) -> Failure | None:
        """Why the engine at ``address``, which is known, is not used at ``now``; None if it is.

        Changes nothing.
        """
        if not len(self._distrusted):
            return None
        ranks = len(identity.ranks)
        for rank in range(self._settings.ranks):
            server = identity.ranks[serving_rank(rank, self._settings.ranks, ranks)]
            failure = self._distrusted.current(server.incarnation, now)
            if failure is not None:
                limit = f"{self._settings.failed_peer_s} s (failed_peer_s)"
                reason = f"encode engine at {address} is not used for {limit}: {failure.reason}"
                return Failure(failure.code, reason)
        return None

    def is_current(self, address: str, identity: Identity | None) -> bool:
        """Whether ``identity`` is still who is at ``address``, as far as is known."""
        return self.topology.find(address, self.now) is identity

    # --- what others say --------------------------------------------------------------

    def hear(self, address: str, frame: AnyFrame) -> bool:
        """The encode head at ``address`` says ``frame``; whether more is known than before."""
        if isinstance(frame, RoomsSkipped):
            self.skips.heard(address, frame.rooms)
            return False
        return self.topology.hear(address, frame, self.now)

    def failed(self, address: str, failure: Failure) -> bool:
        """A receive failed on some rank; whether ``address`` must be asked anew."""
        if failure.code not in _SOMEBODY_ELSE:
            return False
        self.topology.forget(address)
        return True

    def silent(self, incarnation: int, failure: Failure) -> None:
        """An encode rank does not answer: it is not used for a while, unless it speaks."""
        self._distrusted.bury(incarnation, failure, self.now)

    def back(self, incarnation: int) -> None:
        """An encode rank that had been silent speaks again."""
        self._distrusted.remove(incarnation)

    def broken(self, address: str) -> None:
        """The connection to ``address`` broke: who is there is asked when it is needed."""
        self.topology.forget(address)
        self.topology.leave(address)

    def gone(self, host: str) -> None:
        """``host`` is dead: engines with a part of them there are asked who they are."""
        for address in self.topology.on_host(host):
            self.broken(address)

    def tick(self) -> bool:
        """Addresses are asked again, or given up; whether some was given up."""
        return self.topology.tick(self.now)

    def next_deadline(self) -> float | None:
        """When ``tick`` or ``flush`` has something to do, or None."""
        times = [self.topology.next_deadline(), self.skips.next_deadline()]
        return min((when for when in times if when is not None), default=None)

    # --- what they are told -----------------------------------------------------------

    def skip(self, ticket: Ticket) -> None:
        """The room of ``ticket`` is not needed: its engine is told with the next ``flush``."""
        self.skips.add(ticket.address, ticket.room)

    def tell_receivers(self, transfer: Transfer) -> None:
        """Encode ranks that serve nobody would hold the rows in vain."""
        ticket, ranks = transfer.ticket, self._settings.ranks
        assert transfer.identity is not None
        if len(transfer.identity.ranks) > ranks:
            self.topology.tell(ticket.address, RoomReceivers(ticket.room, ranks))

    def flush(self) -> None:
        """Says the skips that are due, in as few frames as can be. Nobody is told who is gone."""
        for address, frame in self.skips.take(self.now):
            if self.topology.silent(address):
                self.skips.give_up(address)
            else:
                self.topology.tell(address, frame)
        for address in self.skips.take_deaf():
            self.topology.leave(address)
