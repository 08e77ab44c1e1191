# SPDX-License-Identifier: Apache-2.0
"""The adapter to vLLM; the only package that names it."""
