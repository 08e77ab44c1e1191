# SPDX-License-Identifier: Apache-2.0
"""The one error tree, and the failure codes that travel between engines.

Owns: every exception class this package raises on purpose, the closed set of
codes for why a room failed, and the pair (code, reason) that carries one over
the wire. Does not own: how a failure is encoded in a frame, or which component
decides that something failed.

An exception is for whoever called; a ``Failure`` is for whoever waits for the
room. A state machine returns failures and does not raise them.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

MAX_REASON_CHARS = 1000
"""Bound of ``Failure.reason``, on the wire too."""


class EPDError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(EPDError, ValueError):
    """The operator's mistake, found at start: names key, value, range and remedy."""


class HostVersionError(EPDError):
    """The host engine is of a version outside the supported range."""


class TransportError(EPDError):
    """A transport cannot be used here, or memory could not be registered with it."""


class LinkError(EPDError):
    """A socket cannot bind or connect: names the endpoint and the config key."""


class ProtocolError(EPDError):
    """The peer's fault: a frame that is malformed, too large or forged."""


class RequestError(EPDError, ValueError):
    """The client's fault: ``ec_transfer_params`` of a request cannot be used."""


class Code(enum.StrEnum):
    """Why a room failed. The set is closed: both ends of the wire know all of it."""

    BAD_REQUEST = "bad_request"
    """The request names no usable room or encode engine."""
    MISMATCH = "mismatch"
    """The two ends disagree: width, dtype, rows, model fingerprint or protocol version."""
    TOO_LARGE = "too_large"
    """The item can never fit into a slab of the configured size."""
    TIMEOUT = "timeout"
    """A deadline passed; the reason names the config key that sets it."""
    NOT_OFFERED = "not_offered"
    """Grants came, but no request of the encode engine ever claimed the room."""
    UNREACHABLE = "unreachable"
    """The encode engine cannot be resolved, or is not ready."""
    PEER_DEAD = "peer_dead"
    """The peer stopped answering heartbeats."""
    STALE = "stale"
    """The frame belongs to an older incarnation of an engine."""
    WRITE_FAILED = "write_failed"
    """The transport reported a failed write, or writes to this peer are refused for a while."""
    ENCODE_FAILED = "encode_failed"
    """The tower, or the staging of its output, failed."""
    CANCELLED = "cancelled"
    """Whoever asked for the room does not want it any more."""
    LOST = "lost"
    """The item was received before and is gone, and its room is used."""
    OVERLOADED = "overloaded"
    """A bounded queue or table is full."""
    SHUTDOWN = "shutdown"
    """The engine is stopping."""
    INTERNAL = "internal"
    """A defect of this package; the log has the traceback."""

    @property
    def retryable(self) -> bool:
        """Whether the same request, with new rooms, may well succeed."""
        return self not in (Code.BAD_REQUEST, Code.MISMATCH, Code.TOO_LARGE, Code.INTERNAL)


class Failure(msgspec.Struct, frozen=True):
    """Why a room failed: a code for programs and a reason for people.

    The reason names the value, the limit and the remedy; what it quotes may be of any length,
    so it is cut to ``MAX_REASON_CHARS`` characters. Frozen and hashable, so it is safe to
    share between threads.
    """

    code: Code
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]

    def __post_init__(self) -> None:
        """Makes the reason one that every peer accepts: bounded, and free of lone surrogates."""
        reason = self.reason.encode("utf-8", "replace").decode("utf-8")
        if len(reason) > MAX_REASON_CHARS:
            reason = reason[: MAX_REASON_CHARS - 1] + "…"
        if reason != self.reason:
            msgspec.structs.force_setattr(self, "reason", reason)

    def __str__(self) -> str:
        return f"{self.code.value}: {self.reason}"
