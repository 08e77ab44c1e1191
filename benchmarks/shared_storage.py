# SPDX-License-Identifier: Apache-2.0
"""The host's own ECExampleConnector: items as files in a directory that both engines see.

The connector is the host's, unchanged. It has no word for "the item is there" but that its
file exists, which it does before it is complete; here the encode engine's word that the file
is written comes first, as it does where a router waits for the encode engine's answer.
"""

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import safetensors.torch  # noqa: F401  the host's connector uses it and does not import it
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.example_connector import (
    ECExampleConnector,
    ECExampleConnectorMetadata,
    MMMeta,
)

from benchmarks.items import Item
from benchmarks.sides import POLL_S, Setup

if TYPE_CHECKING:
    import torch

_DONE = ".done"


def connector(setup: Setup, role: str) -> ECExampleConnector:
    """The host's connector for a worker of ``role``."""
    from vllm.config import ECTransferConfig

    transfer = ECTransferConfig(
        ec_connector="ECExampleConnector",
        ec_role=role,
        ec_connector_extra_config={"shared_storage_path": setup.scratch},
    )
    # Only its scheduler's side reads what the model is.
    model = SimpleNamespace(hf_config=None, multimodal_config=None)
    host = SimpleNamespace(ec_transfer_config=transfer, model_config=model)
    return ECExampleConnector(host, ECConnectorRole.WORKER)


class Encoder:
    """See ``sides.Encoder``."""

    address = ""

    def __init__(self, setup: Setup) -> None:
        self._connector = connector(setup, "ec_producer")
        self._scratch = Path(setup.scratch)
        self._sent = 0

    def announce(self, item: Item, prefill: str) -> None:
        """Nothing is told beforehand."""

    def hand_over(self, cache: "dict[str, torch.Tensor]", hash: str) -> None:
        """See ``sides.Encoder``."""
        self._connector.save_caches(cache, hash)
        self._sent += cache[hash].nbytes
        (self._scratch / f"{hash}{_DONE}").touch()

    def bytes_sent(self) -> int:
        """What was written to files."""
        return self._sent

    def close(self) -> None:
        """It holds nothing."""


class Head:
    """See ``sides.Head``."""

    address = ""

    def __init__(self, setup: Setup) -> None:
        self._scratch = Path(setup.scratch)
        self._item: Item | None = None

    def announce(self, item: Item, encode: str) -> None:
        """See ``sides.Head``."""
        self._item = item

    def ready(self) -> ECExampleConnectorMetadata | None:
        """See ``sides.Head``."""
        assert self._item is not None
        if not (self._scratch / f"{self._item.hash}{_DONE}").exists():
            return None
        load = ECExampleConnectorMetadata()
        load.add_mm_data(MMMeta.make_meta(self._item.hash, self._item.rows))
        return load

    def wait(self) -> None:
        """See ``sides.Head``."""
        time.sleep(POLL_S)

    def finished(self) -> None:
        """Files are kept for ever, by design; here they would fill the disk."""
        assert self._item is not None
        shutil.rmtree(self._scratch / self._item.hash)
        (self._scratch / f"{self._item.hash}{_DONE}").unlink()

    def close(self) -> None:
        """It holds nothing."""


class Rank:
    """See ``sides.Rank``."""

    def __init__(self, setup: Setup, rank: int) -> None:
        self._connector = connector(setup, "ec_consumer")

    def load(self, what: object, cache: "dict[str, torch.Tensor]") -> None:
        """See ``sides.Rank``."""
        assert isinstance(what, ECExampleConnectorMetadata)
        self._connector.bind_connector_metadata(what)
        self._connector.start_load_caches(cache)

    def dropped(self, hash: str, cache: "dict[str, torch.Tensor]") -> None:
        """It keeps nothing."""

    def close(self) -> None:
        """It holds nothing."""
