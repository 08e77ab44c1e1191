# SPDX-License-Identifier: Apache-2.0
"""What runs in the processes of these tests: parts of engines, each with what it is made of.

Functions on a side are called by the test process. Owns the hands on real heads and ranks; what
is to be true of them is the tests' business.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

import torch

from epd_connector.core import admission_state as admission
from epd_connector.core.admission import PrefillHead
from epd_connector.core.admission_state import ItemSpec, RequestState
from epd_connector.core.effects import RequestFailed
from epd_connector.core.send import EncodeRank
from epd_connector.hosts.vllm.setup import RankParts, make_head, make_rank
from epd_connector.link.client import ask as ask_link
from epd_connector.memory import tensors
from epd_connector.memory.segment import SHARED_DIRECTORY
from epd_connector.memory.slab import Balance
from epd_connector.memory.tensors import Publisher, SlabMemory, TensorRows
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import Envelope, HostGone
from epd_connector.runtime.head import HeadRuntime
from epd_connector.runtime.rank import Loaded
from epd_connector.runtime.report import fetch_report
from tests.group.encode_side import EncodeSide, encoded
from tests.group.host_config import HostConfig
from tests.group.material import Print, Rows, print_of
from tests.unit.pair_bench import PATIENCE_S, new_id, until

_CLONE_NEWNET = 0x40000000
PROBES = 64
"""Places of a region that are looked at to see how far a write has come."""
_TRACKER = resource_tracker._resource_tracker
_BLANK = b"\xee" * 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs. ``namespace``: of the network, by name; None: the test's own.

    ``own_tracker``: whether it has a resource tracker to itself, as processes have that were
    not forked off one server.
    """

    namespace: str | None = None
    own_tracker: bool = False


def enter(place: Place) -> None:
    """To be called before this process has threads or sockets."""
    torch.set_num_threads(1)
    if place.namespace is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", place.namespace).open("rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {place.namespace}")
    if place.own_tracker:
        vars(_TRACKER).update(_fd=None, _pid=None)


@dataclass(frozen=True, slots=True)
class Holdings:
    """What a process holds that must not grow."""

    threads: tuple[str, ...]
    tasks: int
    """Threads of libraries, too."""
    descriptors: int
    segments: tuple[str, ...]
    """Files of shared memory that it made."""
    mapped: int
    """Slabs that it has mapped and that are not its own."""


def holdings(side: object) -> Holdings:
    made = f"epd-{os.geteuid()}-{os.getpid()}-"
    maps = Path("/proc/self/maps").read_text()
    mapped = [line for line in maps.splitlines() if "/dev/shm/epd-" in line and made not in line]
    return Holdings(
        tuple(sorted(thread.name for thread in threading.enumerate())),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        tuple(sorted(path.name for path in SHARED_DIRECTORY.glob(f"{made}*"))),
        len(mapped),
    )


def tracker_pid(side: object) -> int:
    """The process that removes this one's segments once it is gone."""
    pid = vars(_TRACKER)["_pid"]
    assert isinstance(pid, int)
    return pid


# --- encode -------------------------------------------------------------------------------------


class HeldRows(TensorRows):
    """Rows whose staging a test can hold up."""

    def __init__(self, slab: SlabMemory, *, lends: bool = False) -> None:
        super().__init__(slab, lends=lends)
        self.open = threading.Event()
        self.open.set()
        self.waiting = 0

    def stage(self, token: int, offset: int, nbytes: int) -> None:
        self.waiting += 1
        self.open.wait()
        self.waiting -= 1
        super().stage(token, offset, nbytes)


class Encode(EncodeSide):
    """An encode engine, up: its head and all of its ranks."""

    def __init__(self, host: HostConfig, place: Place) -> None:
        enter(place)
        tensors.TensorRows = HeldRows  # type: ignore[misc]
        super().__init__(host)

    @property
    def machines(self) -> list[EncodeRank]:
        machines = [parts.runtime._sender for parts in self.ranks]
        return [machine for machine in machines if machine is not None]

    @property
    def rows(self) -> list[HeldRows]:
        return [parts.rows for parts in self.ranks if isinstance(parts.rows, HeldRows)]


def tower(side: Encode, *items: Rows) -> None:
    """The tower has run on every rank; the rows of all ``items`` are there at once."""
    for rows in items:
        encoded(side, rows, tuple(range(len(side.ranks))))


