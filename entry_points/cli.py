# SPDX-License-Identifier: Apache-2.0
"""The door of the `epd` command. Commands and their options belong to `epd_connector.cli`."""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. `argv`: without the program's name."""
    from epd_connector.cli.main import main as run

    return run(argv)
