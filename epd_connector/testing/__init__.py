# SPDX-License-Identifier: Apache-2.0
"""Fakes and fixtures that pass the same contract tests as the real thing."""