def hold_staging(side: Encode) -> None:
    """Rows that are handed over from now on are not copied into the slab."""
    for rows in side.rows:
        rows.open.clear()


def let_stage(side: Encode) -> None:
    for rows in side.rows:
        rows.open.set()


def staging(side: Encode) -> int:
    """Copies that have begun and are held up."""
    return sum(rows.waiting for rows in side.rows)


@dataclass(frozen=True, slots=True)
class Offers:
    """What an encode engine has to do with rooms, over all of its ranks."""

    rooms: int
    used: int
    """Bytes of its send slabs that are not free."""
    writing: int
    """Writes that its transports have not reported the end of."""
    unstaged: int
    """Tensors of the tower that it holds on to."""


IDLE = Offers(0, 0, 0, 0)


def offers(side: Encode) -> Offers:
    balances = [machine.balance() for machine in side.machines]
    transports = [transport for parts in side.ranks for transport in parts.transports.values()]
    return Offers(
        sum(len(machine.rooms()) for machine in side.machines),
        sum(balance.capacity - balance.free for balance in balances),
        sum(transport.in_flight() for transport in transports),
        sum(len(rows) for rows in side.rows),
    )


# --- prefill ------------------------------------------------------------------------------------


class Prefill:
    """A part of a prefill engine, up: its head where ``head``, and these of its ranks."""

    def __init__(self, host: HostConfig, place: Place, head: bool, ranks: Sequence[int]) -> None:
        enter(place)
        self._made_of = (host, head, tuple(ranks))
        self.begin()

    def begin(self) -> None:
        """The engine starts; once more, where it was closed."""
        host, head, ranks = self._made_of
        config = host.read()
        self.runtime: HeadRuntime | None = make_head(config, host) if head else None
        self.ranks: list[RankParts] = []
        self.failures: dict[str, list[str]] = {}
        if self.runtime is not None:
            self.runtime.start()
        for rank in ranks:
            parts = make_rank(config, host, rank, torch.device("cpu"))
            parts.runtime.start()
            self.ranks.append(parts)

    @property
    def head(self) -> HeadRuntime:
        assert self.runtime is not None
        return self.runtime

    @property
    def machine(self) -> PrefillHead:
        assert self.head._prefill is not None
        return self.head._prefill

    def slabs(self) -> list[torch.Tensor]:
        """Of the ranks in this process, ``[bytes]`` each."""
        slabs = [parts.receive_slab for parts in self.ranks]
        return [slab.tensor for slab in slabs if slab is not None]


def await_ranks(side: Prefill, ranks: int) -> None:
    until(lambda: side.head.ranks_up() == ranks)


def control(side: Prefill | Encode) -> str:
    return side.head.control.removeprefix("tcp://")


def link_name(side: Prefill | Encode) -> str:
    """Where the head's own ranks reach it."""
    return side.head._place.link


def counters(side: Prefill | Encode) -> dict[str, float]:
    """Of the whole engine, as anybody is told who asks."""
    return fetch_report(control(side), 30).counters


def say_host_gone(side: Prefill, host: str) -> None:
    """What an operator tells this engine's head, who knows that ``host`` is dead."""
    word = Codec().encode(Envelope(new_id(), 0, HostGone(host)))
    ask_link(control(side), word, 30)


def ask(side: Prefill, name: str, items: tuple[ItemSpec, ...]) -> None:
    """A request for ``items`` comes, and cannot run without them."""
    side.failures[name] = []
    side.head.tell(admission.Joined(name, items))
    side.head.tell(admission.Needed(name, tuple(item.hash for item in items)))


def decided(side: Prefill, name: str) -> tuple[RequestState, list[str]]:
    """What the scheduler may do with the request, and every failure that it was told."""
    state = side.head.ask(name)
    _hear(side)
    return state, side.failures[name]


def _hear(side: Prefill) -> None:
    for outcome in side.head.outcomes():
        assert isinstance(outcome, RequestFailed), outcome
        side.failures[outcome.request].append(str(outcome.failure))


def leave(side: Prefill, name: str) -> list[str]:
    """The request is over; every failure that it was told."""
    side.head.tell(admission.Left(name))
    _hear(side)
    return side.failures.pop(name)


