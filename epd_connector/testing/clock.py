# SPDX-License-Identifier: Apache-2.0
"""A clock that stands still until it is told to move."""


class ManualClock:
    """Monotonic seconds for tests and simulations; only :meth:`advance` moves them."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move on by ``seconds``. Raises ValueError if that would go backwards."""
        if not seconds >= 0:
            raise ValueError(f"a monotonic clock cannot advance by {seconds} s")
        self._now_s += seconds
