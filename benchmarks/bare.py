# SPDX-License-Identifier: Apache-2.0
"""Engines that only talk: heads, ranks, machines, loops and sockets, and nothing that moves bytes.

Staging and writing cost nothing here, so what is left is the control plane. Owns the two
sides and how many rooms are opened, offered and ended at a word. Each side is one process.
"""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import randbits

from epd_connector.core import admission_state as admission
from epd_connector.core.admission import AdmissionSettings, PrefillHead
from epd_connector.core.admission_state import ItemSpec, RequestState
from epd_connector.core.encode_head import EncodeHead, EncodeHeadSettings
from epd_connector.core.receive import PrefillRank, ReceiveSettings
from epd_connector.core.send import EncodeRank, SendSettings
from epd_connector.core.send_events import Claim, Encoded
from epd_connector.core.topology import Expected
from epd_connector.link.zmq_link import ZmqLink
from epd_connector.protocol.codec import Codec
from epd_connector.runtime.describing import HeadPlace
from epd_connector.runtime.head import HeadRuntime
from epd_connector.runtime.rank import Loaded, RankPlace, RankRuntime
from epd_connector.transport.base import Completion, SlabBuffer, Span, WriteState

MODEL, DTYPE, ITEMSIZE, WIDTH, ROWS = "bare", "bfloat16", 2, 64, 4
ITEM_NBYTES = ROWS * WIDTH * ITEMSIZE
MAX_ROOMS = 1 << 15
SLAB_NBYTES = MAX_ROOMS * ITEM_NBYTES
HERE = "127.0.0.1"
PATIENCE_S = 100.0
_POLL_S = 0.0005
_LONG_S = 500.0


@dataclass(frozen=True, slots=True)
class Need:
    """Prefill: requests need these rooms of the encode engine at ``encode``, spread over all
    prefill engines; no word waits for another."""

    rooms: Sequence[int]
    encode: str


@dataclass(frozen=True, slots=True)
class AwaitReady:
    """Prefill: wait until all needed rooms have landed."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Prefill: all requests are over."""


@dataclass(frozen=True, slots=True)
class TimeOne:
    """Prefill: need one more room, which is offered already; the answer is how many seconds it
    takes until its request is ready."""

    room: int
    encode: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Encode: the engine's requests claim these rooms, and their rows are there."""

    rooms: Sequence[int]


@dataclass(frozen=True, slots=True)
class AwaitGrants:
    """Encode: wait until so many rooms are open on the rank."""

    rooms: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of CPU that the process has used, and bytes that it has resident."""

    cpu_s: float
    resident_nbytes: int


class FreeTransport:
    """Every write is done at once, and nothing is moved."""

    name = "free"
    poll_interval_s: float | None = None
    reads_anywhere = True

    def __init__(self) -> None:
        self._done: list[Completion] = []
        self._handles = 0
        self._wake: Callable[[], None] = lambda: None

    def register_source(self, buffer: SlabBuffer) -> None: ...

    def register_destination(self, buffer: SlabBuffer) -> str:
        return "free"

    def advert(self) -> str:
        return "free"

    def reaches(self, advert: str) -> bool:
        return True

    def write(self, session: str, spans: Sequence[Span], source: SlabBuffer | None = None) -> int:
        self._handles += 1
        self._done.append(Completion(self._handles, WriteState.DONE, ""))
        self._wake()
        return self._handles

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def in_flight(self) -> int:
        return len(self._done)

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def forget(self, session: str) -> None: ...

    def fence_s(self) -> float:
        return 0.0

    def bytes_written(self) -> int:
        return self._handles * ITEM_NBYTES

    def close(self) -> None: ...

    def quiet(self) -> bool:
        return True


class FreeRows:
    """Rows that are lent, as those of a CPU's tower, and are nowhere."""

    path = None
    address = 0
    nbytes = ITEM_NBYTES

    def stage(self, token: int, offset: int, nbytes: int) -> None: ...

    def lend(self, token: int) -> SlabBuffer:
        del token
        return self

    def drop(self, token: int) -> None: ...


