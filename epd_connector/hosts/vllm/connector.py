# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM finds by the name ``EPDConnector``: routes each hook to its owner.

The host makes one instance in the scheduler process (a head) and one in each worker (a
rank). Owns nothing but that routing; it keeps to the host's ``ECConnectorBase``.
"""

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from epd_connector.hosts.vllm.metrics import EPDPromMetrics, EPDStats
from epd_connector.hosts.vllm.plan import StepPlan
from epd_connector.hosts.vllm.setup import read_config
from epd_connector.hosts.vllm.version import check

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from epd_connector.hosts.vllm.head import HeadAdapter
    from epd_connector.hosts.vllm.rank import RankAdapter

logger = logging.getLogger(__name__)


class EPDConnector(ECConnectorBase):
    """Encode/prefill disaggregation: see the package's documentation.

    Raises, when the host makes it: HostVersionError, ConfigError, LinkError,
    TransportError; each names what is wrong and the remedy, and the engine does not start.
    """

    def __init__(self, vllm_config: "VllmConfig", role: ECConnectorRole) -> None:
        import vllm

        check(vllm.__version__)
        super().__init__(vllm_config=vllm_config, role=role)
        self._config = read_config(vllm_config)
        self._head: HeadAdapter | None = None
        self._rank: RankAdapter | None = None
        if role is ECConnectorRole.SCHEDULER:
            self._head = self._start_head(vllm_config)
        else:
            self._rank = self._make_rank(vllm_config)

    def _start_head(self, vllm_config: "VllmConfig") -> "HeadAdapter":
        from epd_connector.hosts.vllm.head import HeadAdapter
        from epd_connector.hosts.vllm.media import MediaFields
        from epd_connector.hosts.vllm.setup import addresses, make_head

        runtime = make_head(self._config, vllm_config)
        runtime.start()
        address = addresses(self._config, vllm_config, 0).advertised.removeprefix("tcp://")
        logger.info("EPD %s: control address %s", self._config.role.value, address)
        media = MediaFields(vllm_config.model_config)
        return HeadAdapter(self._config, runtime, media, address)

    def _make_rank(self, vllm_config: "VllmConfig") -> "RankAdapter":
        from epd_connector.hosts.vllm.rank import RankAdapter

        return RankAdapter(self._config, vllm_config)

    def shutdown(self) -> None:
        """Ends what this instance started. Bounded by shutdown_timeout_s. Idempotent."""
        if self._head is not None:
            self._head.close()
        if self._rank is not None:
            self._rank.close()

    # --- worker -----------------------------------------------------------------------

    def start_worker_services(self) -> None:
        """The model is loaded: make memory and sockets, and go on the air."""
        self._as_rank().start()

    def start_save_caches(self, **kwargs: Any) -> None:
        """See ``RankAdapter.start_save_caches``."""
        self._as_rank().start_save_caches(self._plan(), kwargs["encoder_cache"])

    def save_caches(
        self, encoder_cache: dict[str, "torch.Tensor"], mm_hash: str, **kwargs: Any
    ) -> None:
        """See ``RankAdapter.save_caches``."""
        self._as_rank().save_caches(encoder_cache, mm_hash)

    def start_load_caches(self, encoder_cache: dict[str, "torch.Tensor"], **kwargs: Any) -> None:
        """See ``RankAdapter.start_load_caches``."""
        self._as_rank().start_load_caches(self._plan(), encoder_cache)

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    def _as_rank(self) -> "RankAdapter":
        assert self._rank is not None, "a worker's hook was called in the scheduler"
        return self._rank

    # --- scheduler --------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """See ``HeadAdapter.has_cache_item``."""
        return self._as_head().has_cache_item(identifier)

    def ensure_cache_available(self, request: "Request", num_computed_tokens: int) -> bool:
        """See ``HeadAdapter.ensure_cache_available``."""
        return self._as_head().ensure_cache_available(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", index: int) -> None:
        """See ``HeadAdapter.update_state_after_alloc``."""
        self._as_head().update_state_after_alloc(request, index)

    def update_state_after_free(self, request: "Request", index: int) -> None:
        """See ``HeadAdapter.update_state_after_free``."""
        self._as_head().update_state_after_free(request, index)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ECConnectorMetadata:
        """See ``HeadAdapter.build_connector_meta``."""
        return self._as_head().build_connector_meta(scheduler_output)

    def take_unavailable_requests(self) -> set[str]:
        """See ``HeadAdapter.take_unavailable_requests``."""
        return self._as_head().take_unavailable_requests()

    def request_finished(self, request: "Request") -> tuple[bool, dict[str, Any] | None]:
        """See ``HeadAdapter.request_finished``; nothing is ever freed late for it."""
        return False, self._as_head().request_finished(request)

    def _as_head(self) -> "HeadAdapter":
        assert self._head is not None, "a scheduler's hook was called in a worker"
        return self._head

    # --- figures ----------------------------------------------------------------------

    def get_ec_connector_stats(self) -> "ECConnectorStats | None":
        """What the engine counted since the last call; the head speaks for its ranks."""
        if self._head is None:
            return None
        counted = self._head.take_counted()
        return None if counted is None else EPDStats.of(counted)

    @classmethod
    def build_ec_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "ECConnectorStats | None":
        """Statistics as they came from the engine process."""
        return EPDStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> EPDPromMetrics:
        """The connector's Prometheus metrics."""
        return EPDPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
