# SPDX-License-Identifier: Apache-2.0
"""The prefill head: decides what is received, where it is placed, and who may run.

Owns the requests that need items, and their deadlines: what is so for one rank of the
engine is so for all, since one head decides. Its parts own the rest: the transfers and the
items held (``transfers``), the line for memory (``turns``), the receive slab's bookkeeping
(``placement``), what is known of encode engines (``topology``). Does no I/O. Used by one
thread at a time: its runtime holds a lock around ``handle`` and ``ask``, because the
scheduler thread asks.

A request becomes READY when every rank has every item it waits for, or FAILED, once.
"""

from collections import deque

from epd_connector.core.admission_state import (
    AdmissionEvent,
    AdmissionSettings,
    Broken,
    Changed,
    FromEncodeHead,
    FromRank,
    Gone,
    Joined,
    Left,
    Loading,
    Lost,
    Needed,
    News,
    PassEnded,
    Promised,
    Request,
    RequestState,
    Spared,
    Stop,
    Tick,
    Ticket,
    Transfer,
    TransferState,
)
from epd_connector.core.deadlines import Deadlines
from epd_connector.core.effects import Effect, EncodeLocally, RequestFailed, TellRanks
from epd_connector.core.transfers import TransferDesk
from epd_connector.core.turns import Turns
from epd_connector.errors import Code, Failure
from epd_connector.memory.slab import Balance
from epd_connector.protocol.frames import HostGone, SenderBack, SenderSilent
from epd_connector.stats import Counters

__all__ = ["PAUSE_S", "AdmissionSettings", "PrefillHead"]

PAUSE_S = 2.0
"""The scheduler asks for a waiting request in every step. A silence longer than this means
that admission is paused, and is not counted against the request's deadline."""


