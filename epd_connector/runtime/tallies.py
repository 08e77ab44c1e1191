# SPDX-License-Identifier: Apache-2.0
"""What a whole engine has counted: since its start, and since it was last asked.

Owns the two sums that its head keeps for itself and its ranks. Does not own what is counted
(``stats``), or how it travels. Not locked: its head holds its own lock around it.
"""

from epd_connector.stats import Counters


class Tallies:
    """``totals``: since the start. ``news``: whether ``take`` may have something to give."""

    def __init__(self) -> None:
        self.totals = Counters()
        self.news = False
        self._interval = Counters()

    def count(self, counted: Counters) -> None:
        """Adds what some part of the engine has counted."""
        self.news = True
        self.totals.merge(counted)
        self._interval.merge(counted)

    def take(self) -> Counters:
        """What was counted since the last call."""
        self.news = False
        return self._interval.take()
