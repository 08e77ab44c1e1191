# SPDX-License-Identifier: Apache-2.0
"""This project's connector, as its hosts use it: rank adapters, heads and their links.

Everything is what an engine has, made by ``hosts.vllm.setup`` from the engine's configuration.
Only the host's hooks on the scheduler's side are left out: the head is told and asked
directly what ``HeadAdapter`` tells and asks it.
"""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from benchmarks.items import WIDTH, Item
from benchmarks.sides import Setup
from epd_connector.config import Config
from epd_connector.core import admission_state as admission
from epd_connector.core.admission_state import ItemSpec, RequestState, Transfer
from epd_connector.hosts.vllm.plan import ClaimSpec, LoadSpec, StepPlan
from epd_connector.hosts.vllm.rank import RankAdapter
from epd_connector.hosts.vllm.setup import make_head, read_config
from epd_connector.link.base import PeerId
from epd_connector.runtime.report import fetch_report

if TYPE_CHECKING:
    import torch

_LAYOUTS: dict[str, dict[str, object]] = {
    "whole": {"shard": "never"},
    "shards": {"shard": "always"},
    "shared": {"shard": "auto", "share_slab": True},
}
TRANSPORTS = ("shm", "mooncake")
LAYOUTS = tuple(_LAYOUTS)
_REQUEST = "request"
_LOOK_S = 0.05
_ENCODE_PORTS = 2
"""A head's and a rank's. The prefill engine's come behind them."""
_HELD_S = 600.0
"""Between two items the processes are held, and none may take another one for dead."""
_SETTLE_S = 0.3
"""Longer than a rank keeps its counts from its head."""


def room_of(item: Item) -> int:
    """The room that a router would have minted."""
    return item.number + 1


class _Model:
    """What of a model configuration tells engines who they are."""

    def __init__(self) -> None:
        import torch

        self.hf_config = self
        self.multimodal_config = None
        self.dtype = torch.bfloat16
        self.model = str(Path(__file__).parent)
        self.revision = None

    def to_dict(self) -> dict[str, object]:
        """The model's own configuration."""
        return {"model_type": "benchmark"}

    def get_hidden_size(self) -> int:
        """Elements per row."""
        return WIDTH


def host_config(setup: Setup, role: str) -> SimpleNamespace:
    """What the connector reads of the configuration of an engine of ``role``."""
    from vllm.config import ECTransferConfig

    ranks = setup.ranks if role == "ec_consumer" else 1
    extra = {
        "transport": setup.transport,
        "control_port": setup.port + (_ENCODE_PORTS if role == "ec_consumer" else 0),
        "send_slab_bytes": setup.slab_nbytes,
        "receive_slab_bytes": setup.slab_nbytes,
        "peer_timeout_s": _HELD_S,
        **_LAYOUTS[setup.layout],
    }
    transfer = ECTransferConfig(
        ec_connector="EPDConnector",
        ec_role=role,
        engine_id=f"{setup.key}-{role}",
        ec_connector_extra_config=extra,
    )
    transfer.mm_encoder_output_widths = {"image": WIDTH}
    parallel = SimpleNamespace(
        tensor_parallel_size=ranks, data_parallel_index=0, nnodes_within_dp=1
    )
    return SimpleNamespace(
        model_config=_Model(),
        parallel_config=parallel,
        scheduler_config=SimpleNamespace(max_num_encoder_input_tokens=8192),
        ec_transfer_config=transfer,
    )


def _configured(setup: Setup, role: str) -> tuple[Config, SimpleNamespace]:
    # A process that is held between items finds that its loop was kept from running.
    logging.getLogger("epd_connector.runtime.loop").setLevel(logging.ERROR)
    host = host_config(setup, role)
    return read_config(host), host


class Encoder:
    """See ``sides.Encoder``."""

    def __init__(self, setup: Setup) -> None:
        config, host = _configured(setup, "ec_producer")
        self._head = make_head(config, host)
        self._rank = RankAdapter(config, host)
        self._head.start()
        self._rank.start()

    @property
    def address(self) -> str:
        """``host:port`` of the head."""
        return self._head.control.removeprefix("tcp://")

    def announce(self, item: Item, prefill: str) -> None:
        """See ``sides.Encoder``."""
        claim = ClaimSpec(room_of(item), item.hash, item.rows)
        self._rank.start_save_caches(StepPlan(claims=[claim]), {})

    def hand_over(self, cache: "dict[str, torch.Tensor]", hash: str) -> None:
        """See ``sides.Encoder``."""
        self._rank.save_caches(cache, hash)

    def bytes_sent(self) -> int:
        """From the transport's counter, by way of the head."""
        time.sleep(_SETTLE_S)
        return int(fetch_report(self.address, 10).counters["bytes_sent"])

    def close(self) -> None:
        """See ``sides.Encoder``."""
        self._rank.close()
        self._head.close(1)


