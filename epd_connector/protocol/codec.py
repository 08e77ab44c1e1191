# SPDX-License-Identifier: Apache-2.0
"""Envelopes to bytes and back: version, size bound and authentication.

The one owner of the wire format::

    "EP" | version (1 byte) | flags (1 byte) | msgpack of the envelope | tag (16 bytes)

The four leading bytes mean the same in every version, so a peer of another version
can be told which one it meets. The tag is there when the authentication key is set:
BLAKE2b (RFC 7693) keyed with it, over everything before the tag. It says that the
sender knows the key; it hides nothing.

A ``Codec`` is immutable and may be used from any thread.
"""

import hashlib
import hmac

import msgspec

from epd_connector.errors import ProtocolError
from epd_connector.protocol.frames import Envelope

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20

_MAGIC = b"EP"
_SIGNED = 0x01
_HEADER_BYTES = 4
_TAG_BYTES = 16


class Codec:
    """Encodes and decodes envelopes; signs and verifies them when given a key."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = hashlib.blake2b(key, digest_size=32).digest() if key else None
        flags = _SIGNED if self._key else 0
        self._header = _MAGIC + bytes((PROTOCOL_VERSION, flags))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Envelope)

    def encode(self, envelope: Envelope) -> bytes:
        """Bytes of one envelope."""
        payload = self._header + self._encoder.encode(envelope)
        return payload if self._key is None else payload + self._tag(payload)

    def decode(self, payload: bytes) -> Envelope:
        """The envelope in ``payload``.

        Raises:
            ProtocolError: too large, foreign, of another version, signed when it
                should not be (or the reverse), forged, or not a known frame.

        """
        if len(payload) > MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {len(payload)} bytes, limit {MAX_FRAME_BYTES}")
        self._check_header(payload)
        body = payload[_HEADER_BYTES:]
        if self._key is not None:
            body = self._verified(payload)
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"frame of {len(payload)} bytes: {error}") from error

    def _check_header(self, payload: bytes) -> None:
        if len(payload) < _HEADER_BYTES or payload[:2] != _MAGIC:
            raise ProtocolError(f"frame of {len(payload)} bytes is not of this protocol")
        if payload[2] != PROTOCOL_VERSION:
            raise ProtocolError(
                f"peer speaks protocol version {payload[2]}, this process {PROTOCOL_VERSION}: "
                "install the same release of epd-connector on both"
            )
        if payload[3] != self._header[3]:
            signed, unsigned = ("peer", "this process")[:: 1 if payload[3] else -1]
            raise ProtocolError(
                f"{signed} signs its frames and {unsigned} does not: give both the same auth_key"
            )

    def _verified(self, payload: bytes) -> bytes:
        signed, tag = payload[:-_TAG_BYTES], payload[-_TAG_BYTES:]
        if len(payload) < _HEADER_BYTES + _TAG_BYTES or not hmac.compare_digest(
            tag, self._tag(signed)
        ):
            raise ProtocolError("frame is signed with another key: give both the same auth_key")
        return signed[_HEADER_BYTES:]

    def _tag(self, payload: bytes) -> bytes:
        assert self._key is not None
        return hashlib.blake2b(payload, key=self._key, digest_size=_TAG_BYTES).digest()
