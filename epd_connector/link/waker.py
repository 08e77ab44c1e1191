# SPDX-License-Identifier: Apache-2.0
"""An eventfd that lets any thread end another thread's poll."""

import os


class Waker:
    """Set from any thread, polled and cleared by one. The descriptor closes with the object."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._set = False

    def set(self) -> None:
        """Make ``fd`` readable until :meth:`clear`. Costs a system call only the first time."""
        if self._set:
            return
        self._set = True
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Call after a poll found ``fd`` readable, before looking at what the waking was for."""
        os.eventfd_read(self.fd)
        # After the read: were the flag dropped first, a set() in between would leave it raised
        # over an empty descriptor, and every later set() would be silent.
        self._set = False

    def __del__(self) -> None:
        # Here and not in a close(): a set() that runs while the owner closes holds a reference,
        # so it can never write into a descriptor that was closed and given to someone else.
        os.close(self.fd)
