# SPDX-License-Identifier: Apache-2.0
"""The bounded table of peers that connected to this link, shared by every link.

Owns the ids of incoming peers and which of them is forgotten when there are too many. Does not
own connections: a key is whatever a link needs to answer a peer.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from epd_connector.link.base import PeerId

K = TypeVar("K", bound=Hashable)


class IncomingPeers(Generic[K]):
    """Ids of incoming peers, at most ``limit`` of them; the longest idle one makes room."""

    def __init__(self, limit: int, new_id: Callable[[], PeerId]) -> None:
        self._limit = limit
        self._new_id = new_id
        self._ids: OrderedDict[K, PeerId] = OrderedDict()
        self._keys: dict[PeerId, K] = {}
        self._gone: set[PeerId] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def heard(self, key: K) -> PeerId:
        """A frame came from ``key``: its id, new if it is unknown, and it is idle no more."""
        peer = self._ids.get(key)
        if peer is not None:
            self._ids.move_to_end(key)
            self._gone.discard(peer)
            return peer
        if len(self._ids) >= self._limit:
            self.forget(next(iter(self._ids.values())))
        peer = self._new_id()
        self._ids[key] = peer
        self._keys[peer] = key
        return peer

    def key(self, peer: PeerId) -> K | None:
        """How to answer ``peer``; None if it is unknown or was forgotten."""
        return self._keys.get(peer)

    def forget(self, peer: PeerId) -> None:
        """Drop ``peer``; an unknown one is ignored."""
        self._gone.discard(peer)
        key = self._keys.pop(peer, None)
        if key is not None:
            del self._ids[key]

    def found(self, peer: PeerId, *, gone: bool) -> None:
        """What a frame to ``peer`` found; one that is gone keeps its id, should it come back."""
        if gone and peer in self._keys:
            self._gone.add(peer)
        else:
            self._gone.discard(peer)

    def is_gone(self, peer: PeerId) -> bool:
        """Whether ``peer`` was last found to be gone and has not been heard since."""
        return peer in self._gone

    def clear(self) -> None:
        """Drop every peer."""
        self._ids.clear()
        self._keys.clear()
        self._gone.clear()
