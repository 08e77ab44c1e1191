# SPDX-License-Identifier: Apache-2.0
"""Random rows that two processes can make alike, and what they can compare."""

import hashlib
from dataclasses import dataclass

import torch

from tests.group.host_config import WIDTHS


@dataclass(frozen=True, slots=True)
class Rows:
    """One item's embedding, ``[rows, width of its modality]``; equal ones have equal bytes."""

    hash: str
    rows: int
    modality: str = "image"
    dtype: str = "bfloat16"

    @property
    def width(self) -> int:
        return WIDTHS[self.modality]

    @property
    def nbytes(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.rows * self.width * itemsize

    def tensor(self) -> torch.Tensor:
        """Any bytes, so also those of infinities and of every NaN."""
        seed = int.from_bytes(hashlib.sha256(self.hash.encode()).digest()[:7], "big")
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randint(256, (self.nbytes,), dtype=torch.uint8, generator=generator)
        return raw.view(getattr(torch, self.dtype)).view(self.rows, self.width)


@dataclass(frozen=True, slots=True)
class Print:
    """A tensor's shape, dtype and the digest of its bytes."""

    shape: tuple[int, ...]
    dtype: str
    digest: str


def print_of(tensor: torch.Tensor) -> Print:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Print(tuple(tensor.shape), dtype, hashlib.sha256(raw).hexdigest())