class Head:
    """See ``sides.Head``."""

    def __init__(self, setup: Setup) -> None:
        self._runtime = make_head(*_configured(setup, "ec_consumer"))
        self._runtime.start()
        self._item: Item | None = None
        self._ranks = setup.ranks
        self._news = threading.Event()
        self._listen()

    def _listen(self) -> None:
        """Asking all the time would take from a core what the transfer needs: a scheduler asks
        once per step."""
        hear = self._runtime.on_frame

        def on_frame(peer: PeerId, payload: bytes, now: float) -> None:
            hear(peer, payload, now)
            self._news.set()

        self._runtime.on_frame = on_frame  # type: ignore[method-assign]

    @property
    def address(self) -> str:
        """Encode engines need not know it."""
        return ""

    def announce(self, item: Item, encode: str) -> None:
        """See ``sides.Head``."""
        while self._runtime.ranks_up() < self._ranks:
            time.sleep(0.01)
        self._item = item
        spec = ItemSpec(item.hash, item.rows, "image", room_of(item), encode)
        self._runtime.tell(admission.Joined(_REQUEST, (spec,)))
        self._runtime.tell(admission.Needed(_REQUEST, (item.hash,)))

    def ready(self) -> StepPlan | None:
        """See ``sides.Head``."""
        state = self._runtime.ask(_REQUEST)
        if state is RequestState.WAITING:
            return None
        if state is not RequestState.READY:
            raise RuntimeError(f"the request is {state.value}: {self._runtime.outcomes()}")
        assert self._item is not None
        if not self._runtime.promise(self._item.hash):
            raise RuntimeError(f"{self._item.hash} is ready and not held")
        plan = StepPlan(loads=[_load_spec(self._runtime.held(self._item.hash))])
        self._runtime.tell(admission.Loading(_REQUEST, self._item.hash))
        self._runtime.tell(admission.PassEnded())
        return plan

    def wait(self) -> None:
        """See ``sides.Head``."""
        self._news.wait(_LOOK_S)
        self._news.clear()

    def finished(self) -> None:
        """See ``sides.Head``."""
        self._runtime.tell(admission.Left(_REQUEST))

    def close(self) -> None:
        """See ``sides.Head``."""
        self._runtime.close(1)


class Crowd:
    """A prefill engine's head with a request for each of many items, of which none is loaded."""

    def __init__(self, setup: Setup) -> None:
        self._runtime = make_head(*_configured(setup, "ec_consumer"))
        self._runtime.start()
        self._waiting: list[str] = []
        self._all: list[str] = []

    def need(self, items: Sequence[Item], encode: str) -> None:
        """A request comes for each of ``items``."""
        while self._runtime.ranks_up() < 1:
            time.sleep(0.01)
        self._all = self._waiting = [item.hash for item in items]
        for item in items:
            spec = ItemSpec(item.hash, item.rows, "image", room_of(item), encode)
            self._runtime.tell(admission.Joined(item.hash, (spec,)))
            self._runtime.tell(admission.Needed(item.hash, (item.hash,)))

    def ready(self) -> bool:
        """Whether all may run."""
        states = {request: self._runtime.ask(request) for request in self._waiting}
        if RequestState.FAILED in states.values():
            raise RuntimeError(f"requests failed: {self._runtime.outcomes()}")
        self._waiting = [r for r, state in states.items() if state is not RequestState.READY]
        return not self._waiting

    def leave(self) -> None:
        """All are over."""
        for request in self._all:
            self._runtime.tell(admission.Left(request))

    def close(self) -> None:
        """Ends it."""
        self._runtime.close(1)


def _load_spec(transfer: Transfer) -> LoadSpec:
    assert transfer.region is not None
    assert transfer.identity is not None
    return LoadSpec(
        room=transfer.ticket.room,
        hash=transfer.item.hash,
        offset=transfer.region.offset,
        rows=transfer.item.rows,
        width=transfer.identity.widths[transfer.item.modality],
        dtype=transfer.identity.dtype,
        layout=transfer.layout,
    )


class Rank:
    """See ``sides.Rank``."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self._adapter = RankAdapter(*_configured(setup, "ec_consumer"))
        self._adapter.start()

    def load(self, what: object, cache: "dict[str, torch.Tensor]") -> None:
        """See ``sides.Rank``."""
        assert isinstance(what, StepPlan)
        self._adapter.start_load_caches(what, cache)

    def dropped(self, hash: str, cache: "dict[str, torch.Tensor]") -> None:
        """The connector learns that from the scheduler alone."""

    def close(self) -> None:
        """See ``sides.Rank``."""
        self._adapter.close()
