# SPDX-License-Identifier: Apache-2.0
"""The encode rank's grants: from their arrival to their one answer, and how rooms end by them.

Owns what peers ask for and are answered: a grant waits for its room's rows, is written, and
is answered exactly once (a repeat gets the same answer again). Owns therefore how a room
fails, and when it concludes: every receiver has its answer, and no write is in flight.
Does not own peers and writes (``send_peers``), the table of rooms (``send_rooms``) or the
memory of copies (``send_copies``). A part of ``send.EncodeRank``.
"""

from epd_connector.core.effects import Effect, Reply
from epd_connector.core.send_copies import CopyDesk
from epd_connector.core.send_events import FromPeer, Wrote
from epd_connector.core.send_peers import PeerDesk
from epd_connector.core.send_rooms import RoomTable
from epd_connector.core.send_state import (
    Answer,
    CopyState,
    GrantState,
    HeldGrant,
    RoomEvent,
    RoomState,
    SendRoom,
    SendSettings,
)
from epd_connector.core.tombstones import Tombstones
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    Cancel,
    Cancelled,
    Grant,
    Hello,
    Landed,
    Ping,
    Refused,
)
from epd_connector.rows import served_ranks
from epd_connector.stats import Counters

ANSWERS_PER_ROOM = 4
"""Answers to grants that are remembered, as a multiple of ``max_rooms``."""
TOO_LATE = Failure(Code.CANCELLED, "the room was concluded before this grant")


