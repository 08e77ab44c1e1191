# SPDX-License-Identifier: Apache-2.0
"""Sans-IO state machines: `handle(input, now) -> effects`, and nothing else."""
