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
from typing import Protocol

from epd_connector.core import receive, send
from epd_connector.core.effects import (
    DropRows,
    Effect,
    ForgetSession,
    Hangup,
    Noted,
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
    Wrote,
    from_head,
)
from epd_connector.core.send_events import Stop as StopSending
from epd_connector.core.send_events import Tick as SendTick
from epd_connector.errors import Code, Failure
from epd_connector.link.base import Link, PeerId, endpoint
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import (
    Abandon,
    AnyFrame,
    DropRoom,
    EndRoom,
    Envelope,
    HeadUp,
    Open,
    RankUp,
    RoomLoaded,
    RoomReceivers,
    Tally,
)
from epd_connector.rows import serving_rank
from epd_connector.runtime.loop import Loop
from epd_connector.runtime.switchboard import Switchboard
from epd_connector.stats import Counters
from epd_connector.transport.base import Span, Transport, WriteState
from epd_connector.transport.workers import Job, Workers

logger = logging.getLogger(__name__)

TALLY_S = 0.05
"""Seconds between two tallies to the head, while there is something to tell."""
ANNOUNCE_S = 0.2
"""Seconds between two announcements to a head that has not answered yet."""
KEEP_S = 30.0
"""Seconds between two to one that has: its link forgets the peer that was silent longest."""
MAX_FAILURES = 64


