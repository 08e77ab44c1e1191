# SPDX-License-Identifier: Apache-2.0
"""Drives the machines with real sockets, clocks and transports."""
