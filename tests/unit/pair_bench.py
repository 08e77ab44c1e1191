# SPDX-License-Identifier: Apache-2.0
"""An encode engine and a prefill engine without their hosts: heads and ranks in one process.

Everything is real but the models: sockets, threads, slabs, transports.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from epd_connector.core import admission_state as admission
from epd_connector.core.admission import AdmissionSettings, PrefillHead
from epd_connector.core.admission_state import ItemSpec, RequestState
from epd_connector.core.effects import RequestFailed
from epd_connector.core.encode_head import EncodeHead, EncodeHeadSettings
from epd_connector.core.receive import PrefillRank, ReceiveSettings
from epd_connector.core.send import EncodeRank, SendSettings
from epd_connector.core.send_events import Claim, Encoded
from epd_connector.core.topology import Expected
from epd_connector.errors import Failure
from epd_connector.link.base import endpoint
from epd_connector.link.zmq_link import ZmqLink
from epd_connector.memory.tensors import Publisher, SlabMemory, TensorRows
from epd_connector.protocol.codec import Codec
from epd_connector.runtime.describing import HeadPlace
from epd_connector.runtime.head import HeadRuntime
from epd_connector.runtime.rank import Loaded, RankPlace, RankRuntime
from epd_connector.transport import registry
from epd_connector.transport.base import Transport, TransportOptions

SLAB = 1 << 22
WIDTH = 64
MODEL = "model/a"
PATIENCE_S = 60.0


def new_id() -> int:
    """A room, an incarnation or a token."""
    return secrets.randbits(62) + 1


def until(done: Callable[[], bool]) -> None:
    """Waits for what other threads do. AssertionError when it does not come about."""
    end = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < end, "it did not come about"
        threading.Event().wait(0.001)


@dataclass
class Shape:
    """How the engines of a test differ from the usual ones."""

    transport: str = "shm"
    host: str = "127.0.0.1"
    encode_key: bytes | None = None
    prefill_key: bytes | None = None
    resolve_timeout_s: float = 5.0
    dtype: str = "bfloat16"


class _Engine:
    """A head and one rank, not started."""

    head: HeadRuntime
    rank: RankRuntime
    slab: SlabMemory
    transport: Transport

    def __init__(self, shape: Shape, key: bytes | None) -> None:
        self.shape = shape
        self.codec = Codec(key)
        self.token = new_id()
        self.incarnation = new_id()
        self.link = f"ipc://@epd-test-{self.token}"
        self.transport = registry.create(shape.transport, TransportOptions(host=shape.host))
        self.control = endpoint(shape.host, 0)

    def head_place(self, role: str) -> HeadPlace:
        return HeadPlace(role, MODEL, new_id(), self.token, 1, self.control, self.link)

    def rank_place(self) -> RankPlace:
        return RankPlace(0, self.incarnation, self.token, self.link, self.control, self.shape.host)

    def start(self) -> None:
        self.head.start()
        self.rank.start()

    @property
    def address(self) -> str:
        return self.head.control.removeprefix("tcp://")

    def close(self, timeout_s: float = 3.0) -> None:
        self.rank.close(timeout_s)
        self.head.close(timeout_s)
        self.slab.close()


class EncodeEngine(_Engine):
    """Claims rooms, and offers tensors for them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, shape.encode_key)
        itemsize = getattr(torch, shape.dtype).itemsize
        settings = EncodeHeadSettings(1, MODEL, shape.dtype, itemsize, {"image": WIDTH})
        self.head = HeadRuntime(
            self.head_place("ec_producer"),
            ZmqLink(),
            self.codec,
            encode=EncodeHead(settings),
            prefill=None,
        )
        self.slab = SlabMemory.on_host(SLAB, shared=False, pin=False, owner_tag="send slab")
        self.transport.register_source(self.slab)
        self.rows = TensorRows(self.slab)
        me = self.incarnation
        send = SendSettings(me, 0, 1, SLAB, 0, 120.0, 30.0, 5.0, 30.0, 4, 64, 300.0)
        self.rank = RankRuntime(
            self.rank_place(),
            ZmqLink(),
            self.codec,
            {self.transport.name: self.transport},
            sender=EncodeRank(send),
            receiver=None,
            rows=self.rows,
            staging_threads=2,
        )

    def claim(self, room: int, hash: str, rows: int) -> None:
        assert self.rank.post(Claim(room, hash, rows))

    def encoded(self, hash: str, tensor: torch.Tensor) -> None:
        rows, width = tensor.shape
        nbytes = rows * width * tensor.dtype.itemsize
        dtype = str(tensor.dtype).removeprefix("torch.")
        token = self.rows.hold(tensor)
        assert self.rank.post(Encoded(hash, token, rows, width, dtype, nbytes))


