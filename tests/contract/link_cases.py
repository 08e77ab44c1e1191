# SPDX-License-Identifier: Apache-2.0
"""How tests of links wait: for frames and conditions, bounded, never for a time to pass."""

import time
from collections.abc import Callable

from epd_connector.link.base import Link, PeerId

PATIENCE_S = 30.0
Frames = list[tuple[PeerId, bytes]]


def gather(link: Link, count: int) -> Frames:
    """The next ``count`` frames or more; fails if they do not come."""
    frames: Frames = []
    deadline = time.monotonic() + PATIENCE_S
    while len(frames) < count:
        assert time.monotonic() < deadline, f"{len(frames)} of {count} frames came"
        frames += link.wait(0.05)
    return frames


def until(link: Link, condition: Callable[[], object]) -> Frames:
    """Keep ``link`` going until ``condition`` holds; returns what it received meanwhile."""
    frames: Frames = []
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        frames += link.wait(0.01)
    return frames
