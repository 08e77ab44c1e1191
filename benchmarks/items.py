# SPDX-License-Identifier: Apache-2.0
"""The items that are measured with, and their content.

Owns what an item is made of, so that its sender and its receivers agree without a word.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WIDTH = 2048
"""Elements per row, of bfloat16."""
ROW_NBYTES = WIDTH * 2
SIZES = {"0.26": 1 << 18, "4.2": 1 << 22, "16.8": 1 << 24, "67.1": 1 << 26}
"""Bytes per item, by their name: millions of bytes, rounded."""


@dataclass(frozen=True, slots=True)
class Item:
    """``rows`` rows of ``WIDTH`` elements. ``number`` is never used twice in a run."""

    number: int
    nbytes: int

    @property
    def hash(self) -> str:
        """The name of the item in the engines' encoder caches."""
        return f"item-{self.number}"

    @property
    def rows(self) -> int:
        """Rows of the item."""
        return self.nbytes // ROW_NBYTES


def content(item: Item) -> "torch.Tensor":
    """``[rows, WIDTH]`` of bfloat16; no two items and no two rows next to each other are alike."""
    import torch

    rows = torch.arange(item.rows, dtype=torch.int16).mul_(31).add_(item.number * 7 % 30000)
    columns = torch.arange(WIDTH, dtype=torch.int16)
    return (rows[:, None] + columns[None, :]).view(torch.bfloat16)


def check(item: Item, published: "torch.Tensor") -> None:
    """Raises ValueError unless ``published`` is the content of ``item``, bit for bit."""
    import torch

    expected = content(item)
    if published.dtype is not expected.dtype or published.shape != expected.shape:
        raise ValueError(
            f"{item.hash} was published as {list(published.shape)} of {published.dtype}, "
            f"not as {list(expected.shape)} of {expected.dtype}"
        )
    if not torch.equal(published.view(torch.int16), expected.view(torch.int16)):
        raise ValueError(f"{item.hash} was published with other bytes than were handed over")