class RowStore(Protocol):
    """The rows behind tokens: tensors of the engine, held until they are staged."""

    def stage(self, token: int, offset: int, nbytes: int) -> None:
        """Copies the rows of ``token`` to ``offset`` of the send slab, and lets go of them.

        Returns when the copy is complete, also on a device. Called on a staging thread.
        """

    def drop(self, token: int) -> None:
        """Lets go of the rows of ``token``. Any thread."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The load of ``room`` has been carried out; nothing reads its region for it any more."""

    room: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The rank is closing: withdraw and refuse everything."""


RankPost = Claim | Encoded | Staged | Loaded | Shutdown


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
        self._transports = dict(transports)
        self._sender = sender
        self._receiver = receiver
        self._rows = rows
        self._switch = Switchboard(link, codec, place.incarnation, self.counters, kept=place.head)
        self._loop: Loop[RankPost] = Loop(f"epd-rank-{place.rank}", link, self)
        self._movers = Workers("epd-stage", threads=staging_threads, backlog=65536)
        self._writes: dict[tuple[str, int], int] = {}
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
        for transport in self._transports.values():
            transport.set_waker(self._loop.wake)
        self._loop.start()

    def post(self, post: RankPost) -> bool:
        """Hands a fact to the loop; False when it cannot take more."""
        return self._loop.post(post, bounded=not isinstance(post, Loaded))

    def close(self, timeout_s: float) -> None:
        """Withdraws and refuses everything, waits for writes a while, ends the threads."""
        if self._closed:
            return
        self._closed = True
        self._loop.post(Shutdown(), bounded=False)
        deadline = time.monotonic() + timeout_s
        while not self._quiet() and time.monotonic() < deadline:
            time.sleep(0.01)
        self._loop.stop(timeout_s)
        self._movers.close(timeout_s)
        for transport in self._transports.values():
            transport.close()
        self._link.close()

    def _quiet(self) -> bool:
        idle = self._receiver is None or self._receiver.idle()
        return idle and not self._writes and (self._sender is None or self._sender.idle())

    # --- the loop's thread ------------------------------------------------------------

    def on_post(self, post: RankPost, now: float) -> None:
        """See ``loop.Driver``."""
        match post:
            case Loaded(room=room):
                self._tell_head(RoomLoaded(room))
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
        if source == self._place.head:
            self._on_head(envelope, now)
        elif source is None:
            event = FromPeer(peer, envelope.sender, envelope.addressee, envelope.frame)
            self._drive_sender(event, now)
        else:
            self._drive_receiver(
                receive.FromSender(source, envelope.sender, envelope.addressee, envelope.frame),
                now,
            )

    def on_turn(self, now: float) -> None:
        """See ``loop.Driver``."""
        self._carry_out()
        if now >= self._announce_at:
            self._announce(now)
        for name, transport in self._transports.items():
            if transport.in_flight():
                self._collect(name, transport, now)
        if self._sender is not None and _due(self._sender.next_deadline(), now):
            self._drive_sender(SendTick(), now)
        if self._receiver is not None and _due(self._receiver.next_deadline(), now):
            self._drive_receiver(receive.Tick(), now)
        if self._tally_at is not None and now >= self._tally_at:
            self._tally()

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
        for transport in self._transports.values():
            if transport.poll_interval_s is not None and transport.in_flight():
                waits.append(transport.poll_interval_s)
        return min(waits, default=None)

    def on_error(self) -> None:
        """See ``loop.Driver``."""
        self.counters.add("errors_internal")

    def on_stall(self) -> None:
        """See ``loop.Driver``."""
        self.counters.add("loops_stalled")

    def _on_head(self, envelope: Envelope, now: float) -> None:
        if envelope.sender != self._place.link_token:
            self.counters.add("frames_stale")
            return
        frame = envelope.frame
        match frame:
            case HeadUp():
                self._head_heard = True
                self._announce_at = now + KEEP_S
            case Open():
                self._drive_receiver(receive.Opened(frame, self._choose(frame)), now)
            case Abandon(room=room):
                self._drive_receiver(receive.Abandoned(room), now)
            case EndRoom() | DropRoom() | RoomReceivers():
                self._drive_sender(from_head(frame), now)
            case _:
                self.counters.add("frames_malformed")

    def _choose(self, frame: Open) -> str | None:
        """The first of this rank's transports that reaches the encode rank that serves it."""
        assert self._receiver is not None
        settings = self._receiver.settings
        server = serving_rank(settings.rank, settings.ranks, len(frame.senders))
        adverts = frame.senders[server].adverts
        for name, transport in self._transports.items():
            if name in adverts and name in settings.sessions and transport.reaches(adverts[name]):
                return name
        return None

    def _announce(self, now: float) -> None:
        receiver = self._receiver
        self._tell_head(
            RankUp(
                rank=self._place.rank,
                endpoint=self._endpoint,
                adverts={name: t.advert() for name, t in self._transports.items()},
                receive_nbytes=receiver.settings.slab_nbytes if receiver is not None else 0,
            )
        )
        self._announce_at = now + (KEEP_S if self._head_heard else ANNOUNCE_S)

    def _collect(self, name: str, transport: Transport, now: float) -> None:
        for completion in transport.poll():
            write = self._writes.pop((name, completion.handle), None)
            if write is None:
                continue
            failed = completion.state is WriteState.FAILED
            failure = Failure(Code.WRITE_FAILED, f"{name}: {completion.reason}")
            self._drive_sender(Wrote(write, failure if failed else None), now)

    def _drive_sender(self, event: SendEvent, now: float) -> None:
        if self._sender is not None:
            self._decided(self._sender.handle(event, now), now)

    def _drive_receiver(self, event: receive.ReceiveEvent, now: float) -> None:
        if self._receiver is not None:
            self._decided(self._receiver.handle(event, now), now)

    def _decided(self, effects: list[Effect], now: float) -> None:
        self._effects.extend(effects)
        if self._tally_at is None:
            self._tally_at = now + TALLY_S
        self._carry_out()

    def _carry_out(self) -> None:
        """In the order of the decisions; an error costs one effect only."""
        while self._effects:
            effect = self._effects.popleft()
            match effect:
                case Reply(route=route, addressee=addressee, frame=frame):
                    self._switch.reply(PeerId(route), addressee, frame)
                case Send(endpoint=where, addressee=addressee, frame=frame):
                    self._switch.send(where, addressee, frame)
                case Hangup(endpoint=where):
                    self._switch.hang_up(where)
                case TellHead(frame=frame):
                    self._tell_head(frame)
                case Write():
                    self._write(effect)
                case Stage():
                    self._stage(effect)
                case DropRows(token=token):
                    assert self._rows is not None
                    self._rows.drop(token)
                case ForgetSession(transport=name, session=session):
                    if name in self._transports:
                        self._transports[name].forget(session)
                case Noted(subject=subject, failure=failure):
                    self._note(f"{subject}: {failure}")

    def _write(self, effect: Write) -> None:
        transport = self._transports.get(effect.transport)
        if transport is None:
            names = ", ".join(self._transports) or "none"
            reason = f"transport {effect.transport!r} is not one of this rank's: {names}"
            failure = Failure(Code.WRITE_FAILED, reason)
            self._drive_sender(Wrote(effect.write, failure), time.monotonic())
            return
        span = Span(effect.source, effect.destination, effect.nbytes)
        handle = transport.write(effect.session, (span,))
        self._writes[effect.transport, handle] = effect.write

    def _stage(self, effect: Stage) -> None:
        job = Job(lambda: self._run_stage(effect), lambda: self._abandon_stage(effect))
        if not self._movers.submit(effect.copy, job):
            self._abandon_stage(effect)

    def _run_stage(self, effect: Stage) -> None:
        """On a staging thread."""
        assert self._rows is not None
        failure = None
        try:
            self._rows.stage(effect.token, effect.offset, effect.nbytes)
        except Exception as error:
            logger.exception("staging %d bytes failed", effect.nbytes)
            failure = Failure(Code.ENCODE_FAILED, f"staging {effect.nbytes} bytes failed: {error}")
        self._loop.post(Staged(effect.copy, failure), bounded=False)

    def _abandon_stage(self, effect: Stage) -> None:
        assert self._rows is not None
        self._rows.drop(effect.token)
        failure = Failure(Code.OVERLOADED, "too many copies wait to be staged")
        self._loop.post(Staged(effect.copy, failure), bounded=False)

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