class _Engine:
    """A head and one rank, in one process."""

    def __init__(self, role: str) -> None:
        token, self.incarnation = randbits(62) + 1, randbits(62) + 1
        link, control = f"ipc://@epd-bare-{token}", f"tcp://{HERE}:0"
        encode = prefill = sender = receiver = None
        if role == "ec_producer":
            encode = EncodeHead(EncodeHeadSettings(1, MODEL, DTYPE, ITEMSIZE, {"image": WIDTH}))
            sender = EncodeRank(self._send_settings())
        else:
            prefill = PrefillHead(self._admission_settings())
            receiver = PrefillRank(self._receive_settings())
        place = HeadPlace(role, MODEL, randbits(62) + 1, token, 1, control, link)
        self.head = HeadRuntime(place, ZmqLink(), Codec(None), encode=encode, prefill=prefill)
        self.rank = RankRuntime(
            RankPlace(0, self.incarnation, token, link, control, HERE),
            ZmqLink(),
            Codec(None),
            {FreeTransport.name: FreeTransport()},
            sender=sender,
            receiver=receiver,
            rows=FreeRows(),
            staging_threads=1,
        )
        self.sender = sender
        self.head.start()
        self.rank.start()
        wait_for(lambda: self.head.ranks_up() == 1)

    def _send_settings(self) -> SendSettings:
        return SendSettings(
            incarnation=self.incarnation,
            rank=0,
            ranks=1,
            slab_nbytes=SLAB_NBYTES,
            ahead_rows=0,
            offer_timeout_s=_LONG_S,
            write_timeout_s=_LONG_S,
            peer_timeout_s=_LONG_S,
            failed_peer_s=_LONG_S,
            write_parallelism=4,
            max_rooms=MAX_ROOMS,
            tombstone_s=_LONG_S,
        )

    def _receive_settings(self) -> ReceiveSettings:
        return ReceiveSettings(
            incarnation=self.incarnation,
            rank=0,
            ranks=1,
            slab_nbytes=SLAB_NBYTES,
            sessions={FreeTransport.name: "free"},
            fences={FreeTransport.name: 0.0},
            heartbeat_s=1.0,
            peer_timeout_s=_LONG_S,
            max_rooms=MAX_ROOMS,
        )

    def _admission_settings(self) -> AdmissionSettings:
        return AdmissionSettings(
            ranks=1,
            slab_nbytes=SLAB_NBYTES,
            shares_slab=False,
            shard_min_bytes=None,
            receive_timeout_s=_LONG_S,
            resolve_timeout_s=_LONG_S,
            failed_peer_s=_LONG_S,
            encode_locally=False,
            max_rooms=MAX_ROOMS,
            expected=Expected(MODEL, DTYPE, WIDTH),
        )

    def close(self) -> None:
        self.rank.close(1)
        self.head.close(1)


class EncodeSide:
    """The process of an encode engine. See ``processes.Side``."""

    def __init__(self) -> None:
        self._engine = _Engine("ec_producer")

    @property
    def address(self) -> str:
        """``host:port`` of the head."""
        return self._engine.head.control.removeprefix("tcp://")

    def handle(self, order: object) -> object:
        """See ``processes.Side``."""
        match order:
            case Offer(rooms=rooms):
                for room in rooms:
                    claim = Claim(room, f"item-{room}", ROWS)
                    wait_for(partial(self._engine.rank.post, claim))
                    rows = Encoded(claim.hash, room, ROWS, WIDTH, DTYPE, ITEM_NBYTES, True)
                    wait_for(partial(self._engine.rank.post, rows))
                return None
            case AwaitGrants(rooms=rooms):
                sender = self._engine.sender
                assert sender is not None
                # Only a look from another thread: it may be a moment old.
                wait_for(lambda: len(sender._rooms) >= rooms)
                return None
        return usage()

    def close(self) -> None:
        """See ``processes.Side``."""
        self._engine.close()


class PrefillSide:
    """The process of ``engines`` prefill engines. See ``processes.Side``."""

    address = ""

    def __init__(self, engines: int) -> None:
        self._engines = [_Engine("ec_consumer") for _ in range(engines)]
        self._requests: list[tuple[_Engine, str, int]] = []

    def handle(self, order: object) -> object:
        """See ``processes.Side``."""
        match order:
            case Need(rooms=rooms, encode=encode):
                for number, room in enumerate(rooms):
                    self._need(self._engines[number % len(self._engines)], room, encode)
                return None
            case AwaitReady():
                for engine, request, _ in self._requests:
                    wait_for(partial(self._ready, engine, request))
                return None
            case TimeOne(room=room, encode=encode):
                engine = self._engines[0]
                begun = time.perf_counter()
                request = self._need(engine, room, encode)
                while not self._ready(engine, request):
                    time.sleep(0)
                return time.perf_counter() - begun
            case Leave():
                for engine, request, room in self._requests:
                    engine.head.tell(admission.Left(request))
                    engine.rank.post(Loaded(room))
                self._requests.clear()
                return None
        return usage()

    def _need(self, engine: _Engine, room: int, encode: str) -> str:
        request, hash = f"request-{room}", f"item-{room}"
        spec = ItemSpec(hash, ROWS, "image", room, encode)
        engine.head.tell(admission.Joined(request, (spec,)))
        engine.head.tell(admission.Needed(request, (hash,)))
        self._requests.append((engine, request, room))
        return request

    def _ready(self, engine: _Engine, request: str) -> bool:
        state = engine.head.ask(request)
        if state is RequestState.FAILED:
            raise RuntimeError(f"{request} failed: {engine.head.outcomes()}")
        return state is RequestState.READY

    def close(self) -> None:
        """See ``processes.Side``."""
        for engine in self._engines:
            engine.close()


def usage() -> Usage:
    """What this process has used so far."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return Usage(time.process_time(), pages * resource.getpagesize())


def wait_for(condition: Callable[[], bool]) -> None:
    """Returns when ``condition`` holds. RuntimeError if it does not for ``PATIENCE_S``."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"not within {PATIENCE_S:.0f} s")
        time.sleep(_POLL_S)