class PrefillHead:
    """The sans-IO machine of one prefill head."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self.counters = Counters()
        self._requests: dict[str, Request] = {}
        self._deadlines: Deadlines[str] = Deadlines()
        self._effects: list[Effect] = []
        self._desk = TransferDesk(settings, self.counters, self._effects)
        self._turns = Turns(self._desk, self.counters)
        self._now = 0.0

    def handle(self, event: AdmissionEvent, now: float) -> list[Effect]:
        """Takes one event at monotonic time ``now`` (seconds); returns what is to be done."""
        self._now = self._desk.now = self._desk.encoders.now = now
        match event:
            case Joined():
                self._on_joined(event)
            case Needed():
                self._on_needed(event)
            case Spared():
                self._on_spared(event)
            case Left():
                self._on_left(event.request)
            case Loading():
                self._on_loading(event)
            case Promised():
                self._desk.promise(event.hash)
            case PassEnded():
                self._desk.pass_ended()
            case FromRank(frame=SenderSilent(sender=sender, failure=failure)):
                self._desk.encoders.silent(sender, failure)
            case FromRank(frame=SenderBack(sender=sender)):
                self._desk.encoders.back(sender)
            case FromRank():
                self._desk.on_rank(event)
            case FromEncodeHead():
                self._desk.on_encode_head(event.address, event.frame)
            case Broken(address=address):
                self._desk.on_broken(address)
            case Gone(host=host):
                self._on_gone(host)
            case Tick():
                self._on_tick()
            case Stop():
                self._on_stop()
        self._conclude()
        self._desk.encoders.flush()
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def ask(self, request: str, now: float) -> RequestState:
        """May ``request`` run? Called by the scheduler in every step in which it waits.

        KeyError unless ``knows``.
        """
        entry = self._requests[request]
        if entry.state is RequestState.WAITING:
            silence = now - entry.asked
            if silence > PAUSE_S and entry.deadline is not None:
                entry.deadline += silence
                self._deadlines.set(request, entry.deadline)
            entry.asked = now
        return entry.state

    def knows(self, request: str) -> bool:
        """Whether ``request`` has joined and not left."""
        return request in self._requests

    def holds(self, hash: str) -> bool:
        """Whether item ``hash`` is complete in the slab of every rank: it can be loaded."""
        return self._desk.held(hash) is not None

    def held(self, hash: str) -> Transfer:
        """The transfer that holds item ``hash``. KeyError unless ``holds``."""
        transfer = self._desk.held(hash)
        if transfer is None:
            raise KeyError(hash)
        return transfer

    def encodes_locally(self, request: str, hash: str) -> bool:
        """Whether the host is to encode item ``hash`` for ``request`` itself."""
        entry = self._requests.get(request)
        return entry is not None and hash in entry.local

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due, or None while nothing waits for time to pass."""
        times = [self._deadlines.next(), self._desk.next_deadline()]
        return min((when for when in times if when is not None), default=None)

    def balance(self) -> Balance:
        """Bytes of the receive slab by state."""
        return self._desk.placement.slab.balance()

    def transfers(self) -> dict[int, TransferState]:
        """Transfers by room, and their states."""
        return {room: transfer.state for room, transfer in self._desk.transfers.items()}

    def idle(self) -> bool:
        """Whether no request is known and no region may be written to."""
        states = (transfer.state for transfer in self._desk.transfers.values())
        return not self._requests and all(state is TransferState.READY for state in states)

    def skips_unanswered(self) -> int:
        """Rooms that encode engines were told to skip and may not have heard of."""
        return len(self._desk.encoders.skips)

    def check(self) -> None:
        """Holds the invariants. Raises AssertionError."""
        self._desk.check()
        for hash, item in self._desk.items.items():
            for name, request in item.wanted_by.items():
                assert self._requests.get(name) is request
                assert hash in request.waits
        for name, request in self._requests.items():
            for hash in request.waits:
                assert name in self._desk.items[hash].wanted_by
            waiting = any(not self.holds(hash) for hash in request.waits)
            assert waiting == (request.state is RequestState.WAITING)
            assert (request.deadline is not None) == waiting

    # --- what the scheduler says ------------------------------------------------------

    def _on_joined(self, event: Joined) -> None:
        if event.request in self._requests:
            return
        tickets: dict[str, deque[Ticket]] = {}
        for spec in event.items:
            if spec.room is not None:
                tickets.setdefault(spec.hash, deque()).append(Ticket(spec.room, spec.address))
        specs = {spec.hash: spec for spec in event.items}
        self._requests[event.request] = Request(event.request, specs, tickets, self._now)

    def _on_needed(self, event: Needed) -> None:
        request = self._requests.get(event.request)
        if request is None or request.state is RequestState.FAILED:
            return
        for hash in event.hashes:
            spec = request.specs.get(hash)
            if spec is None or hash in request.waits or hash in request.local:
                continue
            failure = self._desk.want(request, spec)
            if failure is not None:
                self._fail(request, failure)
            self._hear_all()
            if request.failure is not None:
                return
        self._update(request)

    def _on_spared(self, event: Spared) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        for hash in event.hashes:
            self._desk.unwant(request, hash)
            self._desk.skip(request, hash)
        self._update(request)

    def _on_left(self, name: str) -> None:
        request = self._requests.pop(name, None)
        if request is not None:
            self._let_go(request)

    def _on_loading(self, event: Loading) -> None:
        """From here on the host's encoder cache holds the item for the request."""
        if not self._desk.load(event.hash):
            return
        request = self._requests.get(event.request)
        if request is not None:
            self._desk.unwant(request, event.hash)
            self._update(request)

    def _on_stop(self) -> None:
        failure = Failure(Code.SHUTDOWN, "the prefill engine is shutting down")
        for request in list(self._requests.values()):
            self._fail(request, failure)
            self._on_left(request.request)

    def _on_gone(self, host: str) -> None:
        """The ranks learn it with this word only: nothing may be opened there afterwards."""
        self._desk.encoders.gone(host)
        self._desk.memory_changed = True
        self._effects.append(TellRanks(HostGone(host)))

    # --- what becomes of requests -----------------------------------------------------

    def _conclude(self) -> None:
        """Until nothing changes any more: tells requests of their items, and gives memory."""
        while self._desk.news or self._desk.memory_changed:
            self._hear_all()
            self._desk.memory_changed = False
            crowded_out = self._turns.give()
            if crowded_out is not None:
                request, failure = crowded_out
                self._go_without(request, dict.fromkeys(request.waits, failure))

    def _hear_all(self) -> None:
        while self._desk.news:
            self._hear(self._desk.news.popleft())

    def _hear(self, news: News) -> None:
        hash = news.item.hash
        for request in list(news.item.wanted_by.values()):
            match news:
                case Lost(failure=failure):
                    self._go_without(request, {hash: failure})
                case Changed() if self.holds(hash):
                    self._desk.skip(request, hash)
            self._update(request)

    def _update(self, request: Request) -> None:
        """READY or WAITING, by what the request waits for; its deadline runs while it waits."""
        if request.state is RequestState.FAILED:
            return
        if all(self.holds(hash) for hash in request.waits):
            self._move(request, RequestState.READY)
            request.deadline = None
            self._turns.step_out(request)
            self._deadlines.clear(request.request)
            return
        self._move(request, RequestState.WAITING)
        self._turns.line_up(request)
        if request.deadline is None:
            request.deadline = self._now + self.settings.receive_timeout_s
            request.asked = self._now
            self._deadlines.set(request.request, request.deadline)

    def _go_without(self, request: Request, failures: dict[str, Failure]) -> None:
        """``request`` does not get these items, of which it may have some by now.

        Its host encodes them, or it fails.
        """
        for hash, failure in failures.items():
            if request.state is RequestState.FAILED:
                return
            if self.holds(hash):
                continue
            if self.settings.encode_locally and request.specs[hash].encodable:
                self._encode_locally(request, hash, failure)
            else:
                self._fail(request, failure)
        self._update(request)

    def _encode_locally(self, request: Request, hash: str, failure: Failure) -> None:
        request.local.add(hash)
        self.counters.add("items_encoded_locally")
        self._effects.append(EncodeLocally(request.request, hash, failure))
        self._desk.unwant(request, hash)
        self._desk.skip(request, hash)

    def _fail(self, request: Request, failure: Failure) -> None:
        if request.state is RequestState.FAILED:
            return
        self._move(request, RequestState.FAILED)
        request.failure = failure
        self._effects.append(RequestFailed(request.request, failure))
        self.counters.add("items_unavailable")
        self._let_go(request)

    def _move(self, request: Request, state: RequestState) -> None:
        """The one place that moves a request. To stay where it is is no move."""
        if request.state is not state:
            request.state, request.since = state, self._now

    def _let_go(self, request: Request) -> None:
        """``request`` waits for nothing any more, and its rooms are not needed."""
        request.deadline = None
        self._deadlines.clear(request.request)
        self._turns.step_out(request)
        for hash in list(request.waits):
            self._desk.unwant(request, hash)
        for hash in list(request.tickets):
            self._desk.skip(request, hash)

    # --- time -------------------------------------------------------------------------

    def _on_tick(self) -> None:
        self._desk.tick()
        self._hear_all()
        for name in self._deadlines.expired(self._now):
            request = self._requests[name]
            if self._now - request.asked > PAUSE_S:
                self._deadlines.set(name, self._now + PAUSE_S)
            else:
                self._expire(request)

    def _expire(self, request: Request) -> None:
        failures = {
            hash: Failure(Code.TIMEOUT, self._desk.phase(hash))
            for hash in request.waits
            if not self.holds(hash)
        }
        self._go_without(request, failures)
