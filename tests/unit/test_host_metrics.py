# SPDX-License-Identifier: Apache-2.0
"""Counters in the host's terms: statistics that add up, and Prometheus metrics."""

from dataclasses import dataclass
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from epd_connector.hosts.vllm.metrics import EPDPromMetrics, EPDStats
from epd_connector.stats import COUNTS, Counters


@dataclass
class Host:
    """What the host's base class reads of its configuration."""

    ec_transfer_config: str = "there is one"


def counted(items: int, *durations: float) -> Counters:
    counters = Counters()
    counters.add("items_landed", items)
    for seconds in durations:
        counters.add_duration(seconds)
    return counters


def test_statistics_hold_what_was_counted_only() -> None:
    assert EPDStats.of(counted(2, 0.5)).data == {
        "items_landed": 2,
        "encoded_to_landed_s": [0.5],
    }
    assert EPDStats.of(Counters()).is_empty()


def test_intervals_add_up() -> None:
    stats = EPDStats.of(counted(2, 0.5))
    assert stats.aggregate(EPDStats.of(counted(3, 0.25))) is stats
    assert stats.data == {"items_landed": 5, "encoded_to_landed_s": [0.5, 0.25]}
    assert stats.aggregate(EPDStats.of(Counters())).data["items_landed"] == 5
    stats.reset()
    assert stats.is_empty()


def test_the_log_gets_one_number_per_name() -> None:
    reduced = EPDStats.of(counted(2, 0.5, 0.25)).reduce()
    assert reduced["items_landed"] == 2
    assert reduced["encoded_to_landed_s_count"] == 2
    assert all(isinstance(value, int | float) for value in reduced.values())
    assert EPDStats.of(Counters()).reduce() == {}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def prometheus(registry: CollectorRegistry) -> EPDPromMetrics:
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    return EPDPromMetrics(Host(), types, ["engine"], {0: ["zero"], 1: ["one"]})


def sample(registry: CollectorRegistry, name: str, engine: str) -> float | None:
    samples: list[Sample] = [s for metric in registry.collect() for s in metric.samples]
    found = [s.value for s in samples if s.name == name and s.labels == {"engine": engine}]
    return found[0] if found else None


def test_prometheus_counts_per_engine_and_never_backwards(registry: CollectorRegistry) -> None:
    metrics = prometheus(registry)
    metrics.observe(EPDStats.of(counted(2, 0.5)).data)
    metrics.observe(EPDStats.of(counted(1, 0.25)).data, engine_idx=0)
    metrics.observe(EPDStats.of(counted(7)).data, engine_idx=1)
    assert sample(registry, "vllm:epd_items_landed_total", "zero") == 3
    assert sample(registry, "vllm:epd_items_landed_total", "one") == 7
    assert sample(registry, "vllm:epd_encoded_to_landed_seconds_count", "zero") == 2
    assert sample(registry, "vllm:epd_encoded_to_landed_seconds_sum", "zero") == 0.75


def test_every_counter_has_a_metric_and_what_is_unknown_is_ignored(
    registry: CollectorRegistry,
) -> None:
    metrics = prometheus(registry)
    metrics.observe({**dict.fromkeys(COUNTS, 1), "of a newer version": 5})
    for name in COUNTS:
        assert sample(registry, f"vllm:epd_{name}_total", "zero") == 1
