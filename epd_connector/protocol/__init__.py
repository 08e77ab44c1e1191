# SPDX-License-Identifier: Apache-2.0
"""What travels between heads and ranks: typed frames and their codec. No I/O."""
