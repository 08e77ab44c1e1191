# SPDX-License-Identifier: Apache-2.0
"""`epd bench`: the benchmark of the checkout that this package is installed from.

Owns finding it. What is measured, and how, is the business of the `benchmarks` folder, which
is no part of an installed package: it needs the host, Mooncake and the development tools.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import epd_connector
from epd_connector.errors import EPDError


class BenchError(EPDError):
    """There is no benchmark to run; the message says what to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `epd bench`."""
    parser.add_argument("--quick", action="store_true", help="fewer rounds and configurations")
    parser.add_argument(
        "--only", nargs="+", metavar="SECTION", help="these sections; default: all of them"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write all figures there; default: benchmarks/results/latest.json of the checkout",
    )


def run(args: argparse.Namespace) -> int:
    """Run the benchmark in an interpreter of its own; its exit code. Raises BenchError."""
    root = Path(epd_connector.__file__).parents[1]
    if not (root / "benchmarks" / "__main__.py").is_file():
        raise BenchError(
            f"there is no benchmarks folder in {root}: run `make bench` in a checkout of this "
            "project, or install the package from one with `pip install -e`"
        )
    command = [sys.executable, "-m", "benchmarks"]
    if args.quick:
        command.append("--quick")
    if args.only:
        command += ["--only", *args.only]
    if args.json is not None:
        command += ["--json", str(args.json.resolve())]
    return subprocess.run(command, cwd=root, check=False).returncode
