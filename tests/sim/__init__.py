# SPDX-License-Identifier: Apache-2.0
"""Whole engines of sans-IO machines, run against each other in one process from one seed.

Nothing here sleeps, and no test patches a machine: time is virtual, the network and the
transport are in memory and as bad as the seed says.
"""
