# SPDX-License-Identifier: Apache-2.0
"""The host's own ECMooncakeConnector, worker to worker, with its own readiness events.

The workers are the host's, unchanged; what its scheduler part would tell them is told here.
Readiness comes over the connector's own event channel, which is read as often as this
project's head is asked: its scheduler part reads it every 5 ms at most, and that is not
counted against it.
"""

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.mooncake.control import ControlClient, EventInbox
from vllm.distributed.ec_transfer.ec_connector.mooncake.metadata import (
    ECMooncakeConnectorMetadata,
    ECMooncakeLoadSpec,
    ECMooncakePushSpec,
)
from vllm.distributed.ec_transfer.ec_connector.mooncake.worker import ECMooncakeWorker

from benchmarks.items import WIDTH, Item
from benchmarks.sides import POLL_S, Setup

if TYPE_CHECKING:
    import torch

_DTYPE = "bfloat16"
_CONTROL_TIMEOUT_MS = 30_000


def host_config(setup: Setup, role: str) -> SimpleNamespace:
    """What the connector reads of the configuration of an engine of ``role``."""
    from vllm.config import ECTransferConfig

    parallel = SimpleNamespace(
        tensor_parallel_size=setup.ranks if role == "ec_consumer" else 1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        data_parallel_index=0,
    )
    transfer = ECTransferConfig(
        ec_connector="ECMooncakeConnector",
        ec_role=role,
        ec_buffer_device="cpu",
        ec_buffer_size=setup.slab_nbytes,
        ec_port=setup.port,
        ec_connector_extra_config={"mooncake_protocol": "tcp"},
    )
    return SimpleNamespace(parallel_config=parallel, ec_transfer_config=transfer)


def transfer_of(item: Item) -> str:
    """The name that both engines' requests would carry."""
    return f"transfer-{item.number}"


class Encoder:
    """See ``sides.Encoder``."""

    def __init__(self, setup: Setup) -> None:
        self._worker = ECMooncakeWorker(host_config(setup, "ec_producer"))
        self._worker.start_services()
        self._sent = 0
        self._lock = threading.Lock()
        self._count_writes(self._worker._transfer)

    @property
    def address(self) -> str:
        """Prefill engines need not know it."""
        return ""

    def announce(self, item: Item, prefill: str) -> None:
        """See ``sides.Encoder``."""
        push = ECMooncakePushSpec(
            mm_hash=item.hash,
            nbytes=item.nbytes,
            shape=(item.rows, WIDTH),
            dtype=_DTYPE,
            consumer_zmq=prefill,
            transfer_id=transfer_of(item),
            request_id=item.hash,
        )
        self._worker.start_save_caches(ECMooncakeConnectorMetadata(pushes=[push]), {})

    def hand_over(self, cache: "dict[str, torch.Tensor]", hash: str) -> None:
        """See ``sides.Encoder``."""
        self._worker.save_caches(cache, hash)
        meta = self._worker.build_connector_worker_meta()
        if meta.failed_saves:
            raise RuntimeError(f"pushes failed: {meta.failed_saves}")

    def bytes_sent(self) -> int:
        """Counted where the connector hands its writes to Mooncake."""
        return self._sent

    def _count_writes(self, transfer: Any) -> None:
        write = transfer.write

        def counted(
            session: str, sources: list[int], destinations: list[int], lengths: list[int]
        ) -> None:
            write(session, sources, destinations, lengths)
            with self._lock:  # Ranks are written to from one thread each.
                self._sent += sum(lengths)

        transfer.write = counted

    def close(self) -> None:
        """See ``sides.Encoder``."""
        self._worker.close()


class Head:
    """See ``sides.Head``. Knows what the ranks' event channels say."""

    def __init__(self, setup: Setup) -> None:
        self.address = f"tcp://127.0.0.1:{setup.port}"
        self._client = ControlClient(_CONTROL_TIMEOUT_MS)
        self._inbox = EventInbox(self._client)
        self._ranks = setup.ranks
        self._item: Item | None = None
        self._landed: set[int] = set()

    def announce(self, item: Item, encode: str) -> None:
        """See ``sides.Head``."""
        self._item = item
        self._landed.clear()

    def ready(self) -> ECMooncakeConnectorMetadata | None:
        """See ``sides.Head``."""
        item = self._item
        assert item is not None
        for event in self._inbox.drain(self.address):
            if event["transfer_id"] == transfer_of(item):
                self._landed.add(int(event["shard"]))
        if len(self._landed) < self._ranks:
            return None
        load = ECMooncakeLoadSpec(
            mm_hash=item.hash,
            nbytes=item.nbytes,
            shape=(item.rows, WIDTH),
            dtype=_DTYPE,
            transfer_id=transfer_of(item),
        )
        return ECMooncakeConnectorMetadata(loads=[load])

    def wait(self) -> None:
        """See ``sides.Head``."""
        time.sleep(POLL_S)

    def finished(self) -> None:
        """Nothing is kept of a request."""

    def close(self) -> None:
        """See ``sides.Head``."""
        self._inbox.close()
        self._client.close()


class Rank:
    """See ``sides.Rank``."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self._worker = ECMooncakeWorker(host_config(setup, "ec_consumer"))
        self._worker.start_services()

    def load(self, what: object, cache: "dict[str, torch.Tensor]") -> None:
        """See ``sides.Rank``."""
        assert isinstance(what, ECMooncakeConnectorMetadata)
        self._worker.start_load_caches(what, cache)

    def dropped(self, hash: str, cache: "dict[str, torch.Tensor]") -> None:
        """Its region may be used again."""
        self._worker.start_load_caches(ECMooncakeConnectorMetadata(freed=[hash]), cache)
        self._worker.build_connector_worker_meta()

    def close(self) -> None:
        """See ``sides.Rank``."""
        self._worker.close()
