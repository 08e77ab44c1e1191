# SPDX-License-Identifier: Apache-2.0
"""What the connector costs the scheduler's thread, per call and per step.

    .venv/bin/python -m benchmarks.scheduler

A prefill head as an engine makes it, with its loop, sockets and lock, whose requests wait for
an encode engine that never answers. Each has one picture. Measured are the three hooks that
the scheduler calls in its every step, with 1, 100 and 1,000 requests that wait, and with as
many that only decode.
"""

import argparse
import gc
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import RequestStatus

from benchmarks.ours import host_config
from benchmarks.results import Goal, Measured, Series
from benchmarks.sides import Setup
from epd_connector.hosts.vllm.head import HeadAdapter
from epd_connector.hosts.vllm.setup import make_head, read_config
from epd_connector.testing.ports import Ports

REQUESTS = (1, 100, 1000)
STEPS = 400
ROWS = 64
WAITING, DECODING = "ensure_cache_available, waiting", "ensure_cache_available, decoding"
GOALS = {WAITING: 10.0, DECODING: 1.0}
"""Microseconds per call. A request that decodes costs no more than the call itself."""
_NEVER_S = 600.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds: the median over all steps, and what one step in a hundred exceeds."""

    what: str
    requests: int
    median_us: float
    p99_us: float


class _Media:
    """Requests bring metadata only, so every item must be received."""

    def encodable(self, feature: object) -> bool:
        """See ``media.MediaFields``."""
        return False


@dataclass
class _Request:
    """What the connector reads of the host's request."""

    request_id: str
    mm_features: list[MultiModalFeatureSpec]
    ec_transfer_params: object
    status: RequestStatus = RequestStatus.WAITING


@contextmanager
def adapter(silent: str) -> Iterator[HeadAdapter]:
    """A prefill engine's scheduler part, up; it waits for ever for ``silent``."""
    setup = Setup("epd", "shm", "whole", 1, 1 << 30, "scheduler", "", Ports(4).first)
    host = host_config(setup, "ec_consumer")
    extra = host.ec_transfer_config.ec_connector_extra_config
    extra.update(resolve_timeout_s=_NEVER_S, receive_timeout_s=_NEVER_S)
    config = read_config(host)
    runtime = make_head(config, host)
    runtime.start()
    made = HeadAdapter(config, runtime, _Media(), silent)  # type: ignore[arg-type]
    with closing(made):
        yield made


def requests(count: int, encode: str) -> list[_Request]:
    """``count`` requests, each with one picture that nobody else has."""
    found = []
    for number in range(count):
        place = PlaceholderRange(offset=4, length=ROWS)
        feature = MultiModalFeatureSpec(None, "image", f"hash-{count}-{number}", place)
        ticket = {"room": f"{count * 100_000 + number + 1:016x}", "encode": encode}
        found.append(_Request(f"r-{count}-{number}", [feature], {"epd": [ticket]}))
    return found


def per_call(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds per call, over all ``calls`` one after the other."""
    begun = time.perf_counter_ns()
    for call in calls:
        call()
    return (time.perf_counter_ns() - begun) / 1e3 / len(calls)


def cost(what: str, count: int, calls: Sequence[Callable[[], object]], steps: int) -> Cost:
    """``calls`` are made in every step; the cost is that of one of them."""
    taken = sorted(per_call(calls) for _ in range(steps))
    return Cost(what, count, statistics.median(taken), taken[int(0.99 * (steps - 1))])


def measure_hooks(head: HeadAdapter, encode: str, count: int, steps: int) -> list[Cost]:
    """The costs with ``count`` requests; they are gone afterwards."""
    waiting = requests(count, encode)
    for request in waiting:
        assert not head.ensure_cache_available(request, 0)
    step = SimpleNamespace(
        free_encoder_mm_hashes=[], preempted_req_ids=None, total_num_scheduled_tokens=1
    )

    def asks(computed: int) -> list[Callable[[], object]]:
        return [partial(head.ensure_cache_available, r, computed) for r in waiting]

    looks = [partial(head.has_cache_item, r.mm_features[0].identifier) for r in waiting]
    builds = [partial(head.build_connector_meta, step)]
    found = [
        cost(WAITING, count, asks(0), steps),
        cost("has_cache_item", count, looks, steps),
        cost("build_connector_meta", count, builds, steps),
    ]
    for request in waiting:
        request.status = RequestStatus.RUNNING
        assert head.ensure_cache_available(request, 4 + ROWS)
    found.append(cost(DECODING, count, asks(4 + ROWS), steps))
    for request in waiting:
        head.request_finished(request)
    return found


def table(costs: Sequence[Cost]) -> str:
    """For people: one line per cost."""
    head = f"{'hook':<36}{'requests':>9}{'median us':>11}{'p99 us':>9}"
    lines = [f"{c.what:<36}{c.requests:>9}{c.median_us:>11.2f}{c.p99_us:>9.2f}" for c in costs]
    return "\n".join([head, *lines])


def run(counts: Sequence[int], steps: int) -> list[Cost]:
    """The costs with each of ``counts`` requests."""
    found = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        encode = f"127.0.0.1:{silent.getsockname()[1]}"
        with adapter(encode) as head:
            gc.collect()
            for count in counts:
                found += measure_hooks(head, encode, count, steps)
    return found


def measure(quick: bool) -> Measured:
    """Section `scheduler`. See ``results``."""
    return compare(run(REQUESTS, STEPS // 4 if quick else STEPS))


def compare(costs: Sequence[Cost]) -> Measured:
    """Series of all ``costs``, and the goals, which hold for the worst number of requests."""
    found = Measured()
    for cost in costs:
        name = f"{cost.what}, {cost.requests} requests"
        found.series.append(Series("scheduler", name, "us", (cost.median_us,)))
        found.series.append(Series("scheduler", f"{name}: p99", "us", (cost.p99_us,)))
    for what, most in GOALS.items():
        worst = max(cost.median_us for cost in costs if cost.what == what)
        found.goals.append(Goal(what, "us", most, worst))
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs the command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS, metavar="N")
    parser.add_argument("--steps", type=int, default=STEPS, help="default %(default)s")
    options = parser.parse_args(arguments)
    print(table(run(options.requests, options.steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
