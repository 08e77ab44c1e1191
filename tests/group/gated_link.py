# SPDX-License-Identifier: Apache-2.0
"""A real link whose frames of chosen kinds a test can hold back, or send twice."""

from collections import deque

from epd_connector.link import zmq_link
from epd_connector.link.base import PeerId
from epd_connector.link.zmq_link import ZmqLink
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import Envelope

Kinds = frozenset[type]
NONE: Kinds = frozenset()


class GatedLink(ZmqLink):
    """``gate`` may be called from any thread; what was held back goes when it is opened."""

    def __init__(self, max_frame_bytes: int = 1 << 20, send_queue: int = 4096) -> None:
        super().__init__(max_frame_bytes, send_queue)
        self._held = NONE
        self._doubled = NONE
        self._waiting: deque[tuple[PeerId, bytes]] = deque()

    def gate(self, *, held: Kinds = NONE, doubled: Kinds = NONE) -> None:
        self._held, self._doubled = held, doubled
        self.wake()

    def held_back(self) -> int:
        """How many frames wait."""
        return len(self._waiting)

    def send(self, peer: PeerId, payload: bytes) -> bool:
        envelope = Codec().decode(payload)
        if not {type(frame) for frame in envelope.frames()} & (self._held | self._doubled):
            return super().send(peer, payload)
        sent = True
        for frame in envelope.frames():
            alone = Codec().encode(Envelope(envelope.sender, envelope.addressee, frame))
            if type(frame) in self._held:
                self._waiting.append((peer, alone))
                continue
            for _ in range(2 if type(frame) in self._doubled else 1):
                sent = super().send(peer, alone) and sent
        return sent

    def wait(self, timeout_s: float | None) -> list[tuple[PeerId, bytes]]:
        if not self._held:
            for _ in range(len(self._waiting)):
                super().send(*self._waiting.popleft())
        return super().wait(timeout_s)


def use_gated_links() -> None:
    """Every link that this process makes for the host from now on has a gate."""
    zmq_link.ZmqLink = GatedLink  # type: ignore[assignment, misc]
