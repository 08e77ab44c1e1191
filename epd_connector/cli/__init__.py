# SPDX-License-Identifier: Apache-2.0
"""The `epd` command: one module per subcommand, imported only when it is asked for.

Each has `add_arguments(parser)` and `run(args) -> int`, the exit code.
"""
