# SPDX-License-Identifier: Apache-2.0
"""`epd fence`: somebody who knows tells a prefill engine that a host is dead.

Owns the options and the warning. Does not own what follows (``core.receive``).
"""

from __future__ import annotations

import argparse

from epd_connector.cli import asking

_MEANING = (
    "The prefill engine keeps memory for writers that are silent for as long as they might "
    "write again. Of a host that vanished, and at whose address nobody answers, only you can "
    "know that it never will: switched off, deleted, or cut off for good. That memory is then "
    "free again after the transport's fence. If HOST is alive after all, what it still writes "
    "lands in memory of other requests."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `epd fence`."""
    parser.description = _MEANING
    asking.add_arguments(parser)
    parser.add_argument(
        "--dead",
        required=True,
        metavar="HOST",
        help="the host as the prefill engine knows it (`epd inspect` shows encode ranks as"
        " tcp://HOST:PORT)",
    )


def run(args: argparse.Namespace) -> int:
    """Tell, print. Raises LinkError where nobody confirms it."""
    from epd_connector.runtime.report import declare_dead

    declare_dead(args.address, args.dead, args.timeout, asking.key_of(args))
    print(
        f"{args.address} has told its ranks that {args.dead} is dead: what was kept for writers"
        f" there is free after the fence (see `epd inspect {args.address}`)"
    )
    return 0
