# SPDX-License-Identifier: Apache-2.0
"""Drives the machines of one rank: sockets, clock, transports, staging threads.

Owns the loop thread of a rank and everything that its machines' effects need. Does not own
decisions (``core``), slabs' memory (the caller gives it) or tensors (``RowStore`` does).
``post`` methods may be called from any thread; they never block.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from epd_connector.core import receive, send
from epd_connector.core.describe import describe_receiver, describe_sender
from epd_connector.core.effects import (
    DropRows,
    Effect,
    ForgetSession,
    Hangup,
    Noted,
    Probe,
    Reply,
    Send,
    Stage,
    TellHead,
    Write,
)
from epd_connector.core.send_events import (
    Claim,
    Encoded,
    FromPeer,
    SendEvent,
    Staged,
    from_head,
)
from epd_connector.core.send_events import Stop as StopSending
from epd_connector.core.send_events import Tick as SendTick
from epd_connector.link.base import Link, PeerId, endpoint
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import (
    Abandon,
    AnyFrame,
    Describe,
    Description,
    DropRoom,
    EndRoom,
    HeadUp,
    HostGone,
    Open,
    RankUp,
    RoomLoaded,
    RoomReceivers,
    Tally,
)
from epd_connector.protocol.state import RankState, name
from epd_connector.rows import serving_rank
from epd_connector.runtime.describing import process_state
from epd_connector.runtime.loop import Loop
from epd_connector.runtime.prober import Prober
from epd_connector.runtime.staging import RowStore, Staging
from epd_connector.runtime.switchboard import Switchboard
from epd_connector.runtime.writes import Writes
from epd_connector.stats import Counters
from epd_connector.transport.base import Transport

logger = logging.getLogger(__name__)

TALLY_S = 0.05
"""Seconds between two tallies to the head, while there is something to tell."""
ANNOUNCE_S = 0.2
"""Seconds between two announcements to a head that has not answered yet."""
KEEP_S = 30.0
"""Seconds between two to one that has: its link forgets the peer that was silent longest."""
MAX_FAILURES = 64


@dataclass(frozen=True, slots=True)
class Loaded:
    """The load of ``room`` has been carried out; nothing reads its region for it any more."""

    room: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The rank is closing: withdraw and refuse everything."""


