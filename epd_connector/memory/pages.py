# SPDX-License-Identifier: Apache-2.0
"""Large pages for large tensors on the host.

Owns one piece of advice to the kernel. A new tensor of tens of megabytes is memory that has no
pages yet: each is made, and zeroed, when it is first written to, and with pages of 4 KiB that
takes longer than the copy that writes them.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable

LARGE_NBYTES = 1 << 21
"""Bytes from which on the advice is given: a large page of most machines."""


def advise_large_pages(address: int, nbytes: int) -> bool:
    """Asks for large pages for the memory at ``address``; whether the kernel takes the advice.

    A kernel that does not is no error: the memory is the same, only later there. See
    madvise(2), MADV_HUGEPAGE.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes < LARGE_NBYTES:
        return False
    return _madvise()(start, end - start, mmap.MADV_HUGEPAGE) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
