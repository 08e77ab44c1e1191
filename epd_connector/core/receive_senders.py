# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank knows of the encode ranks that write to it, and whether they live.

Owns the senders by endpoint and incarnation: who was told of this rank, who has spoken, who
is silent, who is gone. Does not own rooms, or what becomes of them (``receive``). A part of
``receive.PrefillRank``, not a machine of its own: it appends to the machine's effects.

Silence is not death. A process is gone when another incarnation speaks at its endpoint, when
the connection to it is broken and its host refuses a new one, or when somebody who knows
says that its host is.
"""

import math
from collections.abc import Callable

from epd_connector.core.deadlines import Deadlines
from epd_connector.core.effects import Effect, Hangup, Probe, Send
from epd_connector.core.receive_state import FromSender, ReceiveSettings, Sender
from epd_connector.core.tombstones import Tombstones
from epd_connector.protocol.frames import AnyFrame, Hello, Ping, Stale
from epd_connector.stats import Counters

IDLE_HANGUP_S = 60.0
"""Seconds after which the connection to an encode rank without open rooms is closed."""
MAX_DEAD = 4096
"""Processes of encode ranks that are remembered to be gone."""
_MISSED_BEATS = 2
"""Heartbeats without an answer after which an endpoint is probed."""


class SenderDesk:
    """Encode ranks of one prefill rank. ``now``: monotonic seconds, set by the machine."""

    def __init__(
        self, settings: ReceiveSettings, counters: Counters, effects: list[Effect]
    ) -> None:
        self.now = 0.0
        self._settings = settings
        self._counters = counters
        self._effects = effects
        self._known: dict[str, dict[int, Sender]] = {}
        self._dead: Tombstones[int, None] = Tombstones(MAX_DEAD, math.inf)
        self._beats: Deadlines[Sender] = Deadlines()
        self._probes: dict[str, float] = {}

    def all(self) -> list[Sender]:
        """Every process that is known and not known to be gone."""
        return [sender for known in self._known.values() for sender in known.values()]

    def is_dead(self, incarnation: int) -> bool:
        """Whether this process is known to be gone."""
        return incarnation in self._dead

    # --- words ------------------------------------------------------------------------

    def greet(self, endpoint: str, incarnation: int) -> Sender:
        """The encode rank at ``endpoint``, told who this rank is if it was not yet.

        The head may know of an older or a newer process there than this rank does: which
        of them is gone, only evidence says.
        """
        known = self._known.setdefault(endpoint, {})
        sender = known.get(incarnation)
        if sender is None:
            sender = known[incarnation] = Sender(endpoint, incarnation, self.now, self.now)
            self.say_hello(sender)
        if not sender.rooms:
            # What was heard long ago says nothing; the clock starts with the new grant. It goes
            # on for the next ones: many grants must not put off the look at an older one.
            sender.heard = self.now
            self._beats.set(sender, self.now + self._settings.heartbeat_s)
        return sender

    def say_hello(self, sender: Sender) -> None:
        """Tells ``sender`` who this rank is, and how to write to it."""
        settings = self._settings
        sessions = dict(settings.sessions)
        self.say(sender, Hello(settings.rank, settings.ranks, settings.slab_nbytes, sessions))

    def say(self, sender: Sender, frame: AnyFrame) -> None:
        """Sends ``frame`` to ``sender``; it may be lost."""
        self._effects.append(Send(sender.endpoint, sender.incarnation, frame))

    def hear(self, event: FromSender) -> Sender | None:
        """Who said this, or None for somebody who is not known, or whose word is stale."""
        mine = event.addressee in (0, self._settings.incarnation)
        sender = self._known.get(event.endpoint, {}).get(event.sender)
        if not mine or sender is None:
            self._counters.add("frames_stale")
            return None
        sender.heard = self.now
        return sender

    def returns(self, sender: Sender) -> bool:
        """Whether ``sender`` had been silent: it is not any more."""
        if not sender.silent:
            return False
        sender.silent = False
        self._beats.set(sender, self.now + self._settings.heartbeat_s)
        return True

    # --- evidence ---------------------------------------------------------------------

    def replaced(self, event: FromSender) -> list[Sender]:
        """Processes that are gone because another one speaks at their endpoint.

        ``Stale`` is said by a process that took the place of the one it names, and proves
        nothing of whoever came later: its repeats come late. Any other word proves the death
        of processes that were met before its sender was.
        """
        mine = event.addressee in (0, self._settings.incarnation)
        known = self._known.get(event.endpoint, {})
        others = [sender for sender in known.values() if sender.incarnation != event.sender]
        if not mine or not others:
            return []
        if isinstance(event.frame, Stale):
            return [sender for sender in others if sender.incarnation == event.frame.meant_for]
        speaker = known.get(event.sender)
        return [] if speaker is None else [s for s in others if s.met <= speaker.met]

    def on_host(self, host: str) -> list[Sender]:
        """Processes on ``host``, which is said to be dead."""
        return [sender for sender in self.all() if host_of(sender.endpoint) == host]

    def broken(self, endpoint: str) -> None:
        """The connection to ``endpoint`` broke: whoever has rooms there may be gone."""
        for sender in list(self._known.get(endpoint, {}).values()):
            if sender.rooms:
                self._probe(endpoint)
            else:
                # Whoever comes back is told anew who this rank is.
                self._leave(sender)

    def probed(self, endpoint: str, gone: bool) -> list[Sender]:
        """The endpoint was probed: processes that are gone because their host refuses.

        Whoever was met after the probe began may be a new process, which the refusal that
        it reports was not about.
        """
        began = self._probes.pop(endpoint, -math.inf)
        known = self._known.get(endpoint, {}).values()
        return [sender for sender in known if gone and sender.met <= began]

    def bury(self, sender: Sender) -> None:
        """``sender`` is gone, for good."""
        self._leave(sender)
        self._dead.bury(sender.incarnation, None, self.now)
        self._counters.add("peers_lost")

    # --- time -------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do, or None."""
        return self._beats.next()

    def tick(self, silent: Callable[[Sender], None]) -> None:
        """Heartbeats that are due; ``silent`` is called for those that do not answer."""
        for sender in self._beats.expired(self.now):
            if sender.rooms:
                self._beat(sender, silent)
            else:
                self._rest(sender)

    def _beat(self, sender: Sender, silent: Callable[[Sender], None]) -> None:
        settings = self._settings
        too_long = sender.heard + settings.peer_timeout_s
        if self.now >= too_long:
            if not sender.silent:
                self._counters.add("peers_lost")
            sender.silent = True
            silent(sender)
        if self.now >= sender.heard + _MISSED_BEATS * settings.heartbeat_s:
            self._probe(sender.endpoint)
        self.say(sender, Ping())
        # Not later than the silence lasts too long.
        pause = settings.peer_timeout_s if sender.silent else settings.heartbeat_s
        due = self.now + pause
        self._beats.set(sender, min(due, too_long) if too_long > self.now else due)

    def _rest(self, sender: Sender) -> None:
        hangup_at = sender.heard + IDLE_HANGUP_S
        if self.now < hangup_at:
            self._beats.set(sender, hangup_at)
        else:
            self._leave(sender)

    def _probe(self, endpoint: str) -> None:
        if endpoint not in self._probes:
            self._probes[endpoint] = self.now
            self._effects.append(Probe(endpoint))

    def _leave(self, sender: Sender) -> None:
        """Forgets ``sender``, and the connection where nobody else is known at its endpoint."""
        self._beats.clear(sender)
        known = self._known[sender.endpoint]
        del known[sender.incarnation]
        if not known:
            del self._known[sender.endpoint]
            self._effects.append(Hangup(sender.endpoint))


def host_of(endpoint: str) -> str:
    """``a`` of ``tcp://a:1``, ``::1`` of ``tcp://[::1]:1``."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
