# SPDX-License-Identifier: Apache-2.0
"""The doors: one small file per way into the package, each named in `pyproject.toml`.

A door imports what lies behind it only when it is used. It owns no behaviour.
"""
