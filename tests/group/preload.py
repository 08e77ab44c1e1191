# SPDX-License-Identifier: Apache-2.0
"""Imported once, by the process that children are forked from: what they would all import.

Starts no thread. The host's configuration class imports most of it when it is made.
"""

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform

import tests.group.encode_side
import tests.group.rank_side  # noqa: F401

torch.set_num_threads(1)
# Without it the host's group has no shared memory to gather through.
current_platform.import_kernels()
VllmConfig()
