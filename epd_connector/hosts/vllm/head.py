# SPDX-License-Identifier: Apache-2.0
"""The connector in the scheduler process: what the scheduler asks and is told.

Owns, per request, which of its items are claimed, needed, cached or computed, and what
goes into the next step's plan. Does not own transfers (``core.admission``) or sockets
(``runtime.head``). Every method runs on the scheduler's thread and never blocks.

The host frees encoder-cache entries while it schedules and tells afterwards. So an entry
that no request refers to is not relied on where its loss could not be made good.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from epd_connector.config import Config
from epd_connector.core import admission_state as admission
from epd_connector.core.admission_state import RequestState
from epd_connector.core.effects import RequestFailed
from epd_connector.core.encode_head import RequestOver, RoomsUnneeded
from epd_connector.core.transfer_words import lost
from epd_connector.errors import Code, Failure, RequestError
from epd_connector.hosts.vllm.media import MediaFields
from epd_connector.hosts.vllm.mirror import CacheMirror
from epd_connector.hosts.vllm.plan import ClaimSpec, LoadSpec, StepPlan
from epd_connector.hosts.vllm.requests import Entry, Item, RecentRooms
from epd_connector.hosts.vllm.tickets import read_tickets
from epd_connector.runtime.head import HeadRuntime
from epd_connector.stats import Counters

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class HeadAdapter:
    """The scheduler's side of the connector, over a started ``HeadRuntime``."""

    def __init__(
        self, config: Config, runtime: HeadRuntime, media: MediaFields, own_address: str
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._media = media
        self._own_address = own_address
        self._entries: dict[str, Entry] = {}
        self._own_rooms = RecentRooms(config.max_rooms)
        self._claimed: dict[str, set[str]] = {}
        self._mirror = CacheMirror()
        self._plan = StepPlan()
        self._unavailable: set[str] = set()
        self._promised: set[str] = set()

    # --- may this request run? --------------------------------------------------------

    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        """Whether every item that ``request`` still has to compute can be had now."""
        entry = self._entries.get(request.request_id)
        if entry is None:
            entry = self._admit(request)
        elif len(request.mm_features) != len(entry.items):
            self._extend(request, entry)
        if num_computed_tokens >= entry.settled_at:
            return True
        if self._config.role.receives:
            self._note_outcomes()
        if entry.failed or self._is_held_back(request, entry):
            return False
        if not self._config.role.receives:
            entry.settled_at = 0
            return True
        return self._available(request, entry, num_computed_tokens)

    def _is_held_back(self, request: "Request", entry: Entry) -> bool:
        """Whether the tower is to make nothing for ``request`` yet: the send slab is full.

        A request that was let in is encoded to its end: it holds KV blocks, which others may
        wait for whose rows are granted.
        """
        if not entry.claims or request.status == RequestStatus.RUNNING:
            return False
        return self._runtime.holds_back(room for room, _ in entry.claims)

    def _admit(self, request: "Request") -> Entry:
        """First sight of a request: read its tickets, claim or join."""
        items = [self._item(feature) for feature in request.mm_features]
        entry = self._entries[request.request_id] = Entry(request.request_id, items)
        try:
            tickets = read_tickets(request.ec_transfer_params, len(items))
        except RequestError as error:
            self._fail(entry, Failure(Code.BAD_REQUEST, str(error)))
            return entry
        specs = []
        for item, ticket in zip(items, tickets, strict=True):
            if ticket is not None and self._claims(ticket):
                self._claim(entry, item, ticket.room)
                ticket = None
            if ticket is not None:
                entry.ticketed.add(item.hash)
                entry.brought.add(item.hash)
            specs.append(_spec(item, ticket))
        if self._config.role.receives:
            self._runtime.tell(admission.Joined(entry.request, tuple(specs)))
        return entry

    def _item(self, feature: "MultiModalFeatureSpec") -> Item:
        return Item(
            hash=feature.identifier,
            rows=feature.mm_position.get_num_embeds(),
            modality=feature.modality,
            end=feature.mm_position.offset + feature.mm_position.length,
            encodable=self._media.encodable(feature),
        )

    def _extend(self, request: "Request", entry: Entry) -> None:
        """A streaming session has brought more media. No rooms come with it."""
        entry.extend([self._item(f) for f in request.mm_features[len(entry.items) :]])

    def _claims(self, ticket: admission.Ticket) -> bool:
        """Whether this engine is the one that encodes for ``ticket``."""
        role = self._config.role
        return role.sends and (not role.receives or ticket.address == self._own_address)

    def _claim(self, entry: Entry, item: Item, room: int) -> None:
        if self._config.role.receives and self._own_rooms.seen(room):
            # This engine sends the item to itself: its own encoder cache is the transfer.
            self._runtime.tell_encode(RoomsUnneeded((room,)))
            return
        entry.claims.append((room, item.hash))
        self._claimed.setdefault(item.hash, set()).add(entry.request)
        self._plan.claims.append(ClaimSpec(room, item.hash, item.rows))

    def _available(self, request: "Request", entry: Entry, computed: int) -> bool:
        self._follow(request, entry, computed)
        needed = []
        for item in entry.items:
            if item.end <= computed or self._is_cached(item) or self._host_encodes(entry, item):
                continue
            if entry.failed:
                return False
            needed.append(item.hash)
        return not needed or self._received(entry, needed)

    def _is_cached(self, item: Item) -> bool:
        """Whether the host's encoder cache can be relied on for the item.

        An entry that no request refers to may be gone in the pass that is under way. The
        host then encodes an item with pixels; without pixels it would fail as a whole.
        """
        return self._mirror.holds(item.hash) and (
            item.encodable or self._mirror.referenced(item.hash)
        )

    def _host_encodes(self, entry: Entry, item: Item) -> bool:
        """Whether the item is not to be received; fails a request whose item nobody can make."""
        if self._runtime.encodes_locally(entry.request, item.hash):
            return True
        if item.hash in entry.ticketed or self._runtime.holds(item.hash):
            return False
        if item.encodable:
            return True
        self._fail(entry, _unobtainable(entry, item))
        return False

    def _received(self, entry: Entry, needed: list[str]) -> bool:
        fresh = [hash for hash in needed if hash not in entry.needed]
        if fresh:
            entry.needed.update(fresh)
            self._runtime.tell(admission.Needed(entry.request, _unique(fresh)))
        state = self._runtime.ask(entry.request)
        self._note_outcomes()
        if state is not RequestState.READY or entry.failed:
            return False
        lost = [hash for hash in needed if not self._runtime.holds(hash)]
        entry.needed.difference_update(lost)
        return not lost

    def _follow(self, request: "Request", entry: Entry, computed: int) -> None:
        """Rooms of items whose tokens are computed for good are not needed any more.

        Only a running request's tokens are: a prefix hit that was merely looked up can be
        gone before the request is scheduled. A preempted request refers to no cache entry.
        """
        if request.status == RequestStatus.PREEMPTED:
            self._mirror.left(entry.request)
        if request.status != RequestStatus.RUNNING:
            return
        pending = {item.hash for item in entry.items if item.end > computed}
        spared = [hash for hash in entry.unspared if hash not in pending]
        if spared:
            entry.unspared.difference_update(spared)
            entry.needed.difference_update(spared)
            entry.ticketed.difference_update(spared)
            self._runtime.tell(admission.Spared(entry.request, tuple(spared)))
        if not pending:
            entry.settled_at = entry.last_end

    # --- the scheduling pass ----------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item can be loaded in the step that is being scheduled."""
        if not self._config.role.receives or not self._runtime.promise(identifier):
            return False
        self._promised.add(identifier)
        return True

    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        """The host set its encoder cache's space aside for an item: load it, if it is held."""
        feature = request.mm_features[index]
        hash = feature.identifier
        self._mirror.allocated(hash, request.request_id)
        if hash not in self._promised:
            return
        transfer = self._runtime.held(hash)
        assert transfer.region is not None
        assert transfer.identity is not None
        self._plan.loads.append(
            LoadSpec(
                room=transfer.ticket.room,
                hash=hash,
                offset=transfer.region.offset,
                rows=transfer.item.rows,
                width=transfer.identity.widths[transfer.item.modality],
                dtype=transfer.identity.dtype,
                layout=transfer.layout,
            )
        )
        self._runtime.tell(admission.Loading(request.request_id, hash))
        entry = self._entries.get(request.request_id)
        if entry is not None:
            entry.needed.discard(hash)
            entry.ticketed.discard(hash)

    def update_state_after_free(self, request: "Request", index: int) -> None:
        """A request does not refer to the host's encoder-cache entry any more."""
        self._mirror.released(request.mm_features[index].identifier, request.request_id)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepPlan:
        """What goes to the ranks with this step."""
        self._mirror.pass_ended(
            scheduler_output.free_encoder_mm_hashes, scheduler_output.preempted_req_ids or ()
        )
        if self._promised:
            self._promised.clear()
            self._runtime.tell(admission.PassEnded())
        if scheduler_output.total_num_scheduled_tokens == 0:
            # Some model runners drop the metadata of a step without tokens.
            return StepPlan()
        plan, self._plan = self._plan, StepPlan()
        return plan

    # --- ends -------------------------------------------------------------------------

    def take_unavailable_requests(self) -> set[str]:
        """Requests that the host must fail, each once."""
        self._note_outcomes()
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def request_finished(self, request: "Request") -> dict[str, object] | None:
        """A request is over. An encode engine's answer describes its items."""
        self._mirror.left(request.request_id)
        if request.ec_transfer_params is not None and request.request_id not in self._entries:
            # It ended before the scheduler asked: what it named must be let go all the same.
            self._admit(request)
        self._unavailable.discard(request.request_id)
        entry = self._entries.pop(request.request_id, None)
        if entry is not None:
            if self._config.role.receives:
                self._runtime.tell(admission.Left(entry.request))
            self._end_claims(entry)
        if not self._config.role.sends or not request.mm_features:
            return None
        return self._media.describe(request.mm_features)

    def _end_claims(self, entry: Entry) -> None:
        if not entry.claims:
            return
        rooms = tuple(room for room, _ in entry.claims)
        failure = Failure(
            Code.ENCODE_FAILED,
            "the encode request ended without encoding this item: it was aborted, or its tokens "
            "were in the prefix cache",
        )
        self._runtime.tell_encode(RequestOver(rooms, failure))
        self._plan.claims = [c for c in self._plan.claims if c.room not in rooms]
        for _, hash in entry.claims:
            claimants = self._claimed.get(hash)
            if claimants is None:
                continue
            claimants.discard(entry.request)
            if not claimants:
                del self._claimed[hash]
                self._plan.unclaimed.append(hash)

    def _note_outcomes(self) -> None:
        for outcome in self._runtime.outcomes():
            entry = self._entries.get(outcome.request)
            if entry is None:
                continue
            if isinstance(outcome, RequestFailed):
                self._fail(entry, outcome.failure)
            else:
                logger.warning(
                    "request %s: item %s is encoded here, since it was not received: %s",
                    entry.request,
                    outcome.hash[:16],
                    outcome.failure,
                )

    def _fail(self, entry: Entry, failure: Failure) -> None:
        """Fails ``entry``, once. The host reports no reason to the client, so the log has it."""
        if entry.failed:
            return
        entry.failed = True
        self._unavailable.add(entry.request)
        again = "; it may be sent again, with new rooms" if failure.code.retryable else ""
        logger.error("request %s fails: %s%s", entry.request, failure, again)

    # --- figures ----------------------------------------------------------------------

    def take_counted(self) -> Counters | None:
        """What the whole engine counted since the last call; None for nothing."""
        return self._runtime.take_counted()

    def close(self) -> None:
        """Ends the runtime. Idempotent."""
        self._runtime.close(self._config.shutdown_timeout_s)


def _unobtainable(entry: Entry, item: Item) -> Failure:
    """Why an item without pixels, which nothing brings or holds, cannot be had."""
    if item.hash in entry.brought:
        return lost(item.hash)
    reason = f"item {item.hash[:16]} came without pixels and without a room"
    return Failure(Code.BAD_REQUEST, f"{reason}: send its pixels, or a room in ec_transfer_params")


def _spec(item: Item, ticket: admission.Ticket | None) -> admission.ItemSpec:
    return admission.ItemSpec(
        hash=item.hash,
        rows=item.rows,
        modality=item.modality,
        room=None if ticket is None else ticket.room,
        address="" if ticket is None else ticket.address,
        encodable=item.encodable,
    )


def _unique(hashes: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(hashes))
