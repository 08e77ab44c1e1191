# SPDX-License-Identifier: Apache-2.0
"""Drives the machines of one head: the control plane, the link to the own ranks, the clock.

Owns the loop thread of a head, the lock around its machines, and what the scheduler thread
is to be told. The scheduler thread decides with the machine at once, under the lock, and
leaves sending to the loop: it never waits for the network. Does not own decisions
(``core``) or anything of the host engine.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from epd_connector.core import admission_state as admission
from epd_connector.core import encode_head as encoding
from epd_connector.core.admission import PrefillHead
from epd_connector.core.describe import describe_encode, describe_prefill
from epd_connector.core.effects import (
    Effect,
    EncodeLocally,
    Hangup,
    Noted,
    Reply,
    RequestFailed,
    Send,
    TellRanks,
)
from epd_connector.link.base import Link, PeerId
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import (
    AnyFrame,
    Describe,
    Description,
    HeadUp,
    HostGone,
    Identify,
    Inspect,
    RankUp,
    RoomFailed,
    RoomReceivers,
    SkipRooms,
    SlabFree,
    SlabFull,
    Tally,
)
from epd_connector.protocol.state import PrefillState
from epd_connector.runtime.describing import Describing, HeadPlace
from epd_connector.runtime.loop import Loop
from epd_connector.runtime.own_ranks import BEAT_S, OwnRanks, answers_of, take_words
from epd_connector.runtime.switchboard import Switchboard
from epd_connector.runtime.tallies import Tallies
from epd_connector.stats import Counters

logger = logging.getLogger(__name__)

Outcome = RequestFailed | EncodeLocally


class HeadRuntime:
    """One head's loop and what it drives. ``start`` and ``close`` are idempotent."""

    def __init__(
        self,
        place: HeadPlace,
        link: Link,
        codec: Codec,
        *,
        encode: encoding.EncodeHead | None,
        prefill: PrefillHead | None,
    ) -> None:
        self._place = place
        self._link = link
        self._encode = encode
        self._prefill = prefill
        self._counters = Counters()
        self._tallies = Tallies()
        self._switch = Switchboard(link, codec, place.incarnation, self._counters)
        self._to_ranks = Switchboard(link, codec, place.link_token, self._counters)
        self._ranks = OwnRanks(place.ranks, self._to_ranks)
        sends = None if encode is None else describe_encode(encode)
        self._describing = Describing(place, self._ranks.up, self._collect, self._describe, sends)
        self._loop: Loop[None] = Loop("epd-head", link, self)
        self._effects: deque[Effect] = deque()
        # Held around machine calls only, which do no I/O: microseconds.
        self._lock = threading.Lock()
        self._outcomes: deque[Outcome] = deque()
        self._control = ""
        self._beat_at = 0.0
        self._closed = False

    # --- any thread -------------------------------------------------------------------

    def start(self) -> None:
        """Binds, then starts the loop. Raises LinkError."""
        if not self._control:
            self._control = self._link.listen(self._place.control)
            if self._place.link:
                self._link.listen(self._place.link)
        self._loop.start()

    def close(self, timeout_s: float) -> None:
        """Gives up every request, tells who waits, ends the thread. Waits up to ``timeout_s``
        for the own ranks to say that nothing writes to them, and for skips to be heard."""
        if self._closed:
            return
        self._closed = True
        if self._prefill is not None:
            self.tell(admission.Stop())
            deadline = time.monotonic() + timeout_s
            while not self._idle() and time.monotonic() < deadline:
                time.sleep(0.01)
        if self._loop.stop(timeout_s):
            self._link.close()

    @property
    def control(self) -> str:
        """The control endpoint with its real port, once started."""
        return self._control

    def ranks_up(self) -> int:
        """How many of this engine's ranks have announced themselves."""
        return self._ranks.up()

    # --- the scheduler's thread -------------------------------------------------------

    def tell(self, event: admission.AdmissionEvent) -> None:
        """Hands an event to the prefill head; its decision is effective on return."""
        assert self._prefill is not None
        with self._lock:
            self._decided(self._prefill.handle(event, time.monotonic()))

    def tell_encode(self, event: encoding.EncodeHeadEvent) -> None:
        """Hands an event to the encode head."""
        assert self._encode is not None
        with self._lock:
            self._decided(self._encode.handle(event, time.monotonic()))

    def holds_back(self, rooms: Iterable[int]) -> bool:
        """Whether a request that claims ``rooms`` is to wait. See ``EncodeHead.holds_back``."""
        assert self._encode is not None
        with self._lock:
            return self._encode.holds_back(rooms, time.monotonic())

    def ask(self, request: str) -> admission.RequestState:
        """May ``request`` run? See ``PrefillHead.ask``."""
        assert self._prefill is not None
        with self._lock:
            return self._prefill.ask(request, time.monotonic())

    def promise(self, hash: str) -> bool:
        """Whether item ``hash`` can be loaded; if so it stays until the scheduling pass ends."""
        assert self._prefill is not None
        with self._lock:
            if not self._prefill.holds(hash):
                return False
            self._decided(self._prefill.handle(admission.Promised(hash), time.monotonic()))
        return True

    def holds(self, hash: str) -> bool:
        """Whether item ``hash`` is complete on every rank. See ``PrefillHead.holds``."""
        assert self._prefill is not None
        with self._lock:
            return self._prefill.holds(hash)

    def encodes_locally(self, request: str, hash: str) -> bool:
        """Whether the host is to encode the item itself. See ``PrefillHead``."""
        assert self._prefill is not None
        with self._lock:
            return self._prefill.encodes_locally(request, hash)

    def held(self, hash: str) -> admission.Transfer:
        """The transfer that holds item ``hash``. KeyError unless it was promised."""
        assert self._prefill is not None
        with self._lock:
            return self._prefill.held(hash)

    def outcomes(self) -> list[Outcome]:
        """What has been decided about requests since the last call."""
        if not self._outcomes:
            return []
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def take_counted(self) -> Counters | None:
        """What the engine counted since the last call; None where nothing has happened.

        Called in every engine step, so without news it costs nothing.
        """
        if not self._tallies.news:
            return None
        self._collect()
        with self._lock:
            return self._tallies.take()

    def _decided(self, effects: list[Effect]) -> None:
        """Queues effects in the order of the decisions, whichever thread made them.

        Held under the lock: were an Abandon to overtake the Open that it takes back, ranks
        would let peers write into a region that has another tenant.
        """
        self._tallies.news = True
        for effect in effects:
            if isinstance(effect, RequestFailed | EncodeLocally):
                self._outcomes.append(effect)
            else:
                self._effects.append(effect)
        if self._effects:
            self._loop.wake()

    def _idle(self) -> bool:
        assert self._prefill is not None
        with self._lock:
            return self._prefill.idle() and not self._prefill.skips_unanswered()

    # --- the loop's thread ------------------------------------------------------------

    def on_post(self, post: None, now: float) -> None:
        """See ``loop.Driver``. Nothing is posted: what is to be done lies in ``_effects``."""

    def on_frame(self, peer: PeerId, payload: bytes, now: float) -> None:
        """See ``loop.Driver``."""
        envelope = self._switch.read(peer, payload)
        if envelope is None:
            return
        source = self._switch.endpoint_of(peer)
        for frame in envelope.frames():
            if envelope.addressee == self._place.link_token:
                self._on_rank(peer, envelope.sender, frame, now)
            elif source is not None:
                self._on_encode_head(source, envelope.addressee, frame, now)
            else:
                self._on_control(peer, envelope.sender, frame, now)

    def on_turn(self, now: float) -> None:
        """See ``loop.Driver``."""
        if self._prefill is not None:
            with self._lock:
                due = self._prefill.next_deadline()
                if due is not None and due <= now:
                    self._decided(self._prefill.handle(admission.Tick(), now))
            for where in self._switch.take_broken():
                event = admission.Broken(where.removeprefix("tcp://"))
                with self._lock:
                    self._decided(self._prefill.handle(event, now))
        self._switch.sweep(now)
        self._ranks.retry()
        self._look_after_ranks(now)
        for peer, asker, answer in self._describing.answers(now):
            self._switch.reply(peer, asker, answer)
        self._carry_out()
        self._switch.flush()

    def next_wait(self, now: float) -> float | None:
        """See ``loop.Driver``."""
        if self._effects:
            # One before them could not be carried out.
            return 0.0
        waits = [
            self._ranks.next_wait(),
            self._switch.next_sweep(now),
            self._describing.next_wait(now),
        ]
        if self._receiving():
            waits.append(max(0.0, self._beat_at - now))
        if self._prefill is not None:
            with self._lock:
                due = self._prefill.next_deadline()
            waits.append(None if due is None else due - now)
        return min((wait for wait in waits if wait is not None), default=None)

    def on_error(self) -> None:
        """See ``loop.Driver``."""
        self._counters.add("errors_internal")

    def on_stall(self) -> None:
        """See ``loop.Driver``."""
        self._counters.add("loops_stalled")

    def _on_rank(self, peer: PeerId, sender: int, frame: AnyFrame, now: float) -> None:
        if isinstance(frame, RankUp):
            self._rank_up(peer, sender, frame)
            return
        rank = self._ranks.heard(peer, sender)
        if rank is None:
            self._counters.add("frames_stale")
        elif isinstance(frame, Tally):
            for text in frame.failures:
                self._describing.failed(text, now)
            with self._lock:
                self._tallies.count(Counters.from_peer(frame.counters, frame.encoded_to_landed_s))
        elif isinstance(frame, Description):
            self._describing.heard(frame.state)
        elif isinstance(frame, SlabFull | SlabFree) and self._encode is not None:
            with self._lock:
                self._encode.handle(encoding.FromRank(rank, frame), now)
        elif self._prefill is not None:
            with self._lock:
                self._decided(self._prefill.handle(admission.FromRank(rank, frame), now))

    def _rank_up(self, peer: PeerId, incarnation: int, frame: RankUp) -> None:
        if not self._ranks.announced(frame.rank, peer, incarnation):
            self._counters.add("frames_malformed")
            return
        if self._encode is not None:
            with self._lock:
                self._encode.handle(encoding.RankReady(incarnation, frame), time.monotonic())
        self._to_ranks.deliver(peer, incarnation, [HeadUp()])

    def _on_encode_head(self, source: str, addressee: int, frame: AnyFrame, now: float) -> None:
        if self._prefill is None or addressee != self._place.incarnation:
            self._counters.add("frames_stale")
            return
        address = source.removeprefix("tcp://")
        event = admission.FromEncodeHead(address, frame)
        with self._lock:
            self._decided(self._prefill.handle(event, now))

    def _on_control(self, peer: PeerId, sender: int, frame: AnyFrame, now: float) -> None:
        match frame:
            case Inspect():
                self._switch.reply(peer, sender, self._describing.report())
            case Describe():
                if self._describing.ask(peer, sender, now):
                    self._tell_ranks([frame])
            case HostGone(host=host) if self._prefill is not None:
                logger.warning("host %s is said to be dead: nothing there writes any more", host)
                with self._lock:
                    self._decided(self._prefill.handle(admission.Gone(host), now))
                self._switch.reply(peer, sender, frame)
            case Identify() | SkipRooms() | RoomReceivers() if self._encode is not None:
                event = encoding.FromPeer(peer, sender, frame)
                with self._lock:
                    self._decided(self._encode.handle(event, now))
            case _:
                self._counters.add("frames_malformed")

    def _describe(self, now: float) -> PrefillState | None:
        if self._prefill is None:
            return None
        with self._lock:
            return describe_prefill(self._prefill, now)

    def _collect(self) -> Counters:
        """Everything that was counted since the start, by this engine."""
        with self._lock:
            self._tallies.count(self._counters.take())
            if self._prefill is not None:
                self._tallies.count(self._prefill.counters.take())
        return self._tallies.totals

    def _carry_out(self) -> None:
        while self._effects:
            effect = self._effects.popleft()
            match effect:
                case TellRanks(frame=frame):
                    self._tell_ranks([frame, *take_words(self._effects)])
                case Send(endpoint=where, addressee=addressee, frame=frame):
                    self._switch.send(where, addressee, frame)
                case Reply(route=route, addressee=addressee, frame=frame):
                    self._switch.reply(PeerId(route), addressee, frame)
                case Hangup(endpoint=where):
                    self._switch.hang_up(where)
                case Noted(subject=subject, failure=failure):
                    text = f"{subject}: {failure}"
                    self._describing.failed(text, time.monotonic())
                    logger.warning("%s", text)

    def _receiving(self) -> bool:
        """Whether ranks have something to receive, or to make safe."""
        if self._prefill is None:
            return False
        balance = self._prefill.balance()
        return balance.leased + balance.quarantined > 0

    def _look_after_ranks(self, now: float) -> None:
        """What waits for a rank whose process has ended fails at once. Its regions stay as they
        are: in a slab that all ranks share, its writer may go on."""
        due, receiving = now >= self._beat_at, self._receiving()
        if due or not receiving:
            self._beat_at = now + BEAT_S
        if due and receiving:
            for rank, failure in self._ranks.lost():
                assert self._prefill is not None
                with self._lock:
                    rooms = list(self._prefill.transfers())
                for room in rooms:
                    self._as_rank(rank, RoomFailed(room, failure))

    def _tell_ranks(self, frames: Sequence[AnyFrame]) -> None:
        for missed in self._ranks.tell(frames):
            for answer in answers_of(missed):
                self._as_rank(missed.rank, answer)

    def _as_rank(self, rank: int, frame: AnyFrame) -> None:
        """Says ``frame`` on behalf of a rank that cannot."""
        assert self._prefill is not None
        with self._lock:
            event = admission.FromRank(rank, frame)
            self._decided(self._prefill.handle(event, time.monotonic()))
