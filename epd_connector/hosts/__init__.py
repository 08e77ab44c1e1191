# SPDX-License-Identifier: Apache-2.0
"""Adapters to host engines, one package each."""
