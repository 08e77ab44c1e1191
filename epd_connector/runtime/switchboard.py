# SPDX-License-Identifier: Apache-2.0
"""Frames in and out of one link: encoding, incarnations, endpoints to peers, batches.

Owns the way from a machine's words (endpoint, route, frame) to the link's (peer, bytes). What
is said to one peer in one turn of the loop leaves in one piece: a message costs far more than
a frame.
Does not own the link's thread or any decision. Used by the loop's thread only.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence

from epd_connector.errors import LinkError, ProtocolError
from epd_connector.link.base import Link, PeerId
from epd_connector.protocol.codec import MAX_FRAME_BYTES, Codec
from epd_connector.protocol.frames import MAX_FRAMES, AnyFrame, Envelope
from epd_connector.stats import Counters

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
"""Endpoints connected to at a time; the one that was used longest ago makes room."""
SWEEP_S = 30.0
"""Seconds after which an endpoint that does not answer and is not used is hung up on."""
_LOGGED_MALFORMED = 10


class Switchboard:
    """Sends and reads envelopes for the process of incarnation ``incarnation``.

    ``kept``: an endpoint whose connection never makes room for another, since the peer
    there could not find its way back over a new one.
    """

    def __init__(
        self, link: Link, codec: Codec, incarnation: int, counters: Counters, *, kept: str = ""
    ) -> None:
        self._link = link
        self._codec = codec
        self._incarnation = incarnation
        self._counters = counters
        self._kept = kept
        self._peers: OrderedDict[str, PeerId] = OrderedDict()  # the one used last is last
        self._endpoints: dict[PeerId, str] = {}
        self._unused: set[str] = set()
        self._sweep_at = 0.0
        self._said: dict[tuple[PeerId, int], list[AnyFrame]] = {}

    def send(self, endpoint: str, addressee: int, frame: AnyFrame) -> None:
        """Sends to whoever listens at ``endpoint``, by ``flush``; connects where it must."""
        try:
            peer = self._connected(endpoint)
        except LinkError as error:
            # The machine that waits for an answer gives up by its own deadline.
            self._counters.add("frames_dropped")
            logger.warning("%s", error)
            return
        self.reply(peer, addressee, frame)

    def _connected(self, endpoint: str) -> PeerId:
        self._unused.discard(endpoint)
        peer = self._peers.get(endpoint)
        if peer is not None:
            self._peers.move_to_end(endpoint)
            return peer
        if len(self._peers) >= MAX_CONNECTIONS:
            self.hang_up(next(known for known in self._peers if known != self._kept))
        peer = self._link.connect(endpoint)
        self._peers[endpoint] = peer
        self._endpoints[peer] = endpoint
        return peer

    def reply(self, peer: PeerId, addressee: int, frame: AnyFrame) -> None:
        """Sends to ``peer``, by ``flush``. What it cannot take then is counted, and that is
        all: machines ask again by themselves."""
        said = self._said.setdefault((peer, addressee), [])
        said.append(frame)
        if len(said) == MAX_FRAMES:
            del self._said[peer, addressee]
            self._deliver_what_can_be(peer, addressee, said)

    def flush(self) -> None:
        """Sends what was said since the last call, in order for each peer. Once per turn."""
        while self._said:
            (peer, addressee), said = self._said.popitem()
            self._deliver_what_can_be(peer, addressee, said)

    def _deliver_what_can_be(self, peer: PeerId, addressee: int, frames: list[AnyFrame]) -> None:
        """A frame that cannot be encoded costs itself alone."""
        try:
            self.deliver(peer, addressee, frames)
        except Exception:
            if len(frames) == 1:
                self._counters.add("errors_internal")
                logger.exception("%.200r is lost", frames[0])
                return
            for frame in frames:
                self._deliver_what_can_be(peer, addressee, [frame])

    def deliver(self, peer: PeerId, addressee: int, frames: Sequence[AnyFrame]) -> bool:
        """Sends at most ``MAX_FRAMES`` to ``peer`` now; whether all could be queued."""
        first, *more = frames
        envelope = Envelope(self._incarnation, addressee, first, tuple(more))
        payload = self._codec.encode(envelope)
        if more and len(payload) > MAX_FRAME_BYTES:
            half = len(frames) // 2
            first_half = self.deliver(peer, addressee, frames[:half])
            return self.deliver(peer, addressee, frames[half:]) and first_half
        sent = self._link.send(peer, payload)
        if not sent:
            self._counters.add("frames_dropped", len(frames))
        return sent

    def hang_up(self, endpoint: str) -> None:
        """Closes the connection to ``endpoint``, if there is one. What was said goes before."""
        peer = self._peers.pop(endpoint, None)
        if peer is not None:
            self.flush()
            del self._endpoints[peer]
            self._link.disconnect(peer)

    def sweep(self, now: float) -> None:
        """Hangs up where nobody answers and nothing was said for ``SWEEP_S`` or longer: the link
        would dial for ever. What is used again is dialed again."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_S
        silent = {e for e in self._peers if e != self._kept and not self.connected(e)}
        for endpoint in silent & self._unused:
            self.hang_up(endpoint)
        self._unused = silent & self._peers.keys()

    def next_sweep(self, now: float) -> float | None:
        """Seconds until ``sweep`` has something to do, or None."""
        return max(0.0, self._sweep_at - now) if self._peers.keys() - {self._kept} else None

    def connected(self, endpoint: str) -> bool:
        """Whether the connection to ``endpoint`` is established, as far as is known."""
        peer = self._peers.get(endpoint)
        return peer is not None and self._link.connected(peer)

    def gone(self, peer: PeerId) -> bool:
        """Whether the last frame to a peer that came by itself found its connection gone."""
        return self._link.gone(peer)

    def take_broken(self) -> list[str]:
        """Endpoints whose connection broke since the last call. The link goes on dialing."""
        known = (self._endpoints.get(peer) for peer in self._link.take_broken())
        return [endpoint for endpoint in known if endpoint is not None]

    def endpoint_of(self, peer: PeerId) -> str | None:
        """The endpoint that this process connected to, or None for a peer that came by itself."""
        return self._endpoints.get(peer)

    def read(self, peer: PeerId, payload: bytes) -> Envelope | None:
        """The envelope in ``payload``; None for what is not one: counted, logged and dropped."""
        source = self._endpoints.get(peer)
        if source is not None:
            self._peers.move_to_end(source)
        try:
            return self._codec.decode(payload)
        except ProtocolError as error:
            self._counters.add("frames_malformed")
            if self._counters.frames_malformed <= _LOGGED_MALFORMED:
                sender = source or f"incoming peer {peer}"
                logger.warning(
                    "dropped a frame of %d bytes from %s: %s", len(payload), sender, error
                )
            return None