def balance(side: Prefill) -> Balance:
    with side.head._lock:
        return side.machine.balance()


def receiving(side: Prefill) -> dict[int, str]:
    """Transfers by room, and how far they are."""
    with side.head._lock:
        return {room: state.value for room, state in side.machine.transfers().items()}


def receiving_ranks(side: Prefill) -> int:
    """Rooms that the ranks in this process have not ended."""
    machines = [parts.runtime._receiver for parts in side.ranks]
    return sum(len(machine._rooms) for machine in machines if machine is not None)


@dataclass(frozen=True, slots=True)
class Region:
    """Where an item lies on every rank, and how it is read."""

    room: int
    offset: int
    rows: int
    width: int
    dtype: str


def region(side: Prefill, hash: str) -> Region:
    """Of an item that is complete."""
    transfer = side.head.held(hash)
    assert transfer.region is not None
    assert transfer.identity is not None
    item, identity = transfer.item, transfer.identity
    width = identity.widths[item.modality]
    room, offset = transfer.ticket.room, transfer.region.offset
    return Region(room, offset, item.rows, width, identity.dtype)


def placed_at(side: Prefill, room: int) -> tuple[int, int] | None:
    """Offset and bytes of the region of ``room``, or None while it has none."""
    with side.head._lock:
        transfer = side.machine._desk.transfers.get(room)
        if transfer is None or transfer.region is None:
            return None
        return transfer.region.offset, transfer.item_nbytes


def lies(side: Prefill, region: Region) -> list[Print]:
    """What the slabs of the ranks in this process have there."""
    dtype = getattr(torch, region.dtype)
    nbytes = region.rows * region.width * dtype.itemsize
    span = slice(region.offset, region.offset + nbytes)
    views = [slab[span].view(dtype).view(region.rows, region.width) for slab in side.slabs()]
    return [print_of(view) for view in views]


def begin_load(side: Prefill, name: str, hash: str) -> Region:
    """The scheduling pass of a step that loads the item for the request."""
    assert side.head.promise(hash)
    where = region(side, hash)
    side.head.tell(admission.Loading(name, hash))
    side.head.tell(admission.PassEnded())
    return where


def load(side: Prefill, where: Region) -> list[Print]:
    """The ranks in this process publish the item."""
    prints = []
    for parts in side.ranks:
        assert parts.receive_slab is not None
        publisher = Publisher(parts.receive_slab, torch.device("cpu"))
        published = publisher.publish(
            where.offset, where.rows, where.width, where.dtype, lambda wait: wait()
        )
        assert parts.runtime.post(Loaded(where.room))
        prints.append(print_of(published))
    return prints


# --- how far a write has come -------------------------------------------------------------------


def blank(side: Prefill, place: tuple[int, int]) -> None:
    """Marks a region that nobody writes to yet."""
    offset, nbytes = place
    for slab in side.slabs():
        slab[offset : offset + nbytes].fill_(_BLANK[0])


def changed(side: Prefill, place: tuple[int, int]) -> int:
    """At how many of ``PROBES`` places the region is not blank any more."""
    return sum(map(_is_written, _probes(side, place)))


def stop_writer(side: Prefill, place: tuple[int, int], pid: int) -> None:
    """Stops process ``pid`` as soon as the first of its bytes are in the region."""
    probes = _probes(side, place)
    end = time.monotonic() + PATIENCE_S
    while not any(map(_is_written, probes)):
        assert time.monotonic() < end, "nothing is written"
    os.kill(pid, signal.SIGSTOP)


def _probes(side: Prefill, place: tuple[int, int]) -> list[memoryview]:
    offset, nbytes = place
    view = memoryview(side.slabs()[0].numpy())
    starts = [offset + index * (nbytes - 8) // (PROBES - 1) for index in range(PROBES)]
    return [view[start : start + 8] for start in starts]


def _is_written(probe: memoryview) -> bool:
    return probe != _BLANK


# --- ends and beginnings ------------------------------------------------------------------------


def begin(side: Prefill | Encode) -> None:
    """The engine starts once more."""
    side.begin()


def close(side: Prefill) -> None:
    """The engine ends in good order, and its process goes on."""
    for parts in side.ranks:
        parts.runtime.close(3)
        parts.free()
    if side.runtime is not None:
        side.runtime.close(3)
