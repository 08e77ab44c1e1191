# SPDX-License-Identifier: Apache-2.0
"""The prefill head: decides what is received, where it is placed, and who may run.

Owns the requests that need items, the transfers that bring them, and the receive slab's
bookkeeping: one placement for all ranks of the engine, so ranks cannot disagree about
memory, order or failure. Its knowledge of encode engines (``topology``) and its memory
(``placement``) are parts of it. Does no I/O. Used by one thread at a time: its runtime
holds a lock around ``handle`` and ``ask``, because the scheduler thread asks.

A request becomes READY when every rank has every item it waits for, or FAILED, once.
"""

from collections import deque
from dataclasses import dataclass

from epd_connector.core.admission_state import (
    TRANSFER_MOVES,
    AdmissionEvent,
    FromEncodeHead,
    FromRank,
    Item,
    ItemSpec,
    Joined,
    Left,
    Loading,
    Needed,
    PassEnded,
    Promised,
    Request,
    RequestState,
    Spared,
    Stop,
    Tick,
    Ticket,
    Transfer,
    TransferEvent,
    TransferState,
)
from epd_connector.core.deadlines import Deadlines
from epd_connector.core.effects import (
    Effect,
    EncodeLocally,
    Noted,
    RequestFailed,
    Send,
    TellRanks,
)
from epd_connector.core.placement import Placement
from epd_connector.core.topology import Expected, Topology
from epd_connector.errors import Code, Failure
from epd_connector.memory.slab import Balance
from epd_connector.protocol.frames import (
    Abandon,
    Identity,
    Open,
    RoomFailed,
    RoomLanded,
    RoomLoaded,
    RoomReleased,
    SkipRooms,
)
from epd_connector.stats import Counters