class GrantDesk:
    """Grants of one encode rank. ``now``: monotonic seconds, set by the machine."""

    def __init__(
        self,
        settings: SendSettings,
        counters: Counters,
        effects: list[Effect],
        rooms: RoomTable,
        copies: CopyDesk,
    ) -> None:
        self.now = 0.0
        self._settings = settings
        self._counters = counters
        self._effects = effects
        self._rooms = rooms
        self._copies = copies
        self._peers = PeerDesk(settings, counters, effects)
        self._answers: Tombstones[tuple[int, int, int], Answer] = Tombstones(
            ANSWERS_PER_ROOM * settings.max_rooms, settings.tombstone_s
        )

    def writing(self) -> int:
        """Writes in flight."""
        return self._peers.writing()

    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do, or None."""
        return self._peers.next_deadline()

    # --- what peers say ---------------------------------------------------------------

    def hear(self, event: FromPeer) -> SendRoom | None:
        """A frame of a prefill rank; the room that it has newly granted memory for, if any."""
        if not self._peers.admit(event, self.now):
            return None
        match event.frame:
            case Hello():
                self._peers.greet(event, event.frame, self.now)
            case Ping():
                self._peers.pong(event)
            case Grant():
                return self._on_grant(event, event.frame)
            case Cancel():
                self._on_cancel(event, event.frame)
            case _:
                self._counters.add("frames_malformed")
        return None

    def _on_grant(self, event: FromPeer, frame: Grant) -> SendRoom | None:
        answer = self._answers.find((event.sender, frame.room, frame.grant))
        if answer is not None:
            self._counters.add("grants_repeated")
            self._effects.append(Reply(event.route, event.sender, answer))
            return None
        tomb = self._rooms.tomb(frame.room)
        if tomb is not None:
            self._reply(event.route, event.sender, _refused(frame, tomb.failure or TOO_LATE))
            return None
        peer = self._peers.peer(event.sender)
        if peer is None:
            # Its Hello was lost with a connection; the grant comes again behind a new one.
            self._counters.add("grants_repeated")
            return None
        room = self._rooms.find(frame.room) or self._rooms.make(frame.room, RoomState.ASKED)
        if room is None:
            self._refuse_stranger(event, frame, self._rooms.overload())
            return None
        if room.state is RoomState.ASKED and not room.grants:
            self._rooms.give_time(room)
        held = room.grants.get(peer.hello.rank)
        if held is not None and not self._replaces(event, frame, held):
            return None
        grant = HeldGrant(frame, peer)
        problem = self._peers.foreign(grant, room)
        if problem is not None:
            self._refuse_stranger(event, frame, problem)
            self._settle_unasked(room)
            return None
        room.receivers = served_ranks(self._settings.rank, self._settings.ranks, peer.hello.ranks)
        room.grants[peer.hello.rank] = grant
        self._peers.take(grant)
        if room.failure is not None:
            self._answer(room, grant, _refused(frame, room.failure))
        elif room.state is RoomState.OFFERED:
            self._serve(room, grant)
        self._settle(room)
        return room

    def _replaces(self, event: FromPeer, frame: Grant, held: HeldGrant) -> bool:
        """Whether ``frame`` is a new attempt; a repeat or one too many is dealt with here."""
        if held.frame.grant == frame.grant and held.peer.incarnation == event.sender:
            self._counters.add("grants_repeated")
            if held.answer is not None:
                self._effects.append(Reply(event.route, event.sender, held.answer))
            return False
        if held.state is GrantState.ANSWERED and held.peer.incarnation == event.sender:
            return True
        reason = f"grant {held.frame.grant} of rank {held.peer.hello.rank} is not answered yet"
        self._refuse_stranger(event, frame, Failure(Code.OVERLOADED, reason))
        return False

    def _on_cancel(self, event: FromPeer, frame: Cancel) -> None:
        room = self._rooms.find(frame.room)
        grant = self._find(room, event.sender, frame.grant)
        answer = Cancelled(frame.room, frame.grant)
        if room is None or grant is None or grant.state is GrantState.ANSWERED:
            # Nothing is being written under it now, and nothing may be if it comes after all.
            self._reply(event.route, event.sender, answer)
        elif grant.state is GrantState.WAITING:
            self._answer(room, grant, answer)
            self._settle(room)
        else:
            grant.state, grant.verdict = GrantState.WITHDRAWN, answer

    def _find(self, room: SendRoom | None, sender: int, number: int) -> HeldGrant | None:
        if room is None:
            return None
        for grant in room.grants.values():
            if grant.frame.grant == number and grant.peer.incarnation == sender:
                return grant
        return None

    # --- grants are served ------------------------------------------------------------

    def offer(self, room: SendRoom) -> None:
        """The rows of ``room`` are staged: whoever waits for them gets them."""
        self._rooms.move(room, RoomEvent.STAGED)
        self._count_item("items_offered")
        for grant in list(room.grants.values()):
            if grant.state is GrantState.WAITING:
                self._serve(room, grant)
        self._settle(room)

    def _serve(self, room: SendRoom, grant: HeldGrant) -> None:
        """The rows are staged: check the grant against the offer, then write or answer it."""
        assert room.copy is not None
        failure = self._peers.contract(grant, room, self.now)
        if failure is not None:
            self._answer(room, grant, _refused(grant.frame, failure))
        elif grant.frame.nbytes == 0:
            self._answer(room, grant, Landed(room.room, grant.frame.grant))
        else:
            self._peers.enqueue(grant)
            self._pump(grant)

    def _pump(self, grant: HeldGrant) -> None:
        self._peers.pump(grant.peer, self._rooms, self.now)

    def wrote(self, event: Wrote) -> None:
        """A write has ended, well or not: its grant is answered."""
        grant = self._peers.finish(event.write)
        if grant is None:
            return
        room = self._room(grant)
        if event.failure is not None:
            self._on_write_failed(room, grant, event.failure)
        elif grant.verdict is not None:
            self._answer(room, grant, grant.verdict)
        else:
            self._counters.add("bytes_sent", grant.frame.nbytes)
            self._answer(room, grant, Landed(room.room, grant.frame.grant))
        self._pump(grant)
        self._settle(room)

    def _on_write_failed(self, room: SendRoom, grant: HeldGrant, failure: Failure) -> None:
        """The room fails for everybody; what else waits for this peer is refused."""
        self._counters.add("writes_failed")
        waiting = self._peers.distrust(grant.peer, self.now)
        self._answer(room, grant, grant.verdict or _refused(grant.frame, failure))
        self.fail(room, failure)
        for other in waiting:
            if other.state is GrantState.WAITING:
                other_room = self._room(other)
                self._serve(other_room, other)
                self._settle(other_room)

    # --- time -------------------------------------------------------------------------

    def tick(self) -> None:
        """Writes that take too long, peers that are silent, answers that are old."""
        for grant in self._peers.overdue(self.now):
            self._on_stalled(grant)
        for peer in self._peers.silent(self.now):
            self._counters.add("peers_lost")
            failure = Failure(
                Code.PEER_DEAD,
                f"prefill rank {peer.hello.rank} was silent for "
                f"{self._settings.peer_timeout_s} s (peer_timeout_s)",
            )
            for grant in self._peers.lose(peer):
                self.fail(self._room(grant), failure)
                self._peers.watch(grant, self.now)
        self._peers.forget_idle(self.now)
        self._answers.forget(self.now)

    def _on_stalled(self, grant: HeldGrant) -> None:
        """A write takes too long: its room fails now, its region stays with the write."""
        room = self._room(grant)
        if self._peers.lost(grant.peer):
            self._give_rows_back(room)
            return
        failure = Failure(
            Code.TIMEOUT,
            f"a write of {grant.frame.nbytes} bytes has not ended in "
            f"{self._settings.write_timeout_s} s (write_timeout_s)",
        )
        self._counters.add("writes_late")
        self._peers.stall(grant, failure)
        self.fail(room, failure)

    def _give_rows_back(self, room: SendRoom) -> None:
        """A write to a lost peer may never end; it does not keep the rows that it reads.

        The room has failed with its peer, so nobody is told that they have landed, whatever
        is read there. Lent rows are another matter: what is read there must stay mapped.
        """
        if room.copy is not None and room.copy.state is not CopyState.LENT:
            self._copies.release(room.copy, room)
            room.copy = None

    # --- grants and rooms end ---------------------------------------------------------

    def fail(self, room: SendRoom, failure: Failure) -> None:
        """Fails ``room`` for every receiver; writes that are in flight are waited for."""
        if not self._rooms.move(room, RoomEvent.FAIL):
            return
        room.failure = failure
        self._rooms.no_deadline(room)
        skipped = failure.code is Code.CANCELLED
        self._counters.add("rooms_skipped" if skipped else "rooms_failed")
        if not skipped:
            self._rooms.note(room.room, failure)
        for grant in list(room.grants.values()):
            if grant.state is GrantState.WAITING:
                self._answer(room, grant, _refused(grant.frame, failure))
            elif grant.state is GrantState.WRITING:
                self._peers.stall(grant, failure)
        self._settle(room)

    def unserved(self, room: SendRoom, nobody: Failure) -> None:
        """Concludes ``room``, which this rank serves to nobody; late grants hear ``nobody``.

        Where somebody was granted the rows, engines of different sizes ask for one room: it
        stays with those whose grants came first, as it does among grants.
        """
        if not room.grants and self._rooms.move(room, RoomEvent.SERVED):
            self._conclude(room, nobody)

    def _settle(self, room: SendRoom) -> None:
        """Concludes ``room`` if nothing is left to be done for it."""
        if room.state is RoomState.DRAINING:
            if not room.writes_in_flight() and self._rooms.move(room, RoomEvent.DRAINED):
                self._conclude(room)
        elif room.all_answered() and self._rooms.move(room, RoomEvent.SERVED):
            answers = [grant.answer for grant in room.grants.values()]
            if room.copy is not None and all(isinstance(a, Landed) for a in answers):
                self._count_item("items_sent")
                self._counters.add_duration(self.now - room.copy.encoded_at)
            self._conclude(room)

    def _count_item(self, name: str) -> None:
        """Once per engine: by its first rank, which has a part in every transfer."""
        if self._settings.rank == 0:
            self._counters.add(name)

    def _settle_unasked(self, room: SendRoom) -> None:
        """A room that only a refused stranger asked for leaves nothing behind."""
        if room.state is RoomState.ASKED and not room.grants:
            self._rooms.remove(room)

    def _conclude(self, room: SendRoom, nobody: Failure | None = None) -> None:
        self._counters.add("rooms_concluded")
        self._rooms.remove(room)
        self._rooms.bury(room.room, nobody or room.failure)
        if room.copy is not None:
            self._copies.release(room.copy, room)

    def _answer(self, room: SendRoom, grant: HeldGrant, answer: Answer) -> None:
        grant.state, grant.answer = GrantState.ANSWERED, answer
        self._peers.answered(grant)
        if isinstance(answer, Refused):
            self._counters.add("grants_refused")
        self._reply(grant.peer.route, grant.peer.incarnation, answer)

    def _reply(self, route: int, sender: int, answer: Answer) -> None:
        """Gives a final answer, and remembers it: the first one counts, whatever comes late."""
        key = (sender, answer.room, answer.grant)
        if key not in self._answers:
            self._answers.bury(key, answer, self.now)
        self._effects.append(Reply(route, sender, answer))

    def _refuse_stranger(self, event: FromPeer, frame: Grant, failure: Failure) -> None:
        """Refuses a grant that takes no part in its room."""
        self._counters.add("grants_refused")
        self._rooms.note(frame.room, failure)
        self._reply(event.route, event.sender, _refused(frame, failure))

    def _room(self, grant: HeldGrant) -> SendRoom:
        """The room of a grant that is open: it is open, too."""
        room = self._rooms.find(grant.frame.room)
        assert room is not None
        return room


def _refused(frame: Grant, failure: Failure) -> Refused:
    return Refused(frame.room, frame.grant, failure)
