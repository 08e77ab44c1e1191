# SPDX-License-Identifier: Apache-2.0
"""The `epd` command line: finds the subcommand and runs it.

Owns: the list of subcommands, and how an error ends the process. Does not own:
what a subcommand does, nor its options. Importing this module, and `epd --help`,
import no subcommand, so neither the host nor torch nor sockets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from epd_connector import __version__
from epd_connector.errors import EPDError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130

COMMANDS = {
    "bench": "measure this connector and the alternatives on this machine, from a checkout",
    "demo": "start two engines here and send a picture from one to the other",
    "doctor": "check whether this machine can run an engine with a configuration",
    "fence": "tell a prefill engine that a host is dead and will never write again",
    "inspect": "show what a live engine is doing: peers, rooms, memory, counters, failures",
}
"""Subcommands, each the module of its name in this package, and what it is for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's) and return the exit code.

    0: done; 1: an error, said on stderr; 2: wrong usage, as SystemExit; 130: interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser(arguments).parse_args(arguments)
    command = import_module(f"{__package__}.{args.command}")
    try:
        code: int = command.run(args)
    except EPDError as error:
        print(f"epd {args.command}: {error}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="epd", description="Encode/prefill disaggregation for vLLM.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"epd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        # Options come from the module of the command that was asked for, and from no other.
        if name in arguments[:1]:
            import_module(f"{__package__}.{name}").add_arguments(command)
    return parser
