# SPDX-License-Identifier: Apache-2.0
"""Asks a live engine how it is, and tells it what it cannot know, over its control address.

For tools and tests: one question, one answer, no loop of its own.
"""

import secrets
from typing import TypeVar

from epd_connector.errors import ProtocolError
from epd_connector.link.client import ask
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import (
    AnyFrame,
    Describe,
    EngineDescription,
    Envelope,
    HostGone,
    Inspect,
    Report,
)
from epd_connector.protocol.state import EngineState

F = TypeVar("F", bound=AnyFrame)


def fetch_report(address: str, timeout_s: float, key: bytes | None = None) -> Report:
    """The report of the engine whose control address is ``address`` (``host:port``).

    Raises:
        LinkError: no answer within ``timeout_s`` seconds.
        ProtocolError: an answer that is none, or signed with another key.

    """
    return _answer(address, Inspect(), Report, timeout_s, key)


def fetch_state(address: str, timeout_s: float, key: bytes | None = None) -> EngineState:
    """What the engine at ``address`` looks like. Takes up to a second where a rank is silent.

    Raises like :func:`fetch_report`.
    """
    return _answer(address, Describe(), EngineDescription, timeout_s, key).state


def declare_dead(address: str, host: str, timeout_s: float, key: bytes | None = None) -> None:
    """Tells the prefill engine at ``address`` that nothing on ``host`` will ever write again.

    Raises like :func:`fetch_report`; an engine that receives nothing does not answer.
    """
    _answer(address, HostGone(host), HostGone, timeout_s, key)


def _answer(
    address: str, question: AnyFrame, kind: type[F], timeout_s: float, key: bytes | None
) -> F:
    codec = Codec(key)
    asked = codec.encode(Envelope(secrets.randbits(62) + 1, 0, question))
    payload = ask(address, asked, timeout_s)
    try:
        answer = codec.decode(payload).frame
    except ProtocolError as error:
        raise ProtocolError(f"the answer of {address} cannot be read: {error}") from error
    if not isinstance(answer, kind):
        raise ProtocolError(
            f"{address} answered with {type(answer).__name__}, not with {kind.__name__}: "
            "install the same release of epd-connector on both"
        )
    return answer
