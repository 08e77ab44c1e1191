# SPDX-License-Identifier: Apache-2.0
"""From the host's configuration to heads and ranks: what is chosen, and what is refused."""

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from epd_connector.config import Config
from epd_connector.errors import ConfigError, TransportError
from epd_connector.hosts.vllm import identity, setup
from epd_connector.hosts.vllm.setup import RankParts

CPU = torch.device("cpu")


@dataclass
class HfConfig:
    """What is read of a model's own configuration."""

    def to_dict(self) -> dict[str, object]:
        return {"model_type": "tiny_vl"}


@dataclass
class MultiModalConfig:
    """What is read of the host's multimodal configuration."""

    mm_processor_cache_type: str = "lru"


@dataclass
class ModelConfig:
    """What is read of the host's model configuration."""

    model: str = "/not/there"
    hf_config: HfConfig = field(default_factory=HfConfig)
    dtype: torch.dtype = torch.bfloat16
    revision: str | None = None
    multimodal_config: MultiModalConfig = field(default_factory=MultiModalConfig)

    def get_hidden_size(self) -> int:
        return 64


@dataclass
class Parallel:
    """What is read of the host's parallel configuration."""

    tensor_parallel_size: int = 1
    data_parallel_index: int = 0
    nnodes_within_dp: int = 1


@dataclass
class Transfer:
    """What is read of the host's ``ec_transfer_config``."""

    ec_role: str = "ec_consumer"
    ec_connector_extra_config: dict[str, object] = field(default_factory=dict)
    ec_ip: str = "127.0.0.1"
    ec_port: int = 14579
    engine_id: str = "engine"
    mm_encoder_output_widths: dict[str, int] = field(default_factory=lambda: {"image": 64})


@dataclass
class Scheduling:
    """What is read of the host's scheduler configuration."""

    max_num_encoder_input_tokens: int = 8


@dataclass
class Host:
    """The host's configuration."""

    ec_transfer_config: Transfer = field(default_factory=Transfer)
    parallel_config: Parallel = field(default_factory=Parallel)
    model_config: ModelConfig = field(default_factory=ModelConfig)
    scheduler_config: Scheduling = field(default_factory=Scheduling)

    def config(self) -> Config:
        return setup.read_config(self)


def host(
    role: str = "ec_consumer", ranks: int = 1, engine: str = "engine", **extra: object
) -> Host:
    small = {"send_slab_bytes": 1 << 20, "receive_slab_bytes": 1 << 20}
    transfer = Transfer(role, {**small, **extra}, engine_id=engine)
    return Host(transfer, Parallel(ranks))


class Made:
    """Ranks of a test, closed with it."""

    def __init__(self) -> None:
        self.parts: list[RankParts] = []

    def rank(self, host: Host, rank: int = 0) -> RankParts:
        self.parts.append(setup.make_rank(host.config(), host, rank, CPU))
        return self.parts[-1]

    def close(self) -> None:
        for parts in self.parts:
            parts.runtime.close(1)
            for slab in (parts.send_slab, parts.receive_slab):
                if slab is not None:
                    slab.close()


@pytest.fixture
def made() -> Iterator[Made]:
    made = Made()
    yield made
    made.close()


@pytest.fixture
def no_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mooncake", "mooncake.engine"):
        monkeypatch.setitem(sys.modules, name, None)


# --- transports -----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_mooncake")
def test_auto_goes_on_without_mooncake(made: Made) -> None:
    assert list(made.rank(host()).transports) == ["shm"]


@pytest.mark.usefixtures("no_mooncake")
def test_what_was_asked_for_and_cannot_be_used_is_refused_with_the_remedy() -> None:
    asking = host(transport="mooncake")
    with pytest.raises(TransportError, match=r"epd-connector\[mooncake\]"):
        setup.make_rank(asking.config(), asking, 0, CPU)


def test_an_unknown_transport_is_refused_with_those_that_are_known() -> None:
    asking = host(transport="pigeon")
    with pytest.raises(TransportError, match=r"'pigeon'.*mooncake, shm"):
        setup.make_rank(asking.config(), asking, 0, CPU)


# --- ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "sends", "receives"),
    [("ec_producer", True, False), ("ec_consumer", False, True), ("ec_both", True, True)],
)
def test_a_rank_has_the_slabs_of_its_role(
    made: Made, role: str, sends: bool, receives: bool
) -> None:
    parts = made.rank(host(role, transport="shm"))
    assert (parts.send_slab is not None, parts.receive_slab is not None) == (sends, receives)
    assert (parts.rows is not None) == sends
    if parts.receive_slab is not None:
        assert Path(str(parts.receive_slab.path)).exists()
    if parts.send_slab is not None:
        assert parts.send_slab.path is None


