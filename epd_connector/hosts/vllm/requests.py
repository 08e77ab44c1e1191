# SPDX-License-Identifier: Apache-2.0
"""What the head adapter remembers of one request. Plain records of the scheduler's thread."""

import sys
from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Item:
    """One media item of a request. ``end``: the position after its last token.

    ``encodable``: the request brought what this engine's tower needs.
    """

    hash: str
    rows: int
    modality: str
    end: int
    encodable: bool


@dataclass(slots=True)
class Entry:
    """One request of the scheduler.

    ``claims``: rooms and hashes it claims on the encode side. ``brought``: hashes it brought
    rooms for; ``ticketed``: those whose rooms were not used yet; ``unspared``: those whose
    rooms may still be of use; ``needed``: those that were asked for and are not loaded.
    ``settled_at``: with this many tokens computed or more, nothing of the request is of
    interest any more.
    """

    request: str
    items: list[Item]
    claims: list[tuple[int, str]] = field(default_factory=list)
    brought: set[str] = field(default_factory=set)
    ticketed: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    settled_at: int = sys.maxsize
    failed: bool = False
    unspared: set[str] = field(init=False)
    last_end: int = field(init=False)

    def __post_init__(self) -> None:
        self.unspared = {item.hash for item in self.items}
        self.last_end = max((item.end for item in self.items), default=0)

    def extend(self, items: list[Item]) -> None:
        """More media has come: nothing is settled any more."""
        self.items.extend(items)
        self.unspared.update(item.hash for item in items)
        self.last_end = max(item.end for item in self.items)
        self.settled_at = sys.maxsize


class RecentRooms:
    """Rooms that were seen, at most ``limit`` of them; the oldest are forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rooms: OrderedDict[int, None] = OrderedDict()

    def seen(self, room: int) -> bool:
        """Whether ``room`` was seen before; from now on it was."""
        before = room in self._rooms
        self._rooms[room] = None
        self._rooms.move_to_end(room)
        while len(self._rooms) > self._limit:
            self._rooms.popitem(last=False)
        return before