class PrefillEngine(_Engine):
    """Needs items, waits for them and publishes them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, shape.prefill_key)
        expected = Expected(MODEL, shape.dtype, WIDTH)
        settings = AdmissionSettings(
            ranks=1,
            slab_nbytes=SLAB,
            shares_slab=False,
            shard_min_bytes=None,
            receive_timeout_s=PATIENCE_S,
            resolve_timeout_s=shape.resolve_timeout_s,
            failed_peer_s=30.0,
            encode_locally=False,
            max_rooms=64,
            expected=expected,
        )
        self.head = HeadRuntime(
            self.head_place("ec_consumer"),
            ZmqLink(),
            self.codec,
            encode=None,
            prefill=PrefillHead(settings),
        )
        shared = shape.transport == "shm"
        self.slab = SlabMemory.on_host(SLAB, shared=shared, pin=False, owner_tag="receive slab")
        name = self.transport.name
        sessions = {name: self.transport.register_destination(self.slab)}
        receive = ReceiveSettings(self.incarnation, 0, 1, SLAB, sessions, {name: 0.0}, 1.0, 5.0, 64)
        self.rank = RankRuntime(
            self.rank_place(),
            ZmqLink(),
            self.codec,
            {name: self.transport},
            sender=None,
            receiver=PrefillRank(receive),
            rows=None,
            staging_threads=1,
        )
        self.publisher = Publisher(self.slab, torch.device("cpu"))
        self.failures: dict[str, Failure] = {}

    def need(self, request: str, *items: ItemSpec) -> None:
        self.head.tell(admission.Joined(request, items))
        self.head.tell(admission.Needed(request, tuple(item.hash for item in items)))

    def decided(self, request: str) -> RequestState:
        """What became of ``request``; failures are noted."""
        until(lambda: self.head.ask(request) is not RequestState.WAITING)
        for outcome in self.head.outcomes():
            if isinstance(outcome, RequestFailed):
                self.failures[outcome.request] = outcome.failure
        return self.head.ask(request)

    def load(self, request: str, hash: str) -> torch.Tensor:
        """What a step does with an item that is ready."""
        assert self.head.promise(hash)
        transfer = self.head.held(hash)
        self.head.tell(admission.Loading(request, hash))
        self.head.tell(admission.PassEnded())
        assert transfer.region is not None
        assert transfer.identity is not None
        published = self.publisher.publish(
            transfer.region.offset,
            transfer.item.rows,
            transfer.identity.widths["image"],
            transfer.identity.dtype,
            lambda wait: wait(),
        )
        assert self.rank.post(Loaded(transfer.ticket.room))
        return published


@dataclass
class Pair:
    """Both engines, up."""

    shape: Shape = field(default_factory=Shape)

    def __post_init__(self) -> None:
        self.encode = EncodeEngine(self.shape)
        self.prefill = PrefillEngine(self.shape)

    def start(self) -> None:
        self.encode.start()
        self.prefill.start()
        # A room fails at once while the engine's own rank is not up.
        until(lambda: self.prefill.head.ranks_up() == 1)

    def item(self, hash: str, rows: int, room: int) -> ItemSpec:
        return ItemSpec(hash, rows, "image", room, self.encode.address)

    def close(self) -> None:
        self.prefill.close()
        self.encode.close()
