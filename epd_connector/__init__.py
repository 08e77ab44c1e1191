# SPDX-License-Identifier: Apache-2.0
"""Encode/prefill disaggregation for vLLM. Importing the package costs nothing.

The parts are described in `docs/architecture.md`; the ways in lie in `entry_points/`.
"""

__version__ = "0.1.0"
