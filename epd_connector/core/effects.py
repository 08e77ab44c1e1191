# SPDX-License-Identifier: Apache-2.0
"""What machines ask their runtime to do. Plain values; the runtime carries them out in order."""

from dataclasses import dataclass

from epd_connector.errors import Failure
from epd_connector.protocol.frames import AnyFrame, Incarnation


@dataclass(frozen=True, slots=True)
class Reply:
    """Send ``frame`` to the peer that ``route`` names (the link's id of an incoming peer)."""

    route: int
    addressee: Incarnation
    frame: AnyFrame


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``frame`` to whoever listens at ``endpoint``; the runtime connects as needed."""

    endpoint: str
    addressee: Incarnation
    frame: AnyFrame


@dataclass(frozen=True, slots=True)
class Hangup:
    """Close the connection to ``endpoint``: nothing is open there any more."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether the process that listened at ``endpoint`` is gone.

    Answered once by ``receive.Probed``. It is gone where the connection to it is broken and its
    host refuses a new one; a host that does not answer says nothing.
    """

    endpoint: str


@dataclass(frozen=True, slots=True)
class TellHead:
    """A rank tells its own head."""

    frame: AnyFrame


@dataclass(frozen=True, slots=True)
class TellRanks:
    """A head tells every one of its own ranks."""

    frame: AnyFrame


@dataclass(frozen=True, slots=True)
class Stage:
    """Copy the rows behind ``token`` to ``offset`` of the send slab; then say ``Staged(copy)``."""

    copy: int
    token: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DropRows:
    """The rows behind ``token`` are not needed (any more)."""

    token: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write ``nbytes`` from ``source`` of the send slab to ``destination`` of ``session``'s slab.

    ``lent``: token of rows that are read instead of the send slab, or None; they are dropped
    only after the write has ended. Answered once by ``Wrote(write)``, when it is certain that
    nothing more will be read or written.
    """

    write: int
    transport: str
    session: str
    source: int
    destination: int
    nbytes: int
    lent: int | None = None


@dataclass(frozen=True, slots=True)
class ForgetSession:
    """The peer behind ``session`` is gone: drop what the transport keeps for it."""

    transport: str
    session: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Prefill head: this request cannot have its items. Once per request."""

    request: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class EncodeLocally:
    """Prefill head: the host is to encode item ``hash`` of ``request`` itself."""

    request: str
    hash: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Noted:
    """Something failed that a person may want to read about."""

    subject: str
    failure: Failure


Effect = (
    Reply
    | Send
    | Hangup
    | Probe
    | TellHead
    | TellRanks
    | Stage
    | DropRows
    | Write
    | ForgetSession
    | RequestFailed
    | EncodeLocally
    | Noted
)
