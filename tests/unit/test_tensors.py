# SPDX-License-Identifier: Apache-2.0
"""Rows of the engine into a slab, and rows of a slab into tensors of the engine, on the CPU."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from epd_connector.memory.tensors import Publisher, SlabMemory, TensorRows

NBYTES = 1 << 16
OFFSET = 512
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def slab() -> Iterator[SlabMemory]:
    slab = SlabMemory.on_host(NBYTES, shared=False, pin=False, owner_tag="test slab")
    yield slab
    slab.close()


def stage(slab: SlabMemory, tensor: torch.Tensor, offset: int = OFFSET) -> None:
    rows = TensorRows(slab)
    rows.stage(rows.hold(tensor), offset, tensor.numel() * tensor.dtype.itemsize)
    assert len(rows) == 0


def publish(slab: SlabMemory, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    reads: list[Callable[[], None]] = []
    publisher = Publisher(slab, torch.device("cpu"))
    name = str(dtype).removeprefix("torch.")
    published = publisher.publish(OFFSET, rows, width, name, reads.append)
    (read,) = reads
    read()
    return published


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_are_staged_and_published_bit_for_bit(
    slab: SlabMemory, dtype: torch.dtype, rows: int
) -> None:
    tensor = torch.randn(rows, 24).to(dtype)
    stage(slab, tensor)
    published = publish(slab, rows, 24, dtype)
    assert published.dtype == dtype
    assert published.shape == (rows, 24)
    assert torch.equal(published.view(torch.uint8), tensor.view(torch.uint8))


def test_bits_that_are_no_numbers_travel_too(slab: SlabMemory) -> None:
    bits = torch.randint(0, 256, (4, 64), dtype=torch.uint8)
    stage(slab, bits.view(torch.bfloat16))
    assert torch.equal(publish(slab, 4, 32, torch.bfloat16).view(torch.uint8), bits)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2],
        lambda t: t[:, 3:11],
        lambda t: t[:1].expand(5, -1),
        lambda t: t.flip(0).requires_grad_(),
    ],
    ids=["transposed", "strided", "part of each row", "expanded", "with a gradient"],
)
def test_rows_that_do_not_lie_in_one_piece_are_staged_right(
    slab: SlabMemory, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = view(torch.randn(8, 16))
    rows, width = tensor.shape
    stage(slab, tensor)
    assert torch.equal(publish(slab, rows, width, torch.float32), tensor)


def test_a_published_tensor_is_a_copy(slab: SlabMemory) -> None:
    tensor = torch.randn(3, 8)
    stage(slab, tensor)
    published = publish(slab, 3, 8, torch.float32)
    slab.tensor.zero_()
    assert torch.equal(published, tensor)


def test_staging_touches_nothing_but_its_bytes(slab: SlabMemory) -> None:
    slab.tensor.fill_(7)
    stage(slab, torch.zeros(2, 8))
    assert slab.tensor.eq(0).sum() == 64
    assert slab.tensor[:OFFSET].eq(7).all()
    assert slab.tensor[OFFSET + 64 :].eq(7).all()


def test_rows_of_another_size_are_not_staged(slab: SlabMemory) -> None:
    rows = TensorRows(slab)
    token = rows.hold(torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"2 x 8 of torch\.float32 are not 65 bytes"):
        rows.stage(token, OFFSET, 65)
    assert len(rows) == 0


def test_a_tensor_is_kept_until_it_is_staged_or_dropped(slab: SlabMemory) -> None:
    rows = TensorRows(slab)
    tensors = [torch.zeros(2, 8), torch.zeros(2, 8)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    tokens = [rows.hold(tensor) for tensor in tensors]
    tensors.clear()
    gc.collect()
    assert all(ref() is not None for ref in alive)
    rows.stage(tokens[0], OFFSET, 64)
    rows.drop(tokens[1])
    rows.drop(tokens[1])
    gc.collect()
    assert all(ref() is None for ref in alive)
    with pytest.raises(KeyError):
        rows.stage(tokens[0], OFFSET, 64)


def test_a_slab_is_registered_by_its_bytes_and_closed_once() -> None:
    slab = SlabMemory.on_host(NBYTES, shared=True, pin=False, owner_tag="test slab")
    assert (slab.nbytes, slab.address) == (NBYTES, slab.tensor.data_ptr())
    assert slab.path is not None
    slab.close()
    slab.close()
    assert slab.tensor.numel() == 0
