# SPDX-License-Identifier: Apache-2.0
"""The encoder cache of a host, of few items, and what the connector knows of it.

The host removes entries while it schedules and tells after the pass; it does not tell of
references that it takes on entries which exist.
"""

from epd_connector.hosts.vllm.mirror import CacheMirror


class EncoderCache:
    """Entries by hash, and the requests that refer to each. The oldest go first."""

    def __init__(self, capacity: int) -> None:
        self.mirror = CacheMirror()
        self._capacity = capacity
        self._entries: dict[str, set[str]] = {}
        self._removed: list[str] = []

    def __contains__(self, hash: str) -> bool:
        return hash in self._entries

    def refer(self, hash: str, request: str) -> None:
        """``request`` uses an entry that exists; the connector is not told."""
        self._entries[hash].add(request)

    def allocate(self, hash: str, request: str) -> bool:
        """An entry for ``request``, if there is or can be made room for one."""
        if len(self._entries) >= self._capacity:
            free = next((old for old, users in self._entries.items() if not users), None)
            if free is None:
                return False
            del self._entries[free]
            self._removed.append(free)
        self._entries[hash] = {request}
        return True

    def release(self, hash: str, request: str) -> None:
        """``request`` has computed the tokens of the item."""
        if hash in self._entries:
            self._entries[hash].discard(request)
        self.mirror.released(hash, request)

    def left(self, request: str) -> None:
        """``request`` is over, or preempted."""
        for users in self._entries.values():
            users.discard(request)
        self.mirror.left(request)

    def pass_ended(self) -> None:
        # An entry that was removed and made again in one pass is told of as removed.
        self.mirror.pass_ended(self._removed, ())
        self._removed = []