PAUSE_S = 2.0
"""The scheduler asks for a waiting request in every step. A silence longer than this means
that admission is paused, and is not counted against the request's deadline."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """What a prefill head is configured with. Times in seconds, sizes in bytes.

    ``sharded``: ranks receive shards of rows instead of whole items.
    """

    ranks: int
    slab_nbytes: int
    sharded: bool
    receive_timeout_s: float
    resolve_timeout_s: float
    encode_locally: bool
    max_rooms: int
    expected: Expected


class PrefillHead:
    """The sans-IO machine of one prefill head."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self.counters = Counters()
        self._requests: dict[str, Request] = {}
        self._items: dict[str, Item] = {}
        self._transfers: dict[int, Transfer] = {}
        self._topology = Topology(settings.expected, settings.resolve_timeout_s)
        self._placement = Placement(settings.slab_nbytes, settings.ranks)
        self._deadlines: Deadlines[str] = Deadlines()
        self._unplaced: dict[str, Request] = {}
        self._promised: set[str] = set()
        self._memory_changed = False
        self._now = 0.0
        self._effects: list[Effect] = []

    def handle(self, event: AdmissionEvent, now: float) -> list[Effect]:
        """Takes one event at monotonic time ``now`` (seconds); returns what is to be done."""
        self._now = now
        self._effects = self._topology.effects = []
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
                self._on_promised(event)
            case PassEnded():
                self._on_pass_ended()
            case FromRank():
                self._on_rank(event)
            case FromEncodeHead():
                if self._topology.hear(event.address, event.frame, now):
                    self._resolve_waiting()
            case Tick():
                self._on_tick()
            case Stop():
                self._on_stop()
        if self._memory_changed:
            self._place_waiting()
        return self._effects

    def ask(self, request: str, now: float) -> RequestState:
        """May ``request`` run? Called by the scheduler in every step in which it waits."""
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
        item = self._items.get(hash)
        return (
            item is not None
            and item.transfer is not None
            and (item.transfer.state is TransferState.READY)
        )

    def held(self, hash: str) -> Transfer:
        """The transfer that holds item ``hash``. KeyError unless ``holds``."""
        transfer = self._items[hash].transfer
        if transfer is None or transfer.state is not TransferState.READY:
            raise KeyError(hash)
        return transfer

    def encodes_locally(self, request: str, hash: str) -> bool:
        """Whether the host is to encode item ``hash`` for ``request`` itself."""
        entry = self._requests.get(request)
        return entry is not None and hash in entry.local

    def next_deadline(self) -> float | None:
        """When ``Tick`` is due, or None while nothing waits for time to pass."""
        times = [self._deadlines.next(), self._topology.next_deadline()]
        return min((when for when in times if when is not None), default=None)

    def balance(self) -> Balance:
        """Bytes of the receive slab by state."""
        return self._placement.slab.balance()

    def transfers(self) -> dict[int, TransferState]:
        """Transfers by room, and their states."""
        return {room: transfer.state for room, transfer in self._transfers.items()}

    def idle(self) -> bool:
        """Whether no request is known and no region may be written to."""
        busy = (t for t in self._transfers.values() if t.state is not TransferState.READY)
        return not self._requests and next(busy, None) is None

    def check(self) -> None:
        """Holds the invariants. Raises AssertionError."""
        self._placement.check(self._transfers.values())
        for item in self._items.values():
            assert item.wanted_by or item.transfer is not None, f"{item.hash} is leaked"
            for name, request in item.wanted_by.items():
                assert self._requests.get(name) is request
                assert item.hash in request.waits
        for transfer in self._transfers.values():
            assert transfer.state is not TransferState.OVER

    # --- requests ---------------------------------------------------------------------

    def _on_joined(self, event: Joined) -> None:
        if event.request in self._requests:
            return
        tickets: dict[str, deque[Ticket]] = {}
        for spec in event.items:
            if spec.room is not None:
                tickets.setdefault(spec.hash, deque()).append(Ticket(spec.room, spec.address))
        specs = {spec.hash: spec for spec in event.items}
        self._requests[event.request] = Request(event.request, specs, tickets)

    def _on_needed(self, event: Needed) -> None:
        request = self._requests.get(event.request)
        if request is None or request.state is RequestState.FAILED:
            return
        for hash in event.hashes:
            spec = request.specs.get(hash)
            if spec is None or hash in request.waits or hash in request.local:
                continue
            if not self._want(request, spec):
                return
        self._update(request)

    def _want(self, request: Request, spec: ItemSpec) -> bool:
        """``request`` waits for an item from now on; False where it has failed over it."""
        item = self._items.get(spec.hash)
        if item is None:
            item = self._items[spec.hash] = Item(spec.hash, spec.rows, spec.modality)
        elif item.rows != spec.rows:
            reason = f"item {spec.hash[:16]} has {item.rows} rows here and {spec.rows} tokens in"
            reason = f"{reason} this prompt: its uuid was reused"
            self._fail_request(request, Failure(Code.BAD_REQUEST, reason))
            return False
        item.wanted_by[request.request] = request
        request.waits[spec.hash] = None
        if request.deadline is None:
            request.deadline = self._now + self.settings.receive_timeout_s
            request.asked = self._now
            self._deadlines.set(request.request, request.deadline)
        if item.transfer is None:
            self._start(item, None)
        elif item.transfer.state is TransferState.READY:
            self._placement.pin(item.transfer)
            self._skip(request, spec.hash)
        return request.state is not RequestState.FAILED

    def _on_spared(self, event: Spared) -> None:
        request = self._requests.get(event.request)
        if request is None:
            return
        for hash in event.hashes:
            self._unwant(request, hash)
            self._skip(request, hash)
        self._update(request)

    def _on_left(self, name: str) -> None:
        request = self._requests.pop(name, None)
        if request is None:
            return
        self._deadlines.clear(name)
        self._unplaced.pop(name, None)
        for hash in list(request.waits):
            self._unwant(request, hash)
        for hash in list(request.tickets):
            self._skip(request, hash)

    def _unwant(self, request: Request, hash: str) -> None:
        request.waits.pop(hash, None)
        item = self._items.get(hash)
        if item is None or item.wanted_by.pop(request.request, None) is None:
            return
        self._memory_changed = True
        if item.wanted_by:
            return
        if item.transfer is not None and item.transfer.state is not TransferState.READY:
            self._end(item.transfer, cancelled=True)
        self._settle(item)

    def _on_loading(self, event: Loading) -> None:
        """From here on the host's encoder cache holds the item for the request."""
        if not self.holds(event.hash):
            return
        transfer = self.held(event.hash)
        for rank in range(self.settings.ranks):
            transfer.loads[rank] = transfer.loads.get(rank, 0) + 1
        self._placement.pin(transfer)
        request = self._requests.get(event.request)
        if request is not None:
            self._unwant(request, event.hash)
            self._update(request)

    def _on_promised(self, event: Promised) -> None:
        if self.holds(event.hash):
            self._promised.add(event.hash)
            self._placement.pin(self.held(event.hash))

    def _on_pass_ended(self) -> None:
        promised, self._promised = self._promised, set()
        for hash in promised:
            self._settle(self._items[hash])

    def _update(self, request: Request) -> None:
        """READY or WAITING, by what the request waits for; its deadline runs while it waits."""
        if request.state is RequestState.FAILED:
            return
        if any(not self.holds(hash) for hash in request.waits):
            request.state = RequestState.WAITING
            self._line_up(request)
            return
        request.state, request.deadline = RequestState.READY, None
        self._unplaced.pop(request.request, None)
        self._deadlines.clear(request.request)

    def _line_up(self, request: Request) -> None:
        """``request`` waits for memory, behind those that already do."""
        self._unplaced.setdefault(request.request, request)
        self._memory_changed = True

    def _fail_request(self, request: Request, failure: Failure) -> None:
        if request.state is RequestState.FAILED:
            return
        request.state, request.failure, request.deadline = RequestState.FAILED, failure, None
        self._deadlines.clear(request.request)
        self._unplaced.pop(request.request, None)
        self._effects.append(RequestFailed(request.request, failure))
        self.counters.add("items_unavailable")
        for hash in list(request.waits):
            self._unwant(request, hash)
        for hash in list(request.tickets):
            self._skip(request, hash)

    # --- transfers --------------------------------------------------------------------

    def _start(self, item: Item, failure: Failure | None) -> None:
        """Receives ``item`` through a room that somebody who waits for it brought.

        ``failure``: why the attempt before failed; None for the first.
        """
        while (ticket := self._take_ticket(item)) is not None:
            if len(self._transfers) >= self.settings.max_rooms and not self._drop_oldest():
                rooms = f"{len(self._transfers)} rooms are open on this prefill engine"
                failure = Failure(Code.OVERLOADED, f"{rooms}: raise max_rooms")
                self._tell_skip(ticket)
                break
            transfer = Transfer(ticket, item)
            self.counters.add("rooms_opened")
            failure = self._begin(transfer)
            if failure is None:
                return
            self._discard(transfer, failure)
        self._give_up(item, failure or self._no_room(item))

    def _begin(self, transfer: Transfer) -> Failure | None:
        """Starts on ``transfer``; why it cannot be, or None."""
        transfer.item.transfer = self._transfers[transfer.ticket.room] = transfer
        for request in transfer.item.wanted_by.values():
            self._line_up(request)
        return self._resolve(transfer)

    def _take_ticket(self, item: Item) -> Ticket | None:
        for request in item.wanted_by.values():
            tickets = request.tickets.get(item.hash, ())
            while tickets:
                ticket = request.tickets[item.hash].popleft()
                if ticket.room not in self._transfers:
                    return ticket
        return None

    def _no_room(self, item: Item) -> Failure:
        reason = f"item {item.hash[:16]} was received before and is gone, and its room is used:"
        return Failure(Code.CANCELLED, f"{reason} send the request again")

    def _give_up(self, item: Item, failure: Failure) -> None:
        """No room is left for ``item``: the host encodes it, or those who wait fail."""
        for request in list(item.wanted_by.values()):
            self._go_without(request, item.hash, failure)
            self._update(request)
        self._settle(item)

    def _go_without(self, request: Request, hash: str, failure: Failure) -> None:
        """``request`` does not get the item: its host encodes it, or the request fails."""
        if not (self.settings.encode_locally and request.specs[hash].encodable):
            self._fail_request(request, failure)
            return
        request.local.add(hash)
        self.counters.add("items_encoded_locally")
        self._effects.append(EncodeLocally(request.request, hash, failure))
        self._unwant(request, hash)
        self._skip(request, hash)

    def _give_way(self, request: Request, failure: Failure) -> None:
        """``request`` goes without everything that it does not have yet."""
        for hash in list(request.waits):
            if request.state is RequestState.WAITING and not self.holds(hash):
                self._go_without(request, hash, failure)
        self._update(request)

    def _resolve(self, transfer: Transfer) -> Failure | None:
        """Takes ``transfer`` on, once its encode engine is known; why it cannot be, or None."""
        answer = self._topology.find(transfer.ticket.address, self._now)
        if isinstance(answer, Identity):
            return self._resolved(transfer, answer)
        return answer

    def _resolved(self, transfer: Transfer, identity: Identity) -> Failure | None:
        item = transfer.item
        width = identity.widths.get(item.modality)
        if width is None:
            names = ", ".join(sorted(identity.widths))
            reason = f"encode engine at {transfer.ticket.address} encodes {names}"
            return Failure(Code.MISMATCH, f"{reason}, not {item.modality}")
        self._move(transfer, TransferEvent.RESOLVED)
        self._memory_changed = True
        transfer.identity = identity
        transfer.sharded = self.settings.sharded and self.settings.ranks > 1
        return self._placement.measure(transfer, item.rows, width * identity.itemsize)

    def _resolve_waiting(self) -> None:
        for transfer in list(self._transfers.values()):
            if transfer.state is TransferState.RESOLVING:
                failure = self._resolve(transfer)
                if failure is not None:
                    self._fail(transfer, failure)

    def _place_waiting(self) -> None:
        """Gives memory to requests in the order of their need, to each for all that it needs.

        Whoever is first in line and does not fit is waited for, so that nobody starves and
        no two requests hold parts of what both need.
        """
        while self._memory_changed:
            self._memory_changed = False
            for request in list(self._unplaced.values()):
                if not self._place(request):
                    self._untangle(request)
                    break

    def _place(self, request: Request) -> bool:
        """False where ``request`` is in the way of those behind it."""
        found = [t for t in (self._items[hash].transfer for hash in request.waits) if t is not None]
        queued = [transfer for transfer in found if transfer.state is TransferState.QUEUED]
        outdated = [transfer for transfer in queued if not self._is_current(transfer)]
        for transfer in outdated:
            self._look_again(transfer)
        unclear = (TransferState.RESOLVING, TransferState.CLEARING)
        if outdated or any(transfer.state in unclear for transfer in found):
            return True
        failure = self._placement.never(found)
        if failure is not None:
            self._give_way(request, failure)
            return True
        while not self._placement.lease(queued):
            if not self._drop_oldest():
                self.counters.add("leases_deferred")
                return False
        self._unplaced.pop(request.request, None)
        for transfer in queued:
            self._open(transfer)
        return True

    def _is_current(self, transfer: Transfer) -> bool:
        """Whether the engine behind a queued transfer is still the one that was found.

        An outdated identity must not reach the ranks: they would take the engine of today
        for dead, and memory that it may still write to for safe.
        """
        return self._topology.find(transfer.ticket.address, self._now) is transfer.identity

    def _look_again(self, transfer: Transfer) -> None:
        self._move(transfer, TransferEvent.OUTDATED)
        transfer.identity = None
        failure = self._resolve(transfer)
        if failure is not None:
            self._fail(transfer, failure)

    def _untangle(self, first: Request) -> None:
        """Those in line hold what ``first`` needs and wait behind it: the last gives way.

        Nobody gives way while anything else may still free memory.
        """
        if any(self._comes_free(transfer) for transfer in self._transfers.values()):
            return
        holders = [r for r in self._unplaced.values() if self._holds_more_than(r, first)]
        failure = Failure(
            Code.OVERLOADED,
            "requests that wait for each other hold the receive slab of "
            f"{self._placement.slab.capacity} bytes: raise receive_slab_bytes",
        )
        self._give_way(holders[-1] if holders else first, failure)

    def _comes_free(self, transfer: Transfer) -> bool:
        """Whether the memory of ``transfer`` is returned without anybody in line giving way."""
        if transfer.region is None:
            return False
        item = transfer.item
        return bool(
            transfer.state is not TransferState.READY
            or transfer.loads
            or item.hash in self._promised
            or item.wanted_by.keys() - self._unplaced.keys()
        )

    def _holds_more_than(self, request: Request, first: Request) -> bool:
        return any(self.holds(hash) and hash not in first.waits for hash in request.waits)

    def _drop_oldest(self) -> bool:
        """Frees the bytes of the item that has been of no use the longest."""
        resident = self._placement.oldest_resident()
        if resident is None:
            return False
        self._over(resident, TransferEvent.DROP)
        return True

    def _open(self, transfer: Transfer) -> None:
        assert transfer.identity is not None
        assert transfer.region is not None
        self._move(transfer, TransferEvent.PLACED)
        item, identity = transfer.item, transfer.identity
        frame = Open(
            room=transfer.ticket.room,
            rows=item.rows,
            width=identity.widths[item.modality],
            dtype=identity.dtype,
            itemsize=identity.itemsize,
            sharded=transfer.sharded,
            offset=transfer.region.offset,
            senders=identity.ranks,
        )
        self._effects.append(TellRanks(frame))

    # --- what ranks say ---------------------------------------------------------------

    def _on_rank(self, event: FromRank) -> None:
        frame = event.frame
        if not isinstance(frame, RoomLanded | RoomFailed | RoomReleased | RoomLoaded):
            return
        transfer = self._transfers.get(frame.room)
        if transfer is None or not 0 <= event.rank < self.settings.ranks:
            return
        match frame, transfer.state:
            case RoomLanded(), TransferState.RECEIVING:
                transfer.landed.add(event.rank)
                self._landed(transfer)
            case RoomFailed(failure=failure), TransferState.RECEIVING | TransferState.CLEARING:
                self._rank_failed(transfer, event.rank, failure)
            case RoomReleased(), TransferState.CLEARING:
                # In any other state it would answer for an earlier attempt of the same room.
                transfer.released.add(event.rank)
                self._cleared(transfer)
            case RoomLoaded(), TransferState.READY:
                self._loaded(transfer, event.rank)

    def _landed(self, transfer: Transfer) -> None:
        if len(transfer.landed) < self.settings.ranks:
            return
        if not self._move(transfer, TransferEvent.LANDED):
            return
        self.counters.add("rooms_ready")
        self.counters.add("items_landed")
        if transfer.sharded:
            self.counters.add("items_sharded")
        self._placement.landed(transfer)
        for request in list(transfer.item.wanted_by.values()):
            self._skip(request, transfer.item.hash)
            self._update(request)

    def _rank_failed(self, transfer: Transfer, rank: int, failure: Failure) -> None:
        if failure.code in (Code.STALE, Code.PEER_DEAD, Code.WRITE_FAILED):
            self._topology.forget(transfer.ticket.address)
        if transfer.state is TransferState.CLEARING:
            return
        transfer.again = failure.code is Code.STALE and transfer.attempt == 0
        where = f"room {transfer.ticket.room:016x} from {transfer.ticket.address}, rank {rank}"
        self._fail(transfer, Failure(failure.code, f"{where}: {failure.reason}"))

    def _loaded(self, transfer: Transfer, rank: int) -> None:
        left = transfer.loads.get(rank, 0) - 1
        if left > 0:
            transfer.loads[rank] = left
        elif transfer.loads.pop(rank, None) is not None and not transfer.loads:
            self.counters.add("items_published")
        self._settle(transfer.item)

    def _cleared(self, transfer: Transfer) -> None:
        """Frees the region of a failed transfer when no rank's part can be written any more."""
        if len(transfer.released) < self.settings.ranks:
            return
        if transfer.state is not TransferState.CLEARING:
            return
        self._over(transfer, TransferEvent.CLEARED)
        item = transfer.item
        if not transfer.again:
            return
        again = Transfer(transfer.ticket, item, attempt=transfer.attempt + 1)
        failure = self._begin(again)
        if failure is not None:
            self._fail(again, failure)

    # --- transfers end ----------------------------------------------------------------

    def _fail(self, transfer: Transfer, failure: Failure) -> None:
        """This attempt failed: try another room, or tell everybody who waits, once."""
        self._discard(transfer, failure)
        if not transfer.again:
            self._start(transfer.item, failure)

    def _discard(self, transfer: Transfer, failure: Failure) -> None:
        self.counters.add("rooms_failed")
        self._effects.append(Noted(f"room {transfer.ticket.room:016x}", failure))
        self._end(transfer, cancelled=False)
        if not transfer.again:
            transfer.item.transfer = None

    def _end(self, transfer: Transfer, *, cancelled: bool) -> None:
        """Stops ``transfer``; its memory is free at once where nothing can be written to it."""
        if cancelled:
            transfer.again = False
            self.counters.add("rooms_cancelled")
            transfer.item.transfer = None
        if transfer.state is TransferState.RECEIVING:
            self._move(transfer, TransferEvent.FAIL)
            self._placement.quarantine(transfer)
            self._effects.append(TellRanks(Abandon(transfer.ticket.room)))
        elif transfer.state is not TransferState.CLEARING:
            self._over(transfer, TransferEvent.FAIL)
        if not transfer.again:
            self._tell_skip(transfer.ticket)

    def _over(self, transfer: Transfer, event: TransferEvent) -> None:
        self._move(transfer, event)
        del self._transfers[transfer.ticket.room]
        self._placement.free(transfer)
        self._memory_changed = True
        if event is TransferEvent.DROP:
            transfer.item.transfer = None
            self._settle(transfer.item)

    def _settle(self, item: Item) -> None:
        """Unpins an item that nobody waits for; forgets one that nothing brings or holds."""
        transfer = item.transfer
        self._memory_changed = True
        if item.wanted_by:
            return
        if transfer is None:
            if self._items.get(item.hash) is item:
                del self._items[item.hash]
        elif transfer.state is TransferState.READY and not (
            transfer.loads or item.hash in self._promised
        ):
            self._placement.unpin(transfer)

    def _skip(self, request: Request, hash: str) -> None:
        """The rooms that ``request`` brought for ``hash`` will not be used."""
        for ticket in request.tickets.pop(hash, ()):
            if ticket.room not in self._transfers:
                self.counters.add("rooms_skipped")
                self._tell_skip(ticket)

    def _tell_skip(self, ticket: Ticket) -> None:
        self._effects.append(Send(f"tcp://{ticket.address}", 0, SkipRooms((ticket.room,))))

    def _move(self, transfer: Transfer, event: TransferEvent) -> bool:
        """The one place that moves a transfer; False where the table has no such step."""
        target = TRANSFER_MOVES.get((transfer.state, event))
        if target is None:
            return False
        transfer.state = target
        return True

    # --- time -------------------------------------------------------------------------

    def _on_tick(self) -> None:
        if self._topology.tick(self._now):
            self._resolve_waiting()
        for name in self._deadlines.expired(self._now):
            request = self._requests[name]
            if self._now - request.asked > PAUSE_S:
                self._deadlines.set(name, self._now + PAUSE_S)
            else:
                self._expire(request)

    def _expire(self, request: Request) -> None:
        for hash in list(request.waits):
            if request.state is RequestState.WAITING and not self.holds(hash):
                failure = Failure(Code.TIMEOUT, self._phase(self._items[hash]))
                self._go_without(request, hash, failure)
        self._update(request)

    def _phase(self, item: Item) -> str:
        """Where the transfer of ``item`` is held up, for a person to read."""
        limit = f"for {self.settings.receive_timeout_s} s (receive_timeout_s)"
        transfer = item.transfer
        if transfer is None:
            return f"item {item.hash[:16]} waited for a room {limit}"
        where = f"room {transfer.ticket.room:016x} from {transfer.ticket.address}"
        match transfer.state:
            case TransferState.RESOLVING:
                return f"{where}: the encode engine did not say who it is {limit}"
            case TransferState.QUEUED:
                slab = self._placement.slab.capacity
                return (
                    f"{where}: no memory for {transfer.nbytes} bytes in the receive slab of "
                    f"{slab} bytes {limit}: raise receive_slab_bytes"
                )
            case TransferState.CLEARING:
                return f"{where}: an earlier attempt could still write {limit}"
            case _:
                missing = sorted(set(range(self.settings.ranks)) - transfer.landed)
                return f"{where}: rows had not landed on ranks {missing} {limit}"

    def _on_stop(self) -> None:
        failure = Failure(Code.SHUTDOWN, "the prefill engine is shutting down")
        for request in list(self._requests.values()):
            self._fail_request(request, failure)
            self._on_left(request.request)
