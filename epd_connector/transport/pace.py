# SPDX-License-Identifier: Apache-2.0
"""How long a write takes at the least, from those before it.

Owns one estimate. Does not own clocks or waiting: a transport that must ask whether a write has
ended asks nobody before it can have.
"""

SURE_SHARE = 0.8
"""Part of the estimate for which nobody asks."""
SHORT_S = 0.0005
"""Seconds that are asked about in any case: writes that short differ by more than that."""
FASTER, SLOWER = 0.7, 1.05
"""What becomes of the estimate when a write was found at the first question, and otherwise."""


class Pace:
    """How fast writes are, so that nobody asks about one that cannot have ended. Thread-safe:
    a number that was overwritten by another thread's is as good."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._s_per_byte = 0.0

    def sure_s(self, nbytes: int) -> float:
        """Seconds in which a write of `nbytes` will not have ended, or 0 for a short one."""
        sure_s = SURE_SHARE * self._s_per_byte * nbytes - SHORT_S
        return min(max(0.0, sure_s), self._longest_s)

    def note(self, nbytes: int, seconds: float, asked: int) -> None:
        """A write was found to have ended when it was asked about for the `asked`-th time: if
        that was the first, it may have ended long before."""
        last = self._s_per_byte
        now = seconds / nbytes * (FASTER if asked == 1 else 1.0)
        self._s_per_byte = min(now, last * SLOWER) if last else now
