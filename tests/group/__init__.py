# SPDX-License-Identifier: Apache-2.0
"""Prefill ranks as processes of a real tensor-parallel group, with everything but the models."""
