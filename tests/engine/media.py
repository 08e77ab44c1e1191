# SPDX-License-Identifier: Apache-2.0
"""Messages of engine tests that are not plain pictures, and flags about pictures."""

import json
from collections.abc import Mapping

from epd_connector.testing.chat import ChatResult, JSONValue, Message


def without_pixels(encoded: ChatResult, prompt: str) -> list[Message]:
    """One user message with the items of an encode engine's answer, as metadata only."""
    assert encoded.ec_transfer_params is not None
    parts: list[JSONValue] = []
    for identifier, described in encoded.ec_transfer_params.items():
        assert isinstance(described, Mapping)
        parts.append(
            {"type": "image_embeds", "image_embeds": described["metadata"], "uuid": identifier}
        )
    parts.append({"type": "text", "text": prompt})
    return [{"role": "user", "content": parts}]


def largest_picture(width: int, height: int) -> tuple[str, ...]:
    """Flags of an engine that is to take no larger picture, and no video.

    The host's encoder cache then has room for one such picture: an engine that works on several
    needs their items again and again.
    """
    size = {"shortest_edge": 1024, "longest_edge": width * height}
    return (
        f"--mm-processor-kwargs={json.dumps({'size': size})}",
        f"--limit-mm-per-prompt={json.dumps({'image': 8, 'video': 0})}",
    )
