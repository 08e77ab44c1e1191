# SPDX-License-Identifier: Apache-2.0
"""How one configuration value is read: pure parsers from JSON values to types.

Owns: sizes with units, durations, numbers in a range, choices, host names.
A parser takes any JSON value and returns the typed one, or raises ValueError
whose text says what is allowed, so that the caller can put key and value in
front of it. A value that was parsed already parses to itself. Does not own:
which keys exist or how they depend on one another (``config.py``).
"""

from __future__ import annotations

import enum
import ipaddress
import re
from collections.abc import Callable
from typing import TypeVar

from epd_connector.errors import RequestError
from epd_connector.link.base import format_address

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

MAX_PORT = 65535

_UNITS = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_MAX_HOST_CHARS = 253

EnumT = TypeVar("EnumT", bound=enum.StrEnum)


def integer(low: int, high: int) -> Callable[[object], int]:
    """Whole number in [low, high]; true and false are not numbers."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return parse


def boolean(value: object) -> bool:
    """true or false; not text, and not a number."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def port(value: object) -> int:
    """TCP port. 0, any free port, passes too, for code that has another way to tell peers."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_PORT:
        raise ValueError(f"must be a whole number from 1 to {MAX_PORT}")
    return value


def seconds(low: float, high: float) -> Callable[[object], float]:
    """Finite duration in [low, high] seconds; whole numbers are accepted."""

    def parse(value: object) -> float:
        # The comparison refuses NaN and infinity too.
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise ValueError(f"must be a number of seconds from {low:g} to {high:g}")
        return float(value)

    return parse


def size(low: int, high: int) -> Callable[[object], int]:
    """Bytes in [low, high]: a whole number, or text like "512MiB"."""

    def parse(value: object) -> int:
        nbytes = _bytes_of(value)
        if nbytes is None:
            raise ValueError(
                "must be a whole number of bytes, or text in KiB, MiB, GiB or TiB such as '512MiB'"
            )
        if not low <= nbytes <= high:
            raise ValueError(f"must be from {show_size(low)} to {show_size(high)}")
        return nbytes

    return parse


def _bytes_of(value: object) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2] not in _UNITS:
        return None
    nbytes = float(match[1]) * _UNITS[match[2]]
    return int(nbytes) if nbytes.is_integer() else None


def show_size(nbytes: int) -> str:
    """Bytes for people, exact: 1536 -> "1536B", 2 << 30 -> "2GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if nbytes >= _UNITS[unit] and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return f"{nbytes}B"


def choice(kind: type[EnumT]) -> Callable[[object], EnumT]:
    """One of the values of an enum."""

    def parse(value: object) -> EnumT:
        for member in kind:
            if member.value == value:
                return member
        raise ValueError("must be one of " + ", ".join(member.value for member in kind))

    return parse


def name(value: object) -> str:
    """A plug-in name as in an entry point."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("must be a name of letters, digits, dots, dashes and underscores")
    return value


def text(value: object) -> str:
    """Any text, also empty."""
    if not isinstance(value, str):
        raise ValueError("must be text")
    return value


def secret(minimum: int) -> Callable[[object], str]:
    """Empty, or text of at least ``minimum`` characters."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError("must be text")
        if value and len(value) < minimum:
            raise ValueError(f"must have at least {minimum} characters, has {len(value)}")
        return value

    return parse


def public_host(value: object) -> str:
    """A host name or IP address that a peer can connect to, without brackets."""
    host = _host(value)
    if is_wildcard(host):
        raise ValueError(
            "is a wildcard, to which no peer can connect: must be the address that peers"
            " reach this engine at (to listen on every interface, set bind_host as well)"
        )
    return host


def bind_host(value: object) -> str:
    """Empty, a wildcard, a host name or an IP address, without brackets."""
    return "" if value == "" else _host(value)


def _host(value: object) -> str:
    allowed = "must be a host name or an IP address, without scheme and port"
    if not isinstance(value, str) or len(value) > _MAX_HOST_CHARS:
        raise ValueError(allowed)
    in_brackets = ":" in value and value.startswith("[") and value.endswith("]")
    bare = value[1:-1] if in_brackets else value
    if bare == "*":
        return bare
    try:
        format_address(bare, 0)
    except RequestError:
        raise ValueError(allowed) from None
    return bare


def is_wildcard(host: str) -> bool:
    """Whether ``host`` means every interface, so that nobody can connect to it."""
    if host == "*":
        return True
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
