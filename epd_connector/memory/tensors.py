# SPDX-License-Identifier: Apache-2.0
"""The one place where slabs and tensors meet: staging, publishing, devices and events.

Owns slabs as tensors and the rows that wait to be staged. Everything that differs
between CPU and CUDA is here. Does not own which bytes belong to whom (``slab``) or the
shared-memory files (``segment``).

Hazards on CUDA: a copy is complete when an event recorded after it is, not when the call
returns; memory of the caching allocator may be reused as soon as the last reference is
gone, so references are held until then; host memory that is not pinned makes copies
synchronous and slow; waiting for an event spins on a core unless it is a blocking one.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from epd_connector.errors import TransportError
from epd_connector.memory.pages import advise_large_pages
from epd_connector.memory.segment import Segment


class SlabMemory:
    """The bytes of one slab, on the host or on a CUDA device.

    ``address``, ``nbytes``, ``path``: what transports register. ``tensor``: the same bytes
    as a ``[nbytes]`` uint8 tensor.
    """

    def __init__(self, tensor: torch.Tensor, segment: Segment | None) -> None:
        self.tensor = tensor
        self.address: int = tensor.data_ptr()
        self.nbytes: int = tensor.numel()
        self.path = segment.path if segment is not None else None
        self._segment = segment
        self._pinned = False

    @classmethod
    def on_host(cls, nbytes: int, *, shared: bool, pin: bool, owner_tag: str) -> "SlabMemory":
        """Host memory, every page present; page-locked for CUDA where ``pin``.

        Raises:
            TransportError: no such memory is to be had; names size, key and remedy.

        """
        segment = Segment.create(nbytes, shared=shared, owner_tag=owner_tag)
        return cls._over(segment, pin=pin, owner_tag=owner_tag)

    @classmethod
    def attached(cls, path: str, nbytes: int, *, pin: bool, owner_tag: str) -> "SlabMemory":
        """The shared host memory at ``path``, which another process of this engine has made.

        Raises:
            TransportError: it cannot be mapped, or not be page-locked; with the remedy.

        """
        return cls._over(Segment.attach(path, nbytes), pin=pin, owner_tag=owner_tag)

    @classmethod
    def on_device(cls, nbytes: int, device: torch.device) -> "SlabMemory":
        """Memory of a CUDA device, for transports that write there directly."""
        return cls(torch.empty(nbytes, dtype=torch.uint8, device=device), None)

    def rows(self, offset: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """``[rows, width]`` of ``dtype`` as a view of the bytes from ``offset``."""
        nbytes = rows * width * dtype.itemsize
        return self.tensor[offset : offset + nbytes].view(dtype).view(rows, width)

    def close(self) -> None:
        """Lets go of the memory. Idempotent. Nothing may read or write it any more."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.address)
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    @classmethod
    def _over(cls, segment: Segment, *, pin: bool, owner_tag: str) -> "SlabMemory":
        memory = cls(torch.frombuffer(segment.buffer, dtype=torch.uint8), segment)
        if pin:
            try:
                memory._pin(owner_tag)
            except TransportError:
                memory.close()
                raise
        return memory

    def _pin(self, owner_tag: str) -> None:
        error = torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, 0)
        if error.value != 0:
            raise TransportError(
                f"{owner_tag}: CUDA cannot page-lock {self.nbytes} bytes ({error}): lower "
                "the slab size, or raise the limit of locked memory (ulimit -l)"
            )
        self._pinned = True


@dataclass(slots=True)
class _Held:
    """Rows of the engine and, on CUDA, the event after which they are complete."""

    tensor: torch.Tensor
    ready: torch.cuda.Event | None


class LentRows:
    """The memory of rows that are read where the engine made them. Keeps them alive."""

    path = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.address: int = tensor.data_ptr()
        self.nbytes: int = tensor.numel() * tensor.element_size()


