# SPDX-License-Identifier: Apache-2.0
"""Whole fleets of sans-IO machines, run against each other in one process from one seed.

Nothing here sleeps: time is virtual, the network, the transport and the hosts are in memory and
as bad as the seed says. The machines are the real ones; only ``mutants`` breaks them.
"""
