# SPDX-License-Identifier: Apache-2.0
"""Transports: how bytes get from one engine's slab into another's. Found by name in `registry`."""
