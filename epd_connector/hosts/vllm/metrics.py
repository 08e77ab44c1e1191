# SPDX-License-Identifier: Apache-2.0
"""The connector's counters in the host's terms: its statistics and its Prometheus metrics.

Owns their names towards the host (``vllm:epd_<counter>``). Does not own what is counted
(``epd_connector.stats``).
"""

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import (
    ECConnectorPromMetrics,
    ECConnectorStats,
)

from epd_connector.stats import COUNTS, Counters

_DURATION = "encoded_to_landed_s"
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class EPDStats(ECConnectorStats):
    """Counts of one interval: ``data`` maps counter names to counts, and durations to a list."""

    @classmethod
    def of(cls, counters: Counters) -> "EPDStats":
        """The statistics of what ``counters`` counted."""
        data: dict[str, Any] = {name: n for name, n in counters.counts().items() if n}
        if counters.encoded_to_landed_s:
            data[_DURATION] = list(counters.encoded_to_landed_s)
        return cls(data=data)

    def reset(self) -> None:
        """Starts a new interval."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        """Adds another interval to this one."""
        mine = Counters.from_peer(self._counts(), self.data.get(_DURATION, ()))
        mine.merge(Counters.from_peer(_counts(other.data), other.data.get(_DURATION, ())))
        self.data = EPDStats.of(mine).data
        return self

    def reduce(self) -> dict[str, int | float]:
        """One number per name, for the log."""
        counters = Counters.from_peer(self._counts(), self.data.get(_DURATION, ()))
        return {name: value for name, value in counters.snapshot().items() if value}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data

    def _counts(self) -> dict[str, float]:
        return _counts(self.data)


class EPDPromMetrics(ECConnectorPromMetrics):
    """One Prometheus counter per counter, and a histogram of encoded-to-landed seconds."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, values: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, values)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:epd_{name}",
                documentation=f"EPD connector: {name.replace('_', ' ')}.",
                labelnames=labelnames,
            )
            for name in COUNTS
        }
        self._histogram = self._histogram_cls(
            name="vllm:epd_encoded_to_landed_seconds",
            documentation="EPD connector: from the tower's output to landed on every rank.",
            buckets=_BUCKETS,
            labelnames=labelnames,
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval of engine ``engine_idx``."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in _counts(transfer_stats_data).items():
            self._counters[name].labels(*labels).inc(count)
        for seconds in transfer_stats_data.get(_DURATION, ()):
            self._histogram.labels(*labels).observe(seconds)


def _counts(data: dict[str, Any]) -> dict[str, float]:
    return {name: data[name] for name in COUNTS if name in data}
