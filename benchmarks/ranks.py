# SPDX-License-Identifier: Apache-2.0
"""How long one item takes from the encode rank until all prefill ranks have published it.

    python -m benchmarks.ranks [--ranks 1 2 4] [--sizes 0.26 4.2 16.8 67.1] [--json FILE] ...

Measured is, for this connector (`epd`), for the host's own ECMooncakeConnector (`in-tree`)
and for its ECExampleConnector (`example`), on one machine and without models:

    from   the moment before the encode worker's `save_caches` is called with the rows,
    to     the moment at which the last of the prefill workers has them as a tensor in its
           encoder cache, that is, has returned from `start_load_caches`.

Each worker is a process of its own, the prefill ranks are joined in the host's tensor-parallel
group, and the prefill scheduler is one more process: it notices that the item is there, and
has its ranks load it by a word over a pipe, as in a step. Both engines have announced the item
beforehand, as they do while the tower runs, so claims, grants and reservations are not part of
the time. `ready` is the part of it until the prefill scheduler knows; `sent` is bytes of rows
that the encode rank has sent over the items' bytes.

The same for both connectors: processes, group, item, order, clock, and how often the scheduler
looks. What differs:

- in-tree runs without its scheduler part. Its events are read directly, every 0.1 ms, while
  its scheduler reads them every 5 ms at most: its times are better than an engine's.
- in-tree publishes a view of the receive pool. This connector publishes a copy, in memory of
  its own (docs/architecture.md says why); the copy is part of its time.
- this connector runs with its heads, and its `sent` is the transport's own count. in-tree's is
  counted where it calls Mooncake.
- in-tree has Mooncake alone, and sends whole items to every rank.
- example goes through files in the directory for temporary files.

Beside them, what none can beat: Mooncake's write of the same bytes, alone (`raw`), and one
memory copy of them (`copy`).

Configurations take turns item by item, in an order that is shuffled in every round, so that
whatever else the machine does hits all of them alike. Those whose turn it is not are held
(SIGSTOP). Warm-up rounds check every published byte.
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.baselines import BASELINES, Baseline
from benchmarks.deployment import Deployment, Timing
from benchmarks.figures import Figure, median, percentile, table, write_json
from benchmarks.items import SIZES, Item
from benchmarks.processes import Processes
from benchmarks.sides import Setup
from epd_connector.testing.ports import Ports

CONNECTORS = ("epd", "in-tree", "example", "raw", "copy")
TRANSPORTS = ("shm", "mooncake")
LAYOUTS = ("whole", "shards", "shared")
RANKS = (1, 2, 4)
_SPARE_NBYTES = 1 << 25
_PROCESS_NBYTES = 90_000_000
_OTHER_PORTS = 3
"""An encode engine has a head and a rank, a prefill engine a head besides its ranks."""


@dataclass
class Cell:
    """One configuration and size, and what was measured of it."""

    deployment: Deployment | Baseline
    megabytes: str
    timings: list[Timing] = field(default_factory=list)
    sent_share: float = 0.0

    def figure(self) -> Figure:
        """What it comes to."""
        setup = self.deployment.setup
        published = [timing.published_ms for timing in self.timings]
        return Figure(
            connector=setup.connector,
            transport=setup.transport,
            layout=setup.layout,
            ranks=setup.ranks,
            megabytes=self.megabytes,
            nbytes=SIZES[self.megabytes],
            rounds=len(published),
            median_ms=median(published),
            p90_ms=percentile(published, 0.9),
            ready_median_ms=median([timing.ready_ms for timing in self.timings]),
            sent_share=self.sent_share,
            published_ms=tuple(published),
        )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks",
        description="Time from save_caches until all prefill ranks have published an item.",
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, metavar="P")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=tuple(SIZES))
    parser.add_argument("--connector", nargs="+", choices=CONNECTORS, default=CONNECTORS)
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=9, help="that count (default 9)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.warmup < 0 or min(options.ranks) < 1:
        parser.error("--rounds and --ranks must be at least 1, --warmup at least 0")
    return options


def configurations(options: argparse.Namespace) -> list[tuple[str, str, str, int]]:
    """Connector, transport, layout and ranks of every configuration that was asked for.

    One rank receives whole items, whatever the layout; the host's connector knows no other.
    """
    chosen = []
    for ranks in options.ranks:
        layouts = options.layout if ranks > 1 else ["whole"]
        if "epd" in options.connector:
            chosen += [("epd", t, layout, ranks) for t in options.transport for layout in layouts]
        if "in-tree" in options.connector and "mooncake" in options.transport:
            chosen.append(("in-tree", "mooncake", "whole", ranks))
        if "example" in options.connector:
            chosen.append(("example", "files", "whole", ranks))
    bare = [name for name, transport in BASELINES.items() if transport in options.transport]
    chosen += [(n, BASELINES[n], "whole", 1) for n in bare if n in options.connector]
    return chosen


def check_memory(options: argparse.Namespace) -> None:
    """Raises SystemExit where the configurations would not fit this machine together."""
    item_nbytes = max(SIZES[size] for size in options.sizes)
    needed = 0
    for _, _, layout, ranks in configurations(options):
        slabs = 1 + (1 if layout == "shared" else ranks)
        needed += (2 + ranks) * _PROCESS_NBYTES + slabs * (item_nbytes + _SPARE_NBYTES)
        needed += 2 * item_nbytes
    # One configuration is measured at a time: its ranks publish, and check what they did.
    needed += 3 * max(options.ranks) * item_nbytes
    available = _available_nbytes()
    if needed > available:
        raise SystemExit(
            f"the configurations need about {needed / 1e9:.1f} GB together, and "
            f"{available / 1e9:.1f} GB are available: measure fewer of them, or smaller items, "
            "at a time (--ranks, --sizes, --layout, --transport)"
        )


def _available_nbytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise RuntimeError("/proc/meminfo does not say how much memory is available")


def deploy(
    options: argparse.Namespace,
    processes: Processes,
    scratch: str,
    deployments: list[Deployment | Baseline],
) -> None:
    """Brings all configurations up; whatever happens, those that began to are in the list."""
    slab_nbytes = max(SIZES[size] for size in options.sizes) + _SPARE_NBYTES
    for connector, transport, layout, ranks in configurations(options):
        key = f"{connector}-{transport}-{layout}-{ranks}-{os.getpid()}"
        ports = Ports(ranks + _OTHER_PORTS)
        setup = Setup(
            connector, transport, layout, ranks, slab_nbytes, key, f"{scratch}/{key}", ports.first
        )
        kind = Baseline if connector in BASELINES else Deployment
        deployments.append(kind(setup, processes))
        # One after the other: the ports are bound when the processes are up.
        deployments[-1].wait()
        _say(f"{len(deployments)} up: {key}")


def measure(cells: list[Cell], *, warmup: int, rounds: int) -> None:
    """All rounds, with every cell once per round."""
    number = 0
    for turn in range(warmup + rounds):
        order = list(cells)
        random.Random(turn).shuffle(order)
        for cell in order:
            item = Item(number, SIZES[cell.megabytes])
            number += 1
            timing = cell.deployment.send(item, check=turn < warmup)
            if turn >= warmup:
                cell.timings.append(timing)
        _say(f"round {turn + 1} of {warmup + rounds}" + (" (warm-up)" if turn < warmup else ""))


def run(options: argparse.Namespace) -> list[Cell]:
    """Everything that was asked for, measured. Raises SystemExit where it does not fit."""
    check_memory(options)
    processes = Processes()
    deployments: list[Deployment | Baseline] = []
    try:
        with tempfile.TemporaryDirectory(prefix="epd-benchmark-") as scratch:
            deploy(options, processes, scratch, deployments)
            cells = [Cell(d, size) for d in deployments for size in options.sizes]
            measure(cells, warmup=options.warmup, rounds=options.rounds)
            shares = {id(d): d.sent_share() for d in deployments}
    finally:
        processes.close()
        for deployment in deployments:
            deployment.sweep()
    for cell in cells:
        cell.sent_share = shares[id(cell.deployment)]
    return cells


def main(arguments: Sequence[str]) -> int:
    """Runs the command; its exit code."""
    options = parse(arguments)
    figures = [cell.figure() for cell in run(options)]
    print(table(figures))
    if options.json is not None:
        conditions = {"cpus": os.cpu_count(), "rounds": options.rounds, "warmup": options.warmup}
        write_json(options.json, figures, conditions)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
