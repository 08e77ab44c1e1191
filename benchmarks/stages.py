# SPDX-License-Identifier: Apache-2.0
"""Where the time of one item goes: a clock at every door between threads and processes.

    python -m benchmarks.stages [--transport mooncake] [--size 0.26] [--rounds 30]

Drives one item after the other through the connector as `benchmarks.ranks` does, with one
prefill rank, and notes when each stage was reached: the rows are handed over, the loop has
them, the write is ordered and has ended, the answer was sent, was heard by the prefill rank
and by its head, and was seen by the scheduler. Prints the median time from each to the next.
The clock is one for all processes of a host. Owns the doors and the table; not the processes.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from benchmarks import ours
from benchmarks.deployment import Deployment
from benchmarks.figures import median
from benchmarks.items import SIZES, Item
from benchmarks.processes import Processes
from benchmarks.sides import Setup
from epd_connector.core.send_events import Encoded
from epd_connector.hosts.vllm.rank import RankAdapter
from epd_connector.protocol.frames import Landed, RoomLanded
from epd_connector.runtime.rank import RankRuntime
from epd_connector.runtime.switchboard import Switchboard
from epd_connector.runtime.writes import Writes
from epd_connector.testing.ports import Ports
from epd_connector.transport.ledger import WriteLedger
from epd_connector.transport.workers import Workers

STAGES = (
    "handed over",
    "loop has the rows",
    "write ordered",
    "write queued",
    "write ended",
    "end seen",
    "answer sent",
    "rank heard",
    "rank told head",
    "head heard",
    "scheduler saw",
)
SPARE_NBYTES = 1 << 25
FRAMES: dict[type, tuple[str, str]] = {
    Landed: ("answer sent", "rank heard"),
    RoomLanded: ("rank told head", "head heard"),
}
"""Frames, and the stages at which they are sent and read."""

Passed = list[tuple[str, int]]
"""Stages in the order in which one process reached them, and nanoseconds of its clock."""


class Doors:
    """Notes when the methods of this process that begin a stage are called or return."""

    def __init__(self) -> None:
        self.passed: Passed = []

    def open(self) -> None:
        """Watches every door of this process, whichever it uses."""
        self._before(RankAdapter, "save_caches", lambda *_: "handed over")
        self._before(RankRuntime, "on_post", _if_rows)
        self._before(Writes, "start", lambda *_: "write ordered")
        self._after(Workers, "submit", lambda *_: "write queued")
        self._before(WriteLedger, "finish", lambda *_: "write ended")
        self._after(Writes, "ended", lambda found, *_: "end seen" if found else None)
        self._before(Switchboard, "reply", _sent)
        self._after(Switchboard, "read", lambda envelope, *_: _heard(envelope))

    def note(self, stage: str | None) -> None:
        """``stage`` is reached now."""
        if stage is not None:
            self.passed.append((stage, time.monotonic_ns()))

    def _before(self, owner: type, name: str, stage: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def method(*args: Any, **keys: Any) -> Any:
            self.note(stage(*args))
            return original(*args, **keys)

        setattr(owner, name, method)

    def _after(self, owner: type, name: str, stage: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def method(*args: Any, **keys: Any) -> Any:
            found = original(*args, **keys)
            self.note(stage(found, *args))
            return found

        setattr(owner, name, method)

    def write(self, setup: Setup, who: str) -> None:
        """Leaves what was noted in ``scratch``."""
        (Path(setup.scratch) / f"{who}.json").write_text(json.dumps(self.passed))


def _if_rows(_: object, post: object, *__: object) -> str | None:
    return "loop has the rows" if isinstance(post, Encoded) else None


def _sent(_: object, __: object, ___: object, frame: object) -> str | None:
    stages = FRAMES.get(type(frame))
    return stages[0] if stages else None


def _heard(envelope: Any) -> str | None:
    stages = FRAMES.get(type(envelope.frame)) if envelope is not None else None
    return stages[1] if stages else None


class Encoder(ours.Encoder):
    """An encode engine with clocks at its doors."""

    def __init__(self, setup: Setup) -> None:
        self._doors, self._setup = Doors(), setup
        self._doors.open()
        super().__init__(setup)

    def close(self) -> None:
        super().close()
        self._doors.write(self._setup, "encode")


class Head(ours.Head):
    """A prefill head with a clock at its door, and at the scheduler's."""

    def __init__(self, setup: Setup) -> None:
        self._doors, self._setup = Doors(), setup
        self._doors.open()
        super().__init__(setup)

    def ready(self) -> Any:
        found = super().ready()
        self._doors.note("scheduler saw" if found is not None else None)
        return found

    def close(self) -> None:
        super().close()
        self._doors.write(self._setup, "head")


class Rank(ours.Rank):
    """A prefill rank with clocks at its doors."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self._doors, self._setup = Doors(), setup
        self._doors.open()
        super().__init__(setup, rank)

    def close(self) -> None:
        super().close()
        self._doors.write(self._setup, "rank")


def measure(transport: str, size: str, rounds: int) -> list[Passed]:
    """What was passed on the way of each of ``rounds`` items, in order of time."""
    processes = Processes()
    with tempfile.TemporaryDirectory(prefix="epd-stages-") as scratch:
        slab_nbytes = SIZES[size] + SPARE_NBYTES
        setup = Setup(
            "stages", transport, "whole", 1, slab_nbytes, "stages", f"{scratch}/one", Ports(4).first
        )
        deployment = Deployment(setup, processes)
        try:
            deployment.wait()
            for number in range(rounds):
                deployment.send(Item(number, SIZES[size]), check=False)
        finally:
            processes.close()
            deployment.sweep()
        found: Passed = []
        for path in Path(setup.scratch).glob("*.json"):
            found += [(stage, when) for stage, when in json.loads(path.read_text())]
    return _by_item(sorted(found, key=lambda passed: passed[1]))


def _by_item(found: Passed) -> list[Passed]:
    items: list[Passed] = []
    for stage, when in found:
        if stage == STAGES[0]:
            items.append([])
        if items:
            items[-1].append((stage, when))
    return items


def between(items: Sequence[Passed]) -> dict[str, float]:
    """Median microseconds that pass before each stage, since the one before it."""
    taken: dict[str, list[float]] = {}
    for item in items:
        before = item[0][1]
        for stage in STAGES[1:]:
            when = next((when for name, when in item if name == stage and when >= before), None)
            if when is not None:
                taken.setdefault(stage, []).append((when - before) / 1e3)
                before = when
    return {stage: median(values) for stage, values in taken.items()}


def main(arguments: Sequence[str]) -> int:
    """Runs the command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages")
    parser.add_argument("--transport", choices=ours.TRANSPORTS, default="mooncake")
    parser.add_argument("--size", choices=tuple(SIZES), default="0.26")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)
    found = between(measure(options.transport, options.size, options.rounds))
    for stage, micros in found.items():
        print(f"{stage:<20}{micros:>10.0f} us")
    print(f"{'in all':<20}{sum(found.values()):>10.0f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
