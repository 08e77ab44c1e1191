# SPDX-License-Identifier: Apache-2.0
"""Asks a live engine how it is, over its control address. For tools and tests."""

import secrets

from epd_connector.errors import ProtocolError
from epd_connector.link.client import ask
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import Envelope, Inspect, Report


def fetch_report(address: str, timeout_s: float, key: bytes | None = None) -> Report:
    """The report of the engine whose control address is ``address`` (``host:port``).

    Raises:
        LinkError: no answer within ``timeout_s`` seconds.
        ProtocolError: an answer that is none, or signed with another key.

    """
    codec = Codec(key)
    question = codec.encode(Envelope(secrets.randbits(62) + 1, 0, Inspect()))
    answer = codec.decode(ask(address, question, timeout_s)).frame
    if not isinstance(answer, Report):
        raise ProtocolError(f"{address} answered with {type(answer).__name__}, not with a report")
    return answer
