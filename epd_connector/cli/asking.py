# SPDX-License-Identifier: Apache-2.0
"""Options of commands that ask a live engine something."""

from __future__ import annotations

import argparse

from epd_connector.config import read_key_file

DEFAULT_TIMEOUT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which engine is asked, and how."""
    parser.add_argument("address", metavar="HOST:PORT", help="the engine's control address")
    parser.add_argument(
        "--auth-key-file", metavar="FILE", help="file with the engines' auth_key, if they have one"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="how long to wait for an answer (%(default)s)",
    )


def key_of(args: argparse.Namespace) -> bytes | None:
    """The key in the file that was named, if one was. Raises ConfigError."""
    if args.auth_key_file is None:
        return None
    return read_key_file("--auth-key-file", args.auth_key_file)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 600")
    return seconds
