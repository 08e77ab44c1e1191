# SPDX-License-Identifier: Apache-2.0
"""The encode rank's desk for prefill ranks: who they are, what they may, whose turn it is.

Owns the peers of ``send.EncodeRank`` and the writes in flight to each; checks a grant
against the offer (the contract) before anything is written. Does not own rooms, or what a
grant is answered (``send_grants``). A part of that machine, not a machine of its own: it
appends to the machine's effects.
"""

from collections.abc import Mapping

from epd_connector.core.deadlines import Deadlines
from epd_connector.core.effects import Effect, ForgetSession, Reply, Write
from epd_connector.core.send_events import FromPeer
from epd_connector.core.send_rooms import RoomTable
from epd_connector.core.send_state import (
    CopyState,
    GrantState,
    HeldGrant,
    Peer,
    SendRoom,
    SendSettings,
)
from epd_connector.core.tombstones import Tombstones
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import Hello, Pong, Refused, Stale, Stalled, Welcome
from epd_connector.rows import serving_rank, wanted_rows
from epd_connector.stats import Counters

MAX_PEERS = 4096
IDLE_PEER_S = 120.0
"""Seconds after which a peer without open grants and writes is forgotten. Longer than a prefill
rank keeps an idle connection: whoever is forgotten here says hello before the next grant."""