RankPost = Claim | Encoded | Staged | Loaded | receive.Probed | Shutdown


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands. ``listen``: where it takes grants; ``advertised_host``: what peers
    are told instead of its host; ``head``: endpoint of its head; ``link_token``: what frames
    of the own engine carry."""

    rank: int
    incarnation: int
    link_token: int
    head: str
    listen: str
    advertised_host: str


class RankRuntime:
    """One rank's loop and what it drives. ``start`` and ``close`` are idempotent."""

    def __init__(
        self,
        place: RankPlace,
        link: Link,
        codec: Codec,
        transports: Mapping[str, Transport],
        *,
        sender: send.EncodeRank | None,
        receiver: receive.PrefillRank | None,
        rows: RowStore | None,
        staging_threads: int,
    ) -> None:
        self.counters = Counters()
        self._place = place
        self._link = link
        self._writes = Writes(transports)
        self._sender = sender
        self._receiver = receiver
        self._switch = Switchboard(link, codec, place.incarnation, self.counters, kept=place.head)
        self._loop: Loop[RankPost] = Loop(f"epd-rank-{place.rank}", link, self)
        self._staging = Staging(rows, staging_threads, self._report_staged)
        self._prober = Prober()
        self._failures: deque[str] = deque(maxlen=MAX_FAILURES)
        self._effects: deque[Effect] = deque()
        self._endpoint = ""
        self._head_heard = False
        self._announce_at = 0.0
        self._tally_at: float | None = None
        self._closed = False

    # --- any thread -------------------------------------------------------------------

    def start(self) -> None:
        """Binds, then starts the loop. Raises LinkError."""
        if self._sender is not None and not self._endpoint:
            bound = self._link.listen(self._place.listen)
            port = int(bound.rpartition(":")[2])
            self._endpoint = endpoint(self._place.advertised_host, port)
        self._writes.set_waker(self._loop.wake)
        self._loop.start()

    def post(self, post: RankPost) -> bool:
        """Hands a fact to the loop; False when it cannot take more."""
        return self._loop.post(post, bounded=not isinstance(post, Loaded))

    def close(self, timeout_s: float) -> None:
        """Withdraws and refuses everything, waits for writes a while, ends the threads.

        Peers are hung up on only where nothing can write any more: a process whose host refuses
        connections is taken for dead, and its regions get other tenants.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.post(Shutdown(), bounded=False)
        deadline = time.monotonic() + timeout_s
        while not self._quiet() and time.monotonic() < deadline:
            time.sleep(0.01)
        stopped = self._loop.stop(timeout_s)
        self._staging.close(timeout_s)
        self._prober.close(timeout_s)
        if stopped:
            self._writes.close()
            if self._writes.quiet():
                self._link.close()

    def _quiet(self) -> bool:
        idle = self._receiver is None or self._receiver.idle()
        return (
            idle and not self._writes.in_flight() and (self._sender is None or self._sender.idle())
        )

    # --- the loop's thread ------------------------------------------------------------

    def on_post(self, post: RankPost, now: float) -> None:
        """See ``loop.Driver``."""
        match post:
            case Loaded(room=room):
                self._tell_head(RoomLoaded(room))
            case receive.Probed():
                self._drive_receiver(post, now)
            case Shutdown():
                self._drive_sender(StopSending(), now)
                self._drive_receiver(receive.Stop(), now)
            case _:
                self._drive_sender(post, now)

    def on_frame(self, peer: PeerId, payload: bytes, now: float) -> None:
        """See ``loop.Driver``."""
        envelope = self._switch.read(peer, payload)
        if envelope is None:
            return
        source = self._switch.endpoint_of(peer)
        sender, addressee = envelope.sender, envelope.addressee
        for frame in envelope.frames():
            if source == self._place.head:
                self._on_head(sender, frame, now)
            elif source is None:
                self._drive_sender(FromPeer(peer, sender, addressee, frame), now)
            else:
                self._drive_receiver(receive.FromSender(source, sender, addressee, frame), now)

    def on_turn(self, now: float) -> None:
        """See ``loop.Driver``."""
        self._carry_out()
        if now >= self._announce_at:
            self._announce(now)
        self._switch.sweep(now)
        for where in self._switch.take_broken():
            self._drive_receiver(receive.Broken(where), now)
        for wrote in self._writes.ended():
            self._drive_sender(wrote, now)
        if self._sender is not None and _due(self._sender.next_deadline(), now):
            self._drive_sender(SendTick(), now)
        if self._receiver is not None and _due(self._receiver.next_deadline(), now):
            self._drive_receiver(receive.Tick(), now)
        if self._tally_at is not None and now >= self._tally_at:
            self._tally()
        self._switch.flush()

    def next_wait(self, now: float) -> float | None:
        """See ``loop.Driver``."""
        if self._effects:  # One before them could not be carried out.
            return 0.0
        times = [
            self._sender.next_deadline() if self._sender else None,
            self._receiver.next_deadline() if self._receiver else None,
            self._tally_at,
            self._announce_at,
        ]
        waits = [when - now for when in times if when is not None]
        others = (self._writes.next_poll(now), self._switch.next_sweep(now))
        return min([*waits, *(wait for wait in others if wait is not None)], default=None)

    def on_error(self) -> None:
        """See ``loop.Driver``."""
        self.counters.add("errors_internal")

    def on_stall(self) -> None:
        """See ``loop.Driver``."""
        self.counters.add("loops_stalled")

    def _on_head(self, sender: int, frame: AnyFrame, now: float) -> None:
        if sender != self._place.link_token:
            self.counters.add("frames_stale")
            return
        match frame:
            case HeadUp():
                self._head_heard = True
                self._announce_at = now + KEEP_S
            case Open():
                self._drive_receiver(receive.Opened(frame, self._choose(frame)), now)
            case Abandon(room=room):
                self._drive_receiver(receive.Abandoned(room), now)
            case Describe():
                self._tell_head(Description(self._describe(now)))
            case HostGone(host=host):
                self._drive_receiver(receive.Gone(host), now)
            case EndRoom() | DropRoom() | RoomReceivers():
                self._drive_sender(from_head(frame), now)
            case _:
                self.counters.add("frames_malformed")

    def _describe(self, now: float) -> RankState:
        sender, receiver = self._sender, self._receiver
        return RankState(
            rank=self._place.rank,
            incarnation=name(self._place.incarnation),
            endpoint=self._endpoint,
            transports=tuple(self._writes.adverts()),
            process=process_state(),
            send=None if sender is None else describe_sender(sender, now),
            receive=None if receiver is None else describe_receiver(receiver, now),
        )

    def _choose(self, frame: Open) -> str | None:
        """The first of this rank's transports that reaches the encode rank that serves it."""
        assert self._receiver is not None
        settings = self._receiver.settings
        server = serving_rank(settings.rank, settings.ranks, len(frame.senders))
        return self._writes.choose(frame.senders[server].adverts, settings.sessions)

    def _announce(self, now: float) -> None:
        receiver = self._receiver
        self._tell_head(
            RankUp(
                rank=self._place.rank,
                endpoint=self._endpoint,
                adverts=self._writes.adverts(),
                receive_nbytes=receiver.settings.slab_nbytes if receiver is not None else 0,
            )
        )
        self._announce_at = now + (KEEP_S if self._head_heard else ANNOUNCE_S)

    def _drive_sender(self, event: SendEvent, now: float) -> None:
        if self._sender is not None:
            self._decided(self._sender.handle(event, now), now)

    def _drive_receiver(self, event: receive.ReceiveEvent, now: float) -> None:
        if self._receiver is not None:
            self._decided(self._receiver.handle(event, now), now)

    def _decided(self, effects: list[Effect], now: float) -> None:
        if self._tally_at is None:
            self._tally_at = now + TALLY_S
        if effects:
            self._effects.extend(effects)
            self._carry_out()

    def _carry_out(self) -> None:
        """In the order of the decisions; an error costs one effect only."""
        while self._effects:
            effect = self._effects.popleft()
            match effect:
                # What there is most of comes first.
                case Reply(route=route, addressee=addressee, frame=frame):
                    self._switch.reply(PeerId(route), addressee, frame)
                case Write():
                    self._write(effect)
                case DropRows(token=token):
                    self._staging.drop(token)
                case TellHead(frame=frame):
                    self._tell_head(frame)
                case Send(endpoint=where, addressee=addressee, frame=frame):
                    self._switch.send(where, addressee, frame)
                case Stage():
                    self._staging.start(effect)
                case Hangup(endpoint=where):
                    self._switch.hang_up(where)
                case ForgetSession(transport=name, session=session):
                    self._writes.forget(name, session)
                case Probe(endpoint=where):
                    self._probe(where)
                case Noted(subject=subject, failure=failure):
                    self._note(f"{subject}: {failure}")

    def _write(self, effect: Write) -> None:
        now = time.monotonic()
        lent = None if effect.lent is None else self._staging.lend(effect.lent)
        wrote = self._writes.start(effect, lent, now)
        if wrote is not None:
            self._drive_sender(wrote, now)

    def _probe(self, where: str) -> None:
        """Whoever is still connected, as far as is known, is not gone."""

        def answer(refused: bool) -> None:
            self._loop.post(receive.Probed(where, refused), bounded=False)

        if self._switch.connected(where):
            answer(False)
        else:
            self._prober.probe(where, answer)

    def _report_staged(self, staged: Staged) -> None:
        """On a staging thread, mostly."""
        self._loop.post(staged, bounded=False)

    def _note(self, text: str) -> None:
        self._failures.append(text[:500])
        logger.warning("%s", text)

    def _tell_head(self, frame: AnyFrame) -> None:
        self._switch.send(self._place.head, self._place.link_token, frame)

    def _tally(self) -> None:
        self._tally_at = None
        total = self.counters.take()
        for machine in (self._sender, self._receiver):
            if machine is not None:
                total.merge(machine.counters.take())
        counts = {name: float(count) for name, count in total.counts().items() if count}
        if not counts and not self._failures:
            return
        durations = tuple(total.encoded_to_landed_s)
        self._tell_head(Tally(counts, durations, tuple(self._failures)))
        self._failures.clear()


def _due(when: float | None, now: float) -> bool:
    return when is not None and when <= now
