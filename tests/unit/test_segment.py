# SPDX-License-Identifier: Apache-2.0
"""Memory segments: what is reserved, who may attach, and what a dead owner leaves behind."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import epd_connector
from epd_connector.errors import TransportError
from epd_connector.memory.segment import Segment, sweep_stale_segments

NBYTES = 3 * 4096 + 17

OWNER = """
import sys
from epd_connector.memory.segment import Segment
segment = Segment.create(int(sys.argv[1]), shared=True, owner_tag="test")
print(segment.path, flush=True)
sys.stdin.read()
"""
FORKER = """
import os
from epd_connector.memory.segment import Segment
segment = Segment.create(4096, shared=True, owner_tag="test")
child = os.fork()
if child == 0:
    segment.close()
    os._exit(0)
os.waitpid(child, 0)
print(os.path.exists(segment.path))
segment.close()
print(os.path.exists(segment.path))
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    root = str(Path(epd_connector.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
        start_new_session=True,
    )


def kill_with_tracker(owner: subprocess.Popen[str]) -> None:
    """Ends the owner and the resource tracker that would clean up after it."""
    os.killpg(owner.pid, signal.SIGKILL)
    owner.communicate()


@pytest.mark.parametrize("shared", [False, True])
def test_memory_is_zeroed_writable_and_as_large_as_asked(shared: bool) -> None:
    segment = Segment.create(NBYTES, shared=shared, owner_tag="test")
    assert (segment.nbytes, len(segment.buffer)) == (NBYTES, NBYTES)
    assert segment.buffer[:] == bytes(NBYTES)
    ctypes.memset(segment.address + NBYTES - 2, 0xAB, 1)
    assert segment.buffer[-2] == 0xAB
    assert (segment.path is not None) is shared
    segment.close()


def test_shared_file_is_private_to_the_user_and_removed() -> None:
    segment = Segment.create(NBYTES, shared=True, owner_tag="test")
    assert segment.path is not None
    status = os.stat(segment.path)
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == NBYTES
    # Every page is reserved now, not at its first use.
    assert status.st_blocks * 512 >= NBYTES
    assert Path(segment.path).name.startswith(f"epd-{os.geteuid()}-{os.getpid()}-")
    segment.close()
    segment.close()
    assert not os.path.exists(segment.path)


def test_attached_memory_is_the_same_memory() -> None:
    owner = Segment.create(NBYTES, shared=True, owner_tag="test")
    assert owner.path is not None
    peer = Segment.attach(owner.path, NBYTES)
    peer.buffer[5:10] = b"hello"
    assert owner.buffer[5:10] == b"hello"
    peer.close()
    assert os.path.exists(owner.path)
    owner.close()


def test_attached_memory_outlives_its_owner() -> None:
    owner = Segment.create(NBYTES, shared=True, owner_tag="test")
    assert owner.path is not None
    peer = Segment.attach(owner.path, NBYTES)
    owner.close()
    peer.buffer[:5] = b"still"
    assert peer.buffer[:5] == b"still"
    peer.close()


def test_attach_refuses_what_is_not_a_segment_of_that_size(tmp_path: Path) -> None:
    owner = Segment.create(NBYTES, shared=True, owner_tag="test")
    assert owner.path is not None
    with pytest.raises(TransportError, match=str(NBYTES)):
        Segment.attach(owner.path, NBYTES + 1)
    for path in ("/etc/passwd", f"{owner.path}/../x", "/dev/shm/other", "", str(tmp_path)):
        with pytest.raises(TransportError, match="does not name"):
            Segment.attach(path, 1)
    owner.close()
    with pytest.raises(TransportError, match="cannot be opened"):
        Segment.attach(owner.path, NBYTES)


def test_too_large_for_shared_memory_names_sizes_and_remedy() -> None:
    total = shutil.disk_usage("/dev/shm").total
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(TransportError) as caught:
        Segment.create(total * 2, shared=True, owner_tag="receive slab")
    message = str(caught.value)
    for part in ("receive slab", str(total * 2), str(total), "receive_slab_bytes", "--shm-size"):
        assert part in message
    assert set(os.listdir("/dev/shm")) <= before


def test_too_large_for_memory_names_size_and_remedy() -> None:
    with pytest.raises(TransportError, match="send_slab_bytes"):
        Segment.create(1 << 60, shared=False, owner_tag="send slab")
    for nbytes in (0, -1):
        with pytest.raises(TransportError, match="send slab"):
            Segment.create(nbytes, shared=False, owner_tag="send slab")


def test_close_under_a_view_removes_the_file_and_leaves_the_memory() -> None:
    segment = Segment.create(NBYTES, shared=True, owner_tag="test")
    assert segment.path is not None
    view = memoryview(segment.buffer)
    view[0] = 7
    segment.close()
    assert not os.path.exists(segment.path)
    assert view[0] == 7
    view.release()


def test_sweep_removes_what_a_killed_owner_left_and_nothing_else() -> None:
    dead, live = start(OWNER, str(NBYTES)), start(OWNER, str(NBYTES))
    assert dead.stdout is not None
    assert live.stdout is not None
    dead_path, live_path = dead.stdout.readline().strip(), live.stdout.readline().strip()
    own = Segment.create(NBYTES, shared=True, owner_tag="test")
    kill_with_tracker(dead)
    assert os.path.exists(dead_path)
    swept = sweep_stale_segments()
    assert dead_path in swept
    assert live_path not in swept
    assert own.path not in swept
    assert not os.path.exists(dead_path)
    assert os.path.exists(live_path)
    assert dead_path not in sweep_stale_segments()
    own.close()
    kill_with_tracker(live)
    assert live_path in sweep_stale_segments()


def test_a_killed_owners_segment_is_removed_without_a_sweep() -> None:
    owner = start(OWNER, str(NBYTES))
    assert owner.stdout is not None
    path = owner.stdout.readline().strip()
    assert os.path.exists(path)
    owner.kill()
    # The tracker holds the owner's stderr: this returns when it has done its work.
    owner.communicate()
    assert not os.path.exists(path)


def test_sweep_leaves_foreign_files_alone() -> None:
    foreign = Path(f"/dev/shm/epd-{os.geteuid()}-notes")
    foreign.write_bytes(b"")
    try:
        assert str(foreign) not in sweep_stale_segments()
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_forked_child_does_not_remove_its_parents_segment() -> None:
    output, _ = start(FORKER).communicate()
    assert output.split() == ["True", "False"]