class TensorRows:
    """Rows by token, from the engine's thread to the staging threads. Thread-safe.

    ``lends``: whether rows may be read where they are, as far as they can be.
    """

    def __init__(self, slab: SlabMemory, *, lends: bool = False) -> None:
        self._slab = slab
        self._lends = lends
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._serial = 0
        self._streams = threading.local()

    def hold(self, tensor: torch.Tensor) -> int:
        """Keeps ``tensor`` ``[rows, width]`` until it is staged or dropped; its token.

        On the engine's thread: the device work that makes the rows is queued on the
        current stream, and an event after it is recorded here.
        """
        ready = None
        if tensor.is_cuda:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(tensor.device))
        with self._lock:
            self._serial += 1
            self._held[self._serial] = _Held(tensor, ready)
            return self._serial

    def lendable(self, tensor: torch.Tensor) -> bool:
        """Whether ``lend`` is possible: for rows that lie in one piece in the host's memory, and
        are complete when they are held."""
        return self._lends and tensor.device.type == "cpu" and tensor.is_contiguous()

    def lend(self, token: int) -> LentRows:
        """See ``runtime.staging.RowStore``."""
        with self._lock:
            return LentRows(self._held[token].tensor)

    def stage(self, token: int, offset: int, nbytes: int) -> None:
        """See ``runtime.staging.RowStore``. On a staging thread; returns when all is copied."""
        with self._lock:
            held = self._held.pop(token)
        source = held.tensor.detach()
        rows, width = source.shape
        target = self._slab.rows(offset, rows, width, source.dtype)
        if target.numel() * source.dtype.itemsize != nbytes:
            raise ValueError(f"{rows} x {width} of {source.dtype} are not {nbytes} bytes")
        if held.ready is None:
            target.copy_(source)
            return
        stream = self._stream(source.device)
        with torch.cuda.stream(stream):
            stream.wait_event(held.ready)
            target.copy_(source, non_blocking=True)
            done = torch.cuda.Event(blocking=True)
            done.record(stream)
        done.synchronize()

    def drop(self, token: int) -> None:
        """Lets go of the rows of ``token``."""
        with self._lock:
            self._held.pop(token, None)

    def __len__(self) -> int:
        with self._lock:
            return len(self._held)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """This thread's own stream, so that copies do not wait for the engine's kernels."""
        stream: torch.cuda.Stream | None = getattr(self._streams, "stream", None)
        if stream is None:
            # A new thread starts on device 0, whatever the engine's device is.
            torch.cuda.set_device(device)
            stream = self._streams.stream = torch.cuda.Stream(device)
        return stream


WhenRead = Callable[[Callable[[], None]], None]
"""Is given a function that returns when nothing reads the slab's bytes any more: at once on the
CPU, after an event on CUDA. It may be run on another thread."""


class Publisher:
    """Makes tensors of the engine's device out of landed rows. On the engine's thread."""

    def __init__(self, slab: SlabMemory, device: torch.device) -> None:
        self._slab = slab
        self._device = device

    def publish(
        self, offset: int, rows: int, width: int, dtype: str, when_read: WhenRead
    ) -> torch.Tensor:
        """A new ``[rows, width]`` tensor with the rows at ``offset``."""
        published = self.empty(rows, width, dtype)
        self.fill(published, offset, when_read)
        return published

    def empty(self, rows: int, width: int, dtype: str) -> torch.Tensor:
        """A new ``[rows, width]`` tensor whose content is not set yet."""
        made = torch.empty((rows, width), dtype=getattr(torch, dtype), device=self._device)
        if self._device.type == "cpu":
            advise_large_pages(made.data_ptr(), made.numel() * made.element_size())
        return made

    def fill(self, target: torch.Tensor, offset: int, when_read: WhenRead) -> None:
        """Copies the rows at ``offset`` into ``target``, ``[rows, width]`` on the device.

        On CUDA the copy is queued on the current stream. ``when_read`` is called once.
        """
        rows, width = target.shape
        source = self._slab.rows(offset, rows, width, target.dtype)
        target.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            done = torch.cuda.Event(blocking=True)
            done.record(torch.cuda.current_stream(self._device))
            when_read(done.synchronize)
        else:
            when_read(lambda: None)