def test_device_slabs_on_the_cpu_are_refused_with_the_remedy() -> None:
    asking = host(transport="mooncake", slab_device="cuda")
    with pytest.raises(ConfigError, match=r"slab_device is cuda.*cpu.*set slab_device to auto"):
        setup.make_rank(asking.config(), asking, 0, CPU)


@pytest.mark.parametrize(
    ("role", "ranks", "choices", "shares", "gathers"),
    [
        ("ec_consumer", 2, {}, True, False),
        ("ec_both", 2, {"transport": "mooncake"}, True, False),
        ("ec_consumer", 2, {"share_slab": False}, False, True),
        ("ec_consumer", 2, {"shard": "always"}, False, True),
        ("ec_consumer", 2, {"shard": "never"}, False, False),
        ("ec_consumer", 2, {"transport": "mooncake", "slab_device": "cuda"}, False, True),
        ("ec_consumer", 1, {"shard": "always"}, False, False),
        ("ec_producer", 2, {}, False, False),
    ],
)
def test_which_engines_share_a_slab_and_which_gather(
    role: str, ranks: int, choices: dict[str, object], shares: bool, gathers: bool
) -> None:
    engine = host(role, ranks, "engine", **choices)
    config = engine.config()
    assert setup.shares_slab(config, engine) == shares
    assert setup.gathers(config, engine) == gathers


def test_ranks_on_several_hosts_share_no_slab() -> None:
    engine = host(ranks=2)
    engine.parallel_config.nnodes_within_dp = 2
    assert not setup.shares_slab(engine.config(), engine)
    assert setup.gathers(engine.config(), engine)


# --- addresses ------------------------------------------------------------------------------


def test_heads_and_ranks_of_one_engine_find_each_other_and_no_others() -> None:
    one, two = host(ranks=2, control_port=7000), host(ranks=2, control_port=7000)
    first = [setup.addresses(one.config(), one, rank) for rank in range(2)]
    assert first[0].control == first[0].advertised == "tcp://127.0.0.1:7000"
    assert [place.rank_listen for place in first] == [
        "tcp://127.0.0.1:7001",
        "tcp://127.0.0.1:7002",
    ]
    assert {place.head_for_ranks for place in first} == {first[0].link}
    assert identity.link_token(one) == identity.link_token(two) > 0
    other = host(engine="another")
    assert identity.link_token(other) != identity.link_token(one)
    assert setup.addresses(other.config(), other, 0).link != first[0].link
    two.parallel_config.data_parallel_index = 1
    assert identity.link_token(two) != identity.link_token(one)
    assert setup.addresses(two.config(), two, 0).control == "tcp://127.0.0.1:7003"


def test_where_it_listens_and_what_peers_are_told_may_differ() -> None:
    asking = host(control_port=7000, control_host="fd00::7", bind_host="::")
    place = setup.addresses(asking.config(), asking, 0)
    assert (place.control, place.advertised) == ("tcp://[::]:7000", "tcp://[fd00::7]:7000")
    assert (place.rank_listen, place.rank_host) == ("tcp://[::]:7001", "fd00::7")


def test_consumers_and_producers_of_one_host_have_ports_of_their_own() -> None:
    places = [setup.addresses(h.config(), h, 0) for h in (host("ec_producer"), host())]
    assert places[0].control == "tcp://127.0.0.1:14579"
    assert places[1].control == "tcp://127.0.0.1:14679"


# --- heads ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer", "ec_both"])
def test_making_a_head_binds_and_starts_nothing(role: str) -> None:
    before = set(threading.enumerate())
    made = host(role)
    runtime = setup.make_head(made.config(), made)
    assert runtime.control == ""
    assert {t for t in threading.enumerate() if t.name == "epd-head"} <= before
    runtime.close(0)


def test_every_start_is_another_incarnation() -> None:
    made = {identity.new_incarnation() for _ in range(100)}
    assert len(made) == 100
    assert all(0 < incarnation < 1 << 63 for incarnation in made)


# --- what must not be -----------------------------------------------------------------------


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer", "ec_both"])
def test_a_processor_cache_that_hides_the_pixels_is_refused(role: str) -> None:
    vllm_config = host(role)
    vllm_config.model_config.multimodal_config.mm_processor_cache_type = "shm"
    with pytest.raises(ConfigError, match=r"shm: .*--mm-processor-cache-type lru"):
        setup.read_config(vllm_config)


def test_the_name_of_the_socket_does_not_tell_the_token() -> None:
    vllm_config = host()
    link = setup.addresses(vllm_config.config(), vllm_config, 0).link
    assert f"{identity.link_token(vllm_config):x}" not in link
    assert "engine" not in link


def test_other_devices_are_refused() -> None:
    vllm_config = host()
    with pytest.raises(ConfigError, match="xpu"):
        setup.make_rank(vllm_config.config(), vllm_config, 0, torch.device("xpu"))
