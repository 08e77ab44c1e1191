# SPDX-License-Identifier: Apache-2.0
"""What the host's encoder cache holds, as far as the connector is told. Pure.

The host tells of every entry it makes room for, of references given up, and, after a
scheduling pass, of entries it removed in that pass. It does not tell of references taken
on existing entries: an entry may be referenced more often than is known here.
"""

from collections.abc import Iterable


class CacheMirror:
    """Entries by hash, with the requests known to refer to each."""

    def __init__(self) -> None:
        self._entries: dict[str, set[str]] = {}
        self._by_request: dict[str, set[str]] = {}

    def holds(self, hash: str) -> bool:
        """Whether the entry existed when the pass began, or was made in it."""
        return hash in self._entries

    def referenced(self, hash: str) -> bool:
        """Whether some request is known to refer to the entry, so that it stays."""
        return bool(self._entries.get(hash))

    def allocated(self, hash: str, request: str) -> None:
        """The host made room for the entry on behalf of ``request``."""
        self._entries.setdefault(hash, set()).add(request)
        self._by_request.setdefault(request, set()).add(hash)

    def released(self, hash: str, request: str) -> None:
        """``request`` does not refer to the entry any more."""
        self._entries.get(hash, set()).discard(request)
        hashes = self._by_request.get(request)
        if hashes is not None:
            hashes.discard(hash)
            if not hashes:
                del self._by_request[request]

    def left(self, request: str) -> None:
        """``request`` is over or was preempted: it refers to nothing."""
        for hash in list(self._by_request.get(request, ())):
            self.released(hash, request)

    def pass_ended(self, removed: Iterable[str], preempted: Iterable[str]) -> None:
        """The scheduling pass is over: the host removed entries and preempted requests in it."""
        for request in preempted:
            self.left(request)
        for hash in removed:
            for request in self._entries.pop(hash, set()):
                self._by_request[request].discard(hash)
                if not self._by_request[request]:
                    del self._by_request[request]
