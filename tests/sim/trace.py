# SPDX-License-Identifier: Apache-2.0
"""What happened last, kept as it is and made readable only when somebody wants to read it."""

import dataclasses
from collections import deque
from collections.abc import Iterable

from epd_connector.errors import Failure

KEPT = 60
_FIELDS = (
    "room",
    "rooms",
    "grant",
    "request",
    "hash",
    "hashes",
    "items",
    "rank",
    "rows",
    "start",
    "count",
    "offset",
    "destination",
    "nbytes",
    "write",
    "copy",
    "token",
    "endpoint",
    "address",
    "gone",
    "host",
    "addressee",
    "sender",
    "failure",
)
_WRAPPERS = ("frame",)
_WIDEST = 150


class Trace:
    """The last ``kept`` events: when, to whom, what, and what was asked for because of it."""

    def __init__(self, kept: int | None = KEPT) -> None:
        self._events: deque[tuple[float, str, object, Iterable[object]]] = deque(maxlen=kept)

    def note(self, when: float, who: str, what: object, asked: Iterable[object] = ()) -> None:
        """``what`` and ``asked`` are values that do not change any more."""
        self._events.append((when, who, what, asked))

    def lines(self) -> list[str]:
        """For a person to read."""
        return [line for event in self._events for line in _lines(*event)]


def _lines(when: float, who: str, what: object, asked: Iterable[object]) -> list[str]:
    head = f"{when:10.4f}  {who:<16} {words(what)}"
    return [head, *(f"{'':29} -> {words(effect)}" for effect in asked)]


def words(what: object) -> str:
    """One line that says what a value is: its kind, and what names things in it."""
    if isinstance(what, str):
        return what
    if isinstance(what, Failure):
        return f"{what.code.value}: {what.reason}"[:_WIDEST]
    parts = [
        words(getattr(what, name)) for name in _WRAPPERS if getattr(what, name, None) is not None
    ]
    parts += [_field(name, getattr(what, name)) for name in _FIELDS if _has(what, name)]
    return " ".join([type(what).__name__, *parts])


def _has(what: object, name: str) -> bool:
    return hasattr(what, name) and getattr(what, name) is not None


def _field(name: str, value: object) -> str:
    if isinstance(value, Failure):
        return f"({words(value)})"
    if dataclasses.is_dataclass(value):
        return f"{name}=({words(value)})"
    if isinstance(value, tuple):
        return f"{name}=[{', '.join(str(_short(part)) for part in value)}]"
    return f"{name}={value}"


def _short(part: object) -> object:
    if hasattr(part, "hash") and hasattr(part, "address"):
        return f"{part.hash}/room {part.room}@{part.address}" if hasattr(part, "room") else part
    return part
