# SPDX-License-Identifier: Apache-2.0
"""The transfers that bring items to a prefill engine, and the items that are held.

Owns items and transfers from the first question to the encode engine until their memory is
free again: which room is used, what ranks say of it, how it ends. A part of
``admission.PrefillHead``. Does not own requests: what they have to know is put into
``news``. Does not own the order in which memory is given (``turns``).
"""

from collections import deque

from epd_connector.core import transfer_words as words
from epd_connector.core.admission_state import (
    TRANSFER_MOVES,
    AdmissionSettings,
    Changed,
    FromRank,
    Item,
    ItemSpec,
    Lost,
    News,
    Request,
    Ticket,
    Transfer,
    TransferEvent,
    TransferState,
)
from epd_connector.core.effects import Effect, Noted, TellRanks
from epd_connector.core.encode_desk import EncodeDesk
from epd_connector.core.placement import Placement
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    Abandon,
    AnyFrame,
    Identity,
    RoomFailed,
    RoomLanded,
    RoomLoaded,
    RoomReleased,
)
from epd_connector.stats import Counters


class TransferDesk:
    """Items and transfers of one prefill head.

    ``now``: monotonic seconds, set by the head. ``news``: what requests have to know, taken by
    the head after each call. ``memory_changed``: somebody in line may get memory now.
    """

    def __init__(
        self, settings: AdmissionSettings, counters: Counters, effects: list[Effect]
    ) -> None:
        self.now = 0.0
        self.news: deque[News] = deque()
        self.memory_changed = False
        self.items: dict[str, Item] = {}
        self.transfers: dict[int, Transfer] = {}
        self.placement = Placement(settings)
        self._settings = settings
        self._counters = counters
        self._effects = effects
        self.encoders = EncodeDesk(settings, effects)
        self._promised: set[str] = set()

    def held(self, hash: str) -> Transfer | None:
        """The transfer that holds item ``hash`` complete on every rank, or None."""
        item = self.items.get(hash)
        transfer = None if item is None else item.transfer
        if transfer is None or transfer.state is not TransferState.READY:
            return None
        return transfer

    def phase(self, hash: str) -> str:
        """Where the transfer of item ``hash`` is held up, for a person to read."""
        transfer = self.items[hash].transfer
        assert transfer is not None
        return words.phase(transfer, self._settings)

    def next_deadline(self) -> float | None:
        """When ``tick`` is due, or None."""
        return self.encoders.next_deadline()

    def check(self) -> None:
        """Holds the invariants. Raises AssertionError."""
        assert not self.news
        self.placement.check(self.transfers.values())
        for hash, item in self.items.items():
            assert item.hash == hash
            assert item.transfer is not None, f"{hash} is leaked"
            assert item.transfer.item is item
            assert self.transfers[item.transfer.ticket.room] is item.transfer
        for transfer in self.transfers.values():
            assert transfer.state is not TransferState.OVER
        for hash in self._promised:
            assert self.held(hash) is not None, f"{hash} was promised and is gone"

    # --- who wants what ---------------------------------------------------------------

    def want(self, request: Request, spec: ItemSpec) -> Failure | None:
        """``request`` waits for an item from now on; why it cannot, or None."""
        item = self.items.get(spec.hash)
        if item is None:
            item = self.items[spec.hash] = Item(spec.hash, spec.rows, spec.modality)
        elif item.rows != spec.rows:
            return words.other_rows(item, spec.rows)
        item.wanted_by[request.request] = request
        request.waits[spec.hash] = None
        if item.transfer is None:
            self._start(item, None)
        elif item.transfer.state is TransferState.READY:
            self.placement.pin(item.transfer)
            self.skip(request, spec.hash)
        return None

    def unwant(self, request: Request, hash: str) -> None:
        """``request`` does not wait for item ``hash`` (any more)."""
        request.waits.pop(hash, None)
        item = self.items.get(hash)
        if item is None or item.wanted_by.pop(request.request, None) is None:
            return
        self.memory_changed = True
        if item.wanted_by:
            return
        transfer = item.transfer
        if transfer is not None and transfer.state is not TransferState.READY:
            self._cancel(transfer)
        self._settle(item)

    def skip(self, request: Request, hash: str) -> None:
        """The rooms that ``request`` brought for ``hash`` will not be used."""
        for ticket in request.tickets.pop(hash, ()):
            if ticket.room not in self.transfers:
                self._counters.add("rooms_skipped")
                self.encoders.skip(ticket)

    def load(self, hash: str) -> bool:
        """Every rank is about to load item ``hash``; False where it is not held."""
        transfer = self.held(hash)
        if transfer is None:
            return False
        for rank in range(self._settings.ranks):
            transfer.loads[rank] = transfer.loads.get(rank, 0) + 1
        self.placement.pin(transfer)
        return True

    def promise(self, hash: str) -> None:
        """Item ``hash``, if it is held, stays until ``pass_ended``."""
        transfer = self.held(hash)
        if transfer is not None:
            self._promised.add(hash)
            self.placement.pin(transfer)

    def pass_ended(self) -> None:
        """What was promised is on a load list by now, or was not needed."""
        promised, self._promised = self._promised, set()
        for hash in promised:
            self._settle(self.items[hash])

    # --- a transfer begins ------------------------------------------------------------

    def _start(self, item: Item, failure: Failure | None) -> None:
        """Receives ``item`` through a room that somebody who waits for it brought.

        ``failure``: why the attempt before failed; None for the first.
        """
        while (ticket := self._take_ticket(item)) is not None:
            if len(self.transfers) >= self._settings.max_rooms and not self.drop_oldest():
                failure = words.too_many(len(self.transfers))
                self.encoders.skip(ticket)
                break
            transfer = self._new(ticket, item)
            self._counters.add("rooms_opened")
            failure = self._begin(transfer)
            if failure is None:
                return
            failure = self._discard(transfer, failure)
        self.news.append(Lost(item, failure or words.no_room(item)))

    def _take_ticket(self, item: Item) -> Ticket | None:
        for request in item.wanted_by.values():
            tickets = request.tickets.get(item.hash)
            while tickets:
                ticket = tickets.popleft()
                if ticket.room not in self.transfers:
                    return ticket
        return None

    def _new(self, ticket: Ticket, item: Item) -> Transfer:
        return Transfer(ticket, item, self.now, self.now)

    def _begin(self, transfer: Transfer) -> Failure | None:
        """Starts on ``transfer``; why it cannot be, or None."""
        transfer.item.transfer = self.transfers[transfer.ticket.room] = transfer
        self.news.append(Changed(transfer.item))
        return self._resolve(transfer)

    def _resolve(self, transfer: Transfer) -> Failure | None:
        """Takes ``transfer`` on, once its encode engine is known; why it cannot be, or None."""
        answer = self.encoders.find(transfer.ticket.address)
        if isinstance(answer, Identity):
            return self._resolved(transfer, answer)
        return answer

    def _resolved(self, transfer: Transfer, identity: Identity) -> Failure | None:
        item = transfer.item
        width = identity.widths.get(item.modality)
        if width is None:
            return words.no_tower(transfer, identity)
        self._move(transfer, TransferEvent.RESOLVED)
        self.memory_changed = True
        transfer.identity = identity
        return self.placement.measure(transfer, item.rows, width * identity.itemsize)

    def is_current(self, transfer: Transfer) -> bool:
        """Whether the engine behind a queued transfer is still the one that was found.

        An outdated identity must not reach the ranks: they would take the engine of today
        for dead, and memory that it may still write to for safe.
        """
        return self.encoders.is_current(transfer.ticket.address, transfer.identity)

    def look_again(self, transfer: Transfer) -> None:
        """Another engine is behind the address of a queued transfer: it is asked who it is."""
        self._move(transfer, TransferEvent.OUTDATED)
        transfer.identity = None
        self._resolve_or_fail(transfer)

    def _resolve_or_fail(self, transfer: Transfer) -> None:
        failure = self._resolve(transfer)
        if failure is not None:
            self._fail(transfer, failure)

    def _resolve_waiting(self) -> None:
        for transfer in list(self.transfers.values()):
            if transfer.state is TransferState.RESOLVING:
                self._resolve_or_fail(transfer)

    def open(self, transfer: Transfer) -> None:
        """Every rank is to receive ``transfer``, which has its memory."""
        self._move(transfer, TransferEvent.PLACED)
        self._effects.append(TellRanks(words.open_frame(transfer)))
        self.encoders.tell_receivers(transfer)

    # --- what others say --------------------------------------------------------------

    def on_encode_head(self, address: str, frame: AnyFrame) -> None:
        """The encode head at ``address`` says ``frame``."""
        if self.encoders.hear(address, frame):
            self._resolve_waiting()

    def on_broken(self, address: str) -> None:
        """The connection to an encode head broke: whoever is there next is asked who it is."""
        self.encoders.broken(address)
        self.memory_changed = True

    def tick(self) -> None:
        """Time has passed: encode engines are asked again, or given up."""
        if self.encoders.tick():
            self._resolve_waiting()

    def on_rank(self, event: FromRank) -> None:
        """A rank of this engine says something. What its state does not allow does nothing."""
        frame = event.frame
        if not isinstance(frame, RoomLanded | RoomFailed | RoomReleased | RoomLoaded):
            return
        transfer = self.transfers.get(frame.room)
        if transfer is None or not 0 <= event.rank < self._settings.ranks:
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
        if len(transfer.landed) < self._settings.ranks:
            return
        self._move(transfer, TransferEvent.LANDED)
        self._counters.add("rooms_ready")
        self._counters.add("items_landed")
        self._counters.add("embedding_bytes", transfer.item_nbytes)
        self._counters.add(words.COUNTED[transfer.layout])
        self.placement.landed(transfer)
        self.news.append(Changed(transfer.item))
        self.encoders.tell_receivers(transfer)  # Once more: the first word may have been lost.

    def _rank_failed(self, transfer: Transfer, rank: int, failure: Failure) -> None:
        if self.encoders.failed(transfer.ticket.address, failure):
            # Those that wait for memory must look again, whatever they found before.
            self.memory_changed = True
        if transfer.state is TransferState.CLEARING:
            return
        transfer.again = failure.code is Code.STALE and transfer.attempt == 0
        self._fail(transfer, Failure(failure.code, f"rank {rank}: {failure.reason}"))

    def _loaded(self, transfer: Transfer, rank: int) -> None:
        left = transfer.loads.get(rank, 0) - 1
        if left > 0:
            transfer.loads[rank] = left
        elif transfer.loads.pop(rank, None) is not None and not transfer.loads:
            self._counters.add("items_published")
            transfer.published += 1
            if transfer.published > 1:
                self._counters.add("items_reloaded")
        self._settle(transfer.item)

    def _cleared(self, transfer: Transfer) -> None:
        """Frees the region of a failed transfer when no rank's part can be written any more."""
        if len(transfer.released) < self._settings.ranks:
            return
        self._over(transfer, TransferEvent.CLEARED)
        if not transfer.again:
            return
        again = self._new(transfer.ticket, transfer.item)
        again.attempt = transfer.attempt + 1
        failure = self._begin(again)
        if failure is not None:
            self._fail(again, failure)

    # --- a transfer ends --------------------------------------------------------------

    def _fail(self, transfer: Transfer, failure: Failure) -> None:
        """This attempt failed: try another room, or tell everybody who waits, once."""
        named = self._discard(transfer, failure)
        if not transfer.again:
            self._start(transfer.item, named)

    def _discard(self, transfer: Transfer, failure: Failure) -> Failure:
        """Ends a failed attempt; its failure, with the room and the encode engine named."""
        named = Failure(failure.code, f"{words.where(transfer)}: {failure.reason}")
        self._counters.add("rooms_failed")
        self._effects.append(Noted(f"item {transfer.item.hash[:16]}", named))
        self._end(transfer)
        return named

    def _cancel(self, transfer: Transfer) -> None:
        """Nobody wants what ``transfer`` brings."""
        self._counters.add("rooms_cancelled")
        transfer.again = False
        self._end(transfer)

    def _end(self, transfer: Transfer) -> None:
        """Stops ``transfer``; its memory is free at once where nothing can be written to it."""
        if transfer.state is TransferState.RECEIVING:
            self._move(transfer, TransferEvent.FAIL)
            self.placement.quarantine(transfer)
            self._effects.append(TellRanks(Abandon(transfer.ticket.room)))
        elif transfer.state is not TransferState.CLEARING:
            self._over(transfer, TransferEvent.FAIL)
        if not transfer.again:
            transfer.item.transfer = None
            self.encoders.skip(transfer.ticket)

    def drop_oldest(self) -> bool:
        """Frees the bytes of the item that has been of no use the longest."""
        resident = self.placement.oldest_resident()
        if resident is None:
            return False
        self._over(resident, TransferEvent.DROP)
        resident.item.transfer = None
        self._settle(resident.item)
        return True

    def _over(self, transfer: Transfer, event: TransferEvent) -> None:
        self._move(transfer, event)
        del self.transfers[transfer.ticket.room]
        self.placement.free(transfer)
        self.memory_changed = True

    def _settle(self, item: Item) -> None:
        """Unpins an item that nobody waits for; forgets one that nothing brings or holds."""
        self.memory_changed = True
        transfer = item.transfer
        if item.wanted_by:
            return
        if transfer is None:
            if self.items.get(item.hash) is item:
                del self.items[item.hash]
        elif transfer.state is TransferState.READY and not self.is_pinned(transfer):
            self.placement.unpin(transfer)

    def is_pinned(self, transfer: Transfer) -> bool:
        """Whether a step loads the item, or was told that it can."""
        return bool(transfer.loads) or transfer.item.hash in self._promised

    def _move(self, transfer: Transfer, event: TransferEvent) -> None:
        """The one place that moves a transfer. KeyError where the table has no such step."""
        transfer.state, transfer.since = TRANSFER_MOVES[transfer.state, event], self.now
