# SPDX-License-Identifier: Apache-2.0
"""Large pages are advice: given for large memory only, and never an error."""

import mmap
from pathlib import Path

import torch

from epd_connector.memory.pages import LARGE_NBYTES, advise_large_pages
from epd_connector.memory.tensors import Publisher, SlabMemory

ROWS, WIDTH = 4096, 2048
_ADVISED = "hg"


def advised(address: int) -> bool:
    """Whether the kernel was asked for large pages at ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span, _, rest = line.partition(" ")
        if "-" in span and not span.endswith(":"):
            low, high = (int(end, 16) for end in span.split("-"))
            inside = low <= address < high
        elif inside and line.startswith("VmFlags:"):
            return _ADVISED in rest.split()
    return False


def test_small_memory_is_left_alone() -> None:
    with mmap.mmap(-1, LARGE_NBYTES) as memory:
        assert len(memory) == LARGE_NBYTES
        assert not advise_large_pages(1 << 40, LARGE_NBYTES - 1)


def test_memory_that_is_not_there_is_no_error() -> None:
    assert not advise_large_pages(1 << 46, 4 * LARGE_NBYTES)


def test_large_items_are_published_into_large_pages() -> None:
    slab = SlabMemory.on_host(1 << 24, shared=False, pin=False, owner_tag="test")
    slab.tensor.copy_(torch.randint(0, 255, (1 << 24,), dtype=torch.uint8))
    publisher = Publisher(slab, torch.device("cpu"))
    published = publisher.publish(0, ROWS, WIDTH, "bfloat16", lambda wait: wait())
    middle = published.data_ptr() + published.numel()
    assert advised(middle) == Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    assert torch.equal(published.view(torch.uint8).flatten(), slab.tensor)
    slab.close()
