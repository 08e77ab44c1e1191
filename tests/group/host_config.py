# SPDX-License-Identifier: Apache-2.0
"""What the connector reads of the host's configuration, for an engine of ``ranks`` ranks."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from epd_connector.config import Config
from epd_connector.hosts.vllm import setup

WIDTH = 64
WIDTHS = {"image": WIDTH, "video": 3 * WIDTH}
"""Elements per row; a video's are those of a DeepStack model with two extra levels."""
SLAB = 8 << 20


@dataclass
class HfConfig:
    def to_dict(self) -> dict[str, object]:
        return {"model_type": "tiny_vl"}


@dataclass
class ModelConfig:
    dtype: torch.dtype
    model: str = "/not/there"
    hf_config: HfConfig = field(default_factory=HfConfig)
    revision: str | None = None
    multimodal_config: None = None

    def get_hidden_size(self) -> int:
        return WIDTH


@dataclass
class Parallel:
    tensor_parallel_size: int
    data_parallel_index: int = 0
    nnodes_within_dp: int = 1


@dataclass
class Scheduling:
    max_num_encoder_input_tokens: int = 8192


@dataclass
class Transfer:
    ec_role: str
    ec_connector_extra_config: dict[str, object]
    engine_id: str
    ec_ip: str = "127.0.0.1"
    ec_port: int = 14579
    mm_encoder_output_widths: dict[str, int] = field(default_factory=lambda: dict(WIDTHS))


@dataclass
class HostConfig:
    """Where the connector finds them in the host's ``VllmConfig``."""

    ec_transfer_config: Transfer
    parallel_config: Parallel
    model_config: ModelConfig
    scheduler_config: Scheduling = field(default_factory=Scheduling)

    def read(self) -> Config:
        """The connector's own configuration. Ports are free ones unless ``control_port`` is set."""
        config = setup.read_config(self)
        if "control_port" in self.ec_transfer_config.ec_connector_extra_config:
            return config
        return dataclasses.replace(config, control_port=0)


def host_config(
    role: str, ranks: int, engine: str, extra: Mapping[str, object], dtype: str = "bfloat16"
) -> HostConfig:
    """``extra``: keys of the connector's configuration."""
    small: dict[str, object] = {"send_slab_bytes": SLAB, "receive_slab_bytes": SLAB}
    return HostConfig(
        Transfer(role, {**small, **extra}, engine),
        Parallel(ranks),
        ModelConfig(getattr(torch, dtype)),
    )
