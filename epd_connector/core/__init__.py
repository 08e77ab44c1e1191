# SPDX-License-Identifier: Apache-2.0
"""The state machines. They decide; ``runtime`` acts.

A machine has one method that changes it: ``handle(event, now) -> effects``. It owns no
clock, socket, lock, thread or tensor. What peers send it can never make it raise.
"""