class PeerDesk:
    """Peers by incarnation, and the writes in flight to them."""

    def __init__(self, settings: SendSettings, counters: Counters, effects: list[Effect]) -> None:
        self._effects = effects
        self._settings = settings
        self._counters = counters
        self._peers: dict[int, Peer] = {}
        self._writes: dict[int, HeldGrant] = {}
        self._write_serial = 0
        self._write_ends: Deadlines[int] = Deadlines()
        self._silences: Deadlines[int] = Deadlines()
        self._idles: Deadlines[int] = Deadlines()
        # By process, not in the peer's record: a peer that is lost and returns is the same one.
        self._distrusted: Tombstones[int, None] = Tombstones(MAX_PEERS, settings.failed_peer_s)

    # --- who is there -----------------------------------------------------------------

    def admit(self, event: FromPeer, now: float) -> bool:
        """Whether the frame is meant for this incarnation; notes that its sender lives."""
        if event.addressee not in (0, self._settings.incarnation):
            self._counters.add("frames_stale")
            self._effects.append(Reply(event.route, event.sender, Stale(event.addressee)))
            return False
        peer = self._peers.get(event.sender)
        if peer is not None:
            peer.heard, peer.route = now, event.route
        return True

    def greet(self, event: FromPeer, hello: Hello, now: float) -> None:
        """Takes note of a prefill rank and its slab.

        A repeat, which every repeated grant brings along, changes nothing.
        """
        peer = self._peers.get(event.sender)
        if peer is None:
            if not self._make_room():
                self._counters.add("frames_dropped")
                return
            peer = self._peers[event.sender] = Peer(event.sender, event.route, hello, now)
            self._idles.set(event.sender, now + IDLE_PEER_S)
        elif peer.hello != hello and peer.unanswered:
            # A slab cannot move under grants that name offsets in it.
            self._counters.add("frames_malformed")
            return
        self._forget_sessions(dict(peer.hello.sessions.items() - hello.sessions.items()))
        peer.hello = hello
        self._effects.append(Reply(event.route, event.sender, Welcome()))

    def pong(self, event: FromPeer) -> None:
        """Answers a heartbeat."""
        self._effects.append(Reply(event.route, event.sender, Pong()))

    def peer(self, incarnation: int) -> Peer | None:
        """The prefill rank of this incarnation, if it has said hello."""
        return self._peers.get(incarnation)

    def distrust(self, peer: Peer, now: float) -> list[HeldGrant]:
        """A write to ``peer`` failed: its process is refused for ``failed_peer_s``.

        Returns what had its turn to come.
        """
        self._distrusted.bury(peer.incarnation, None, now)
        waiting = list(peer.backlog)
        peer.backlog.clear()
        return waiting

    def silent(self, now: float) -> list[Peer]:
        """Peers with unanswered grants that were silent for too long."""
        gone = []
        for incarnation in self._silences.expired(now):
            peer = self._peers.get(incarnation)
            if peer is None or not peer.unanswered:
                continue
            due = peer.heard + self._settings.peer_timeout_s
            if due <= now:
                gone.append(peer)
            else:
                self._silences.set(incarnation, due)
        return gone

    def lose(self, peer: Peer) -> list[HeldGrant]:
        """Forgets a peer; returns its grants that were not answered."""
        self._peers.pop(peer.incarnation, None)
        self._silences.clear(peer.incarnation)
        self._idles.clear(peer.incarnation)
        self._forget_sessions(peer.hello.sessions)
        return list(peer.unanswered)

    def lost(self, peer: Peer) -> bool:
        """Whether ``peer`` was forgotten: it has nothing open but writes that have not ended."""
        return self._peers.get(peer.incarnation) is not peer

    def forget_idle(self, now: float) -> None:
        """Forgets peers that nothing was open for in a long time."""
        for incarnation in self._idles.expired(now):
            peer = self._peers[incarnation]
            due = now + IDLE_PEER_S if peer.busy() else peer.heard + IDLE_PEER_S
            if due <= now:
                self.lose(peer)
            else:
                self._idles.set(incarnation, due)

    def _forget_sessions(self, sessions: Mapping[str, str]) -> None:
        for transport, session in sessions.items():
            self._effects.append(ForgetSession(transport, session))

    # --- what a grant must be ---------------------------------------------------------

    def foreign(self, grant: HeldGrant, room: SendRoom) -> Failure | None:
        """Why this peer has no part in this room on this encode rank, or None."""
        hello, settings = grant.peer.hello, self._settings
        if hello.rank >= hello.ranks:
            return Failure(Code.MISMATCH, f"prefill rank {hello.rank} of {hello.ranks} ranks")
        server = serving_rank(hello.rank, hello.ranks, settings.ranks)
        if server != settings.rank:
            reason = f"prefill rank {hello.rank} is served by encode rank {server}"
            return Failure(Code.MISMATCH, f"{reason}, not by rank {settings.rank}")
        others = {other.peer.hello.ranks for other in room.grants.values()} - {hello.ranks}
        if others:
            reason = f"engines of {hello.ranks} and {others.pop()} ranks ask for one room"
            return Failure(Code.MISMATCH, reason)
        return None

    def contract(self, grant: HeldGrant, room: SendRoom, now: float) -> Failure | None:
        """What the grant and the offer disagree about, or None if the rows may be written."""
        frame, hello, copy = grant.frame, grant.peer.hello, room.copy
        assert copy is not None
        shard = wanted_rows(copy.rows, hello.ranks, hello.rank, sharded=frame.sharded)
        row_nbytes = copy.nbytes // copy.rows if copy.rows else 0
        pairs = (
            ("rows", frame.rows, copy.rows),
            ("width", frame.width, copy.width),
            ("dtype", frame.dtype, copy.dtype),
            ("first row", frame.start, shard.start),
            ("row count", frame.count, shard.rows),
            ("bytes", frame.nbytes, shard.rows * row_nbytes),
        )
        for name, granted, offered in pairs:
            if granted != offered:
                reason = f"{name}: granted {granted}, offered {offered}"
                return Failure(Code.MISMATCH, reason)
        if frame.offset + frame.nbytes > hello.slab_nbytes:
            reason = f"bytes {frame.offset} + {frame.nbytes} lie outside the receiver's slab"
            return Failure(Code.MISMATCH, f"{reason} of {hello.slab_nbytes} bytes")
        if frame.transport not in hello.sessions:
            names = ", ".join(sorted(hello.sessions)) or "none"
            reason = f"transport {frame.transport!r} is not one of the receiver's: {names}"
            return Failure(Code.MISMATCH, reason)
        self._distrusted.forget(now)
        if grant.peer.incarnation in self._distrusted:
            reason = f"a write to prefill rank {hello.rank} failed: no more are tried for"
            return Failure(
                Code.WRITE_FAILED, f"{reason} {self._settings.failed_peer_s} s (failed_peer_s)"
            )
        return None

    # --- whose turn it is -------------------------------------------------------------

    def take(self, grant: HeldGrant) -> None:
        """``grant`` is open from now on: its peer's silence matters."""
        peer = grant.peer
        if not peer.unanswered:
            self._silences.set(peer.incarnation, peer.heard + self._settings.peer_timeout_s)
        peer.unanswered[grant] = None

    def answered(self, grant: HeldGrant) -> None:
        """``grant`` is not open any more."""
        grant.peer.unanswered.pop(grant, None)

    def enqueue(self, grant: HeldGrant) -> None:
        """``grant`` may be written when it is its turn."""
        grant.peer.backlog.append(grant)

    def pump(self, peer: Peer, rooms: RoomTable, now: float) -> None:
        """Starts writes to ``peer``, as many as may run at once, first come first served."""
        while peer.backlog and peer.writing < self._settings.write_parallelism:
            grant = peer.backlog.popleft()
            room = rooms.find(grant.frame.room)
            if grant.state is GrantState.WAITING and room is not None:
                self._begin_write(grant, room, now)

    def _begin_write(self, grant: HeldGrant, room: SendRoom, now: float) -> None:
        copy, frame = room.copy, grant.frame
        assert copy is not None
        self._write_serial += 1
        number = self._write_serial
        grant.state = GrantState.WRITING
        grant.write = number
        grant.peer.writing += 1
        self._writes[number] = grant
        self._write_ends.set(number, now + self._settings.write_timeout_s)
        lent = copy.token if copy.state is CopyState.LENT else None
        first = 0 if copy.region is None else copy.region.offset
        source = first + frame.start * (copy.nbytes // copy.rows)
        session = grant.peer.hello.sessions[frame.transport]
        self._effects.append(
            Write(number, frame.transport, session, source, frame.offset, frame.nbytes, lent)
        )

    def finish(self, write: int) -> HeldGrant | None:
        """The grant whose write has ended, or None for a write that is not known."""
        grant = self._writes.pop(write, None)
        if grant is not None:
            self._write_ends.clear(write)
            grant.peer.writing -= 1
        return grant

    def overdue(self, now: float) -> list[HeldGrant]:
        """Grants whose write should have ended by now; each is returned once."""
        return [self._writes[number] for number in self._write_ends.expired(now)]

    def stall(self, grant: HeldGrant, failure: Failure) -> None:
        """A grant that is being written has failed: it is answered when the write has ended."""
        frame, peer = grant.frame, grant.peer
        if grant.state is not GrantState.WRITING:
            return
        grant.state = GrantState.WITHDRAWN
        grant.verdict = Refused(frame.room, frame.grant, failure)
        self._write_ends.clear(grant.write)
        stalled = Stalled(frame.room, frame.grant, failure)
        self._effects.append(Reply(peer.route, peer.incarnation, stalled))

    def watch(self, grant: HeldGrant, now: float) -> None:
        """The peer of ``grant`` is lost: its write, if one is in flight, is overdue once more."""
        if grant.write in self._writes:
            self._write_ends.set(grant.write, now + self._settings.write_timeout_s)

    def writing(self) -> int:
        """Writes in flight."""
        return len(self._writes)

    def next_deadline(self) -> float | None:
        """When some write or some peer is overdue, or some peer may be forgotten, or None."""
        times = [self._write_ends.next(), self._silences.next(), self._idles.next()]
        return min((when for when in times if when is not None), default=None)

    def _make_room(self) -> bool:
        """Keeps the table bounded: the peer that has been idle the longest is forgotten."""
        if len(self._peers) < MAX_PEERS:
            return True
        idle = [peer for peer in self._peers.values() if not peer.busy()]
        if not idle:
            return False
        self.lose(min(idle, key=lambda peer: peer.heard))
        return True
