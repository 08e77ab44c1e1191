# SPDX-License-Identifier: Apache-2.0
"""The connector in a worker process: rows out of the host's encoder cache, and into it.

Owns what happens on the worker's main thread in a step: claims and rows are handed to the
rank's loop, loads of the step are published. Does not own transfers (``core``), sockets
(``runtime.rank``), memory (``memory``) or putting shards together (``reassembly``). Every
method runs on the worker's main thread and waits for no peer; a step that loads shards waits
for the engine's other ranks, which load them, too.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from epd_connector.config import Config
from epd_connector.core.send_events import Claim, Encoded
from epd_connector.hosts.vllm.plan import LoadSpec, StepPlan
from epd_connector.hosts.vllm.reassembly import Reassembly
from epd_connector.hosts.vllm.setup import (
    RankParts,
    gathers,
    make_rank,
    share_receive_slab,
    shares_slab,
)
from epd_connector.memory.tensors import Publisher, WhenRead
from epd_connector.rows import Layout
from epd_connector.runtime.rank import Loaded
from epd_connector.transport.workers import Job, Workers

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator

logger = logging.getLogger(__name__)


class RankAdapter:
    """The worker's side of the connector. ``start`` and ``close`` are idempotent."""

    def __init__(self, config: Config, vllm_config: "VllmConfig") -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._parts: RankParts | None = None
        self._publisher: Publisher | None = None
        self._reassembly: Reassembly | None = None
        self._readers = Workers("epd-read", threads=1, backlog=config.max_rooms)
        self._awaited: set[str] = set()

    def start(self) -> None:
        """Memory, transports and the loop, on ranks of the first pipeline stage.

        Raises:
            TransportError: memory or a transport cannot be had; the engine must not start.
            LinkError: the rank's port cannot be bound.

        """
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        if self._parts is not None or not get_pp_group().is_first_rank:
            return
        group = get_tp_group()
        if gathers(self._config, self._vllm_config):
            self._reassembly = Reassembly(group)
        try:
            self._start(group)
        finally:
            # Whatever became of this rank: were it to stay away, the others would wait for it.
            if self._reassembly is not None:
                self._reassembly.warm_up()

    def _start(self, group: "GroupCoordinator") -> None:
        config, host = self._config, self._vllm_config
        shared = share_receive_slab(config, group) if shares_slab(config, host) else None
        try:
            parts = make_rank(config, host, group.rank_in_group, group.device, shared)
        except Exception:
            if shared is not None:
                shared.close()
            raise
        self._parts = parts
        if parts.receive_slab is not None:
            self._publisher = Publisher(parts.receive_slab, group.device)
        parts.runtime.start()
        names = ", ".join(parts.transports)
        logger.info("EPD rank %d is up; transports: %s", group.rank_in_group, names)

    def start_save_caches(self, plan: StepPlan, encoder_cache: dict[str, "torch.Tensor"]) -> None:
        """Before the tower runs: claims of the step, and rows that are there already."""
        if self._parts is None:
            return
        self._awaited.difference_update(plan.unclaimed)
        for claim in plan.claims:
            if not self._parts.runtime.post(Claim(claim.room, claim.hash, claim.rows)):
                logger.error("room %016x is lost: the rank's queue is full", claim.room)
            elif claim.hash in encoder_cache:
                self._hand_over(claim.hash, encoder_cache[claim.hash])
            else:
                self._awaited.add(claim.hash)

    def save_caches(self, encoder_cache: dict[str, "torch.Tensor"], mm_hash: str) -> None:
        """The tower has made the rows of ``mm_hash``."""
        if mm_hash in self._awaited:
            self._awaited.discard(mm_hash)
            self._hand_over(mm_hash, encoder_cache[mm_hash])

    def _hand_over(self, hash: str, tensor: "torch.Tensor") -> None:
        """Rows go to the loop, which stages them when there is memory."""
        assert self._parts is not None
        assert self._parts.rows is not None
        rows, width = tensor.shape
        token = self._parts.rows.hold(tensor)
        event = Encoded(
            hash=hash,
            token=token,
            rows=rows,
            width=width,
            dtype=str(tensor.dtype).removeprefix("torch."),
            nbytes=rows * width * tensor.dtype.itemsize,
            lendable=self._parts.rows.lendable(tensor),
        )
        if not self._parts.runtime.post(event):
            self._parts.rows.drop(token)
            logger.error("item %s is lost: the rank's queue is full", hash[:16])

    def start_load_caches(self, plan: StepPlan, encoder_cache: dict[str, "torch.Tensor"]) -> None:
        """Before embeddings are gathered: put the step's received items into the cache."""
        publisher = self._publisher
        if publisher is None:  # No rank of the first pipeline stage: it reads no embeddings.
            return
        shards = [load for load in plan.loads if load.layout is Layout.SHARDS]
        if shards:
            assert self._reassembly is not None
            wholes = self._reassembly.assemble(publisher, shards, self._when_read)
            encoder_cache.update(zip((load.hash for load in shards), wholes, strict=True))
        for load in plan.loads:
            if load.layout is not Layout.SHARDS:
                encoder_cache[load.hash] = publisher.publish(
                    load.offset, load.rows, load.width, load.dtype, self._when_read(load)
                )

    def _when_read(self, load: LoadSpec) -> WhenRead:
        return partial(self._report_read, load.room)

    def _report_read(self, room: int, wait: Callable[[], None]) -> None:
        """Tells the loop, as soon as nothing reads the region for this load any more."""
        assert self._parts is not None
        runtime = self._parts.runtime

        def run() -> None:
            try:
                wait()
            except Exception:
                # Who knows what still reads the region: it stays as it is.
                logger.exception("the load of room %016x does not end", room)
                return
            runtime.post(Loaded(room))

        if not self._readers.submit(0, Job(run=run, abandon=lambda: None)):
            run()

    def close(self) -> None:
        """Withdraws what is open, ends threads, frees memory. Bounded by shutdown_timeout_s."""
        parts, self._parts = self._parts, None
        if parts is None:
            return
        timeout_s = self._config.shutdown_timeout_s
        parts.runtime.close(timeout_s)
        self._readers.close(timeout_s)
        parts.free()
