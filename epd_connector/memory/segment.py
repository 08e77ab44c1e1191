# SPDX-License-Identifier: Apache-2.0
"""Real host memory: one contiguous block per slab, private or shared with peers on this host.

Owns the segment's life: naming, reservation, the lock that proves its owner alive, removal by
its owner or, if that is killed, by Python's resource tracker, and the sweep of what both have
left. Does not own how a slab is divided (`slab`) or who may write to it.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import stat
from multiprocessing import resource_tracker
from pathlib import Path

from epd_connector.errors import TransportError

SHARED_DIRECTORY = Path("/dev/shm")

_NAME = re.compile(r"epd-(?P<uid>\d{1,10})-\d{1,10}-[0-9a-f]{16}")
_CREATE_ATTEMPTS = 8


class Segment:
    """One block of host memory, mapped once and never moved.

    Shared segments are files `/dev/shm/epd-<uid>-<pid>-<16 hex digits>` that peers attach.
    Use from any thread; `close` once nothing reads or writes the memory any more.
    """

    def __init__(
        self, mapping: mmap.mmap, nbytes: int, *, path: str | None, lock_fd: int | None
    ) -> None:
        """For `create` and `attach`. `lock_fd`: the creator's locked descriptor, else None."""
        self.buffer = mapping
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.nbytes = nbytes
        self.path = path
        self._lock_fd = lock_fd
        self._creator_pid = os.getpid()
        self._closed = False

    @classmethod
    def create(cls, nbytes: int, *, shared: bool, owner_tag: str) -> "Segment":
        """Reserve `nbytes` bytes of zeroed memory, every page of it present on return.

        `owner_tag` says in errors what the memory is for. Raises TransportError, with the
        sizes and the remedy, where the memory cannot be had.
        """
        if nbytes <= 0:
            raise TransportError(f"{owner_tag}: a segment of {nbytes} bytes cannot be created")
        if shared:
            return _create_shared(nbytes, owner_tag)
        try:
            mapping = mmap.mmap(
                -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
            )
        except (OSError, OverflowError) as error:
            raise TransportError(
                f"{owner_tag}: cannot reserve {nbytes} bytes of memory ({error}); lower "
                "send_slab_bytes or receive_slab_bytes, or give the engine more memory"
            ) from error
        return cls(mapping, nbytes, path=None, lock_fd=None)

    @classmethod
    def attach(cls, path: str, nbytes: int) -> "Segment":
        """Map a peer's shared segment for writing. Raises TransportError where `path` is not a
        segment of this user with exactly `nbytes` bytes."""
        file = Path(path)
        # The path came over the wire: only a segment of this product may be mapped, never a link.
        if file.parent != SHARED_DIRECTORY or not _NAME.fullmatch(file.name):
            raise TransportError(f"{path!r} does not name a shared segment")
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"shared segment {path} cannot be opened: {error}") from error
        try:
            _check_attachable(fd, path, nbytes)
            mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            raise TransportError(f"shared segment {path} cannot be mapped: {error}") from error
        finally:
            os.close(fd)
        return cls(mapping, nbytes, path=path, lock_fd=None)

    def close(self) -> None:
        """Unmap; the creator also removes the file. Idempotent. Peers that have the segment
        mapped keep their mapping, whose bytes nobody reads any more."""
        if self._closed:
            return
        self._closed = True
        # A forked child inherits this object, but the file belongs to the process that made it.
        if self._lock_fd is not None and self._creator_pid == os.getpid():
            assert self.path is not None
            _unlink(self.path)
            resource_tracker.unregister(_tracked(self.path), "shared_memory")
        if self._lock_fd is not None:
            os.close(self._lock_fd)
        # A tensor that still views the memory keeps it mapped until the tensor dies: unmapping
        # under it would turn a late read into a crash.
        with contextlib.suppress(BufferError):
            self.buffer.close()


def sweep_stale_segments() -> list[str]:
    """Remove the shared segments of this user whose owner died; returns their paths.

    An owner holds the lock of its segment for life, so a lock that can be taken has no owner.
    """
    removed = []
    for path in sorted(SHARED_DIRECTORY.glob(f"epd-{os.geteuid()}-*")):
        if _NAME.fullmatch(path.name) and _remove_if_stale(str(path)):
            removed.append(str(path))
    return removed


def _create_shared(nbytes: int, owner_tag: str) -> Segment:
    for _ in range(_CREATE_ATTEMPTS):
        name = f"epd-{os.geteuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        path = str(SHARED_DIRECTORY / name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TransportError(f"{owner_tag}: cannot create {path}: {error}") from error
        # A sweeper may have found the file before it was locked. Then it is lost: take another.
        if not _try_lock(fd) or os.fstat(fd).st_nlink == 0:
            os.close(fd)
            continue
        try:
            mapping = _reserve(fd, nbytes, owner_tag)
        except TransportError:
            _unlink(path)
            os.close(fd)
            raise
        # Whoever kills this process: the tracker, which outlives it, removes the file.
        resource_tracker.register(_tracked(path), "shared_memory")
        return Segment(mapping, nbytes, path=path, lock_fd=fd)
    raise TransportError(
        f"{owner_tag}: {_CREATE_ATTEMPTS} new segments in {SHARED_DIRECTORY} were removed at once "
        "by other processes of this user; stop whatever removes epd-* files there"
    )


def _reserve(fd: int, nbytes: int, owner_tag: str) -> mmap.mmap:
    try:
        # Without the reservation a full /dev/shm would be a SIGBUS at some later write.
        os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.ENOMEM):
            detail = f"failed: {error}"
        else:
            usage = shutil.disk_usage(SHARED_DIRECTORY)
            detail = f"does not fit: {usage.free} of {usage.total} bytes are free"
        raise TransportError(
            f"{owner_tag}: reserving {nbytes} bytes in {SHARED_DIRECTORY} {detail}; lower "
            f"receive_slab_bytes, or enlarge {SHARED_DIRECTORY} (container: --shm-size; "
            f"host: mount -o remount,size=... {SHARED_DIRECTORY})"
        ) from error


def _check_attachable(fd: int, path: str, nbytes: int) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise TransportError(f"shared segment {path} is not a regular file")
    if status.st_uid != os.geteuid():
        raise TransportError(
            f"shared segment {path} belongs to user {status.st_uid}, not to {os.geteuid()}; "
            "run both engines as one user"
        )
    if status.st_size != nbytes:
        raise TransportError(
            f"shared segment {path} has {status.st_size} bytes, its session says {nbytes}"
        )


def _remove_if_stale(path: str) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        # Its owner or another sweeper removed it meanwhile, or it is not ours to open.
        return False
    try:
        return _try_lock(fd) and _unlink(path)
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tracked(path: str) -> str:
    """The name of the segment at ``path`` for ``shm_unlink``, which the tracker calls."""
    return f"/{Path(path).name}"


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
