# SPDX-License-Identifier: Apache-2.0
"""Engines as processes that are killed, stopped and cut off: real transports, no models."""
