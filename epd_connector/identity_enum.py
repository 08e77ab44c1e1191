# SPDX-License-Identifier: Apache-2.0
"""Enums for tables that are looked up many times per frame.

Owns one thing: that looking a member up runs no Python code.
"""

import enum


class IdentityEnum(enum.Enum):
    """An enum whose members are hashed by identity. The standard library's hash of a member is a
    Python function over its name; members are the only ones of their kind, so both are right."""

    __hash__ = object.__hash__
