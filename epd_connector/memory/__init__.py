# SPDX-License-Identifier: Apache-2.0
"""Memory that outlives a single transfer: real segments and the allocator that divides them."""
