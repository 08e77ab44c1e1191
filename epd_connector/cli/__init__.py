# SPDX-License-Identifier: Apache-2.0
"""The `epd` command: one module per subcommand."""
