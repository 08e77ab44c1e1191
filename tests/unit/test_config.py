# SPDX-License-Identifier: Apache-2.0
"""What an operator may write, what is refused and how, and that the document tells the truth."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_connector import config_values as values
from epd_connector.config import Config, OnFailure, Role, Shard, SlabDevice, defaults, keys
from epd_connector.errors import ConfigError

DOC = Path(__file__).parents[2] / "docs" / "configuration.md"
SECRET = "correct horse battery staple"


def read(role: Role = Role.BOTH, /, **extra: object) -> Config:
    return Config.from_extra(
        extra, role=role, default_host="10.0.0.1", default_port=role.default_port()
    )


def refused(role: Role = Role.BOTH, /, **extra: object) -> str:
    with pytest.raises(ConfigError) as caught:
        read(role, **extra)
    return str(caught.value)


# --- defaults and good values


@pytest.mark.parametrize("role", list(Role))
def test_nothing_has_to_be_set(role: Role) -> None:
    config = read(role)
    assert config.control_host == "10.0.0.1"
    assert config.listen_host == "10.0.0.1"
    assert config.key_bytes is None
    for name, default in defaults().items():
        assert getattr(config, name) == default


def test_default_ports_of_two_engines_on_one_host_differ() -> None:
    assert Role.PRODUCER.default_port() == 14579
    assert Role.BOTH.default_port(2000) == 2000
    assert Role.CONSUMER.default_port() == 14679


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1 << 20, 1 << 20),
        ("1048576", 1 << 20),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        (" 2GiB ", 2 << 30),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: object, nbytes: int) -> None:
    assert read(receive_slab_bytes=text).receive_slab_bytes == nbytes


def test_whole_numbers_are_seconds_too() -> None:
    timeout = read(offer_timeout_s=90).offer_timeout_s
    assert (timeout, type(timeout)) == (90.0, float)


def test_choices_become_enums() -> None:
    config = read(shard="never", slab_device="cpu", on_failure="encode_locally")
    assert config.shard is Shard.NEVER
    assert config.slab_device is SlabDevice.CPU
    assert config.on_failure is OnFailure.ENCODE_LOCALLY


@pytest.mark.parametrize(
    ("host", "kept"),
    [("::1", "::1"), ("[fd00::1]", "fd00::1"), ("gpu-7.example", "gpu-7.example")],
)
def test_hosts(host: str, kept: str) -> None:
    assert read(control_host=host).control_host == kept


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "*", "[::]", "10.0.0.9"])
def test_bind_host_may_be_a_wildcard(bind: str) -> None:
    config = read(bind_host=bind)
    assert config.control_host == "10.0.0.1"
    assert config.listen_host == bind.strip("[]")


def test_direct_construction_may_take_any_free_port() -> None:
    config = Config(role=Role.PRODUCER, control_host="127.0.0.1", control_port=0)
    assert config.ports(1, 2).ranks == (0, 0)


def test_validated_on_every_construction() -> None:
    with pytest.raises(ConfigError, match="max_rooms is 0"):
        dataclasses.replace(read(), max_rooms=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().max_rooms = 1  # type: ignore[misc]


# --- values that are refused


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("transport", "", "must be a name"),
        ("transport", 1, "must be a name"),
        ("mooncake_protocol", "udp", "must be one of tcp, rdma"),
        ("mooncake_device", None, "must be text"),
        ("send_slab_bytes", 1 << 19, "must be from 1MiB to 1TiB"),
        ("send_slab_bytes", "512MB", "must be a whole number of bytes, or text in KiB"),
        ("send_slab_bytes", "1.0000001MiB", "must be a whole number of bytes, or text in KiB"),
        ("receive_slab_bytes", True, "must be a whole number of bytes, or text in KiB"),
        ("receive_slab_bytes", 1e9, "must be a whole number of bytes, or text in KiB"),
        ("receive_slab_bytes", "-1MiB", "must be a whole number of bytes, or text in KiB"),
        ("slab_device", "gpu", "must be one of auto, cpu, cuda"),
        ("shard", True, "must be one of auto, always, never"),
        ("write_parallelism", 0, "must be a whole number from 1 to 64"),
        ("write_parallelism", True, "must be a whole number from 1 to 64"),
        ("write_parallelism", "4", "must be a whole number from 1 to 64"),
        ("write_parallelism", 4.0, "must be a whole number from 1 to 64"),
        ("offer_timeout_s", 0, "must be a number of seconds from 0.1 to 86400"),
        ("offer_timeout_s", True, "must be a number of seconds from 0.1 to 86400"),
        ("offer_timeout_s", float("nan"), "must be a number of seconds from 0.1 to 86400"),
        ("offer_timeout_s", float("inf"), "must be a number of seconds from 0.1 to 86400"),
        ("offer_timeout_s", 10**400, "must be a number of seconds from 0.1 to 86400"),
        ("on_failure", "retry", "must be one of fail, encode_locally"),
        ("control_host", "", "must be a host name"),
        ("control_host", "tcp://10.0.0.1", "must be a host name"),
        ("control_host", "10.0.0.1:80", "must be a host name"),
        ("control_host", "a" * 254, "must be a host name"),
        ("control_host", "0.0.0.0", "set bind_host"),
        ("control_host", "::", "set bind_host"),
        ("control_host", "*", "set bind_host"),
        ("control_port", 65536, "must be a whole number from 1 to 65535"),
        ("control_port", False, "must be a whole number from 1 to 65535"),
        ("control_port", 0, "must be from 1 to 65535"),
        ("bind_host", "10.0.0.1/24", "must be a host name"),
        ("max_rooms", 1 << 21, "must be a whole number from 16 to 1048576"),
    ],
)
def test_error_names_key_value_and_range(name: str, value: object, allowed: str) -> None:
    message = refused(**{name: value})
    assert message.startswith(f"{name} is {value!r}:")
    assert allowed in message


def test_wildcard_default_host_is_refused_unless_replaced() -> None:
    with pytest.raises(ConfigError, match=r"control_host is '0\.0\.0\.0'"):
        Config.from_extra({}, default_host="0.0.0.0", role=Role.BOTH, default_port=14579)
    good = Config.from_extra(
        {"control_host": "::1"}, default_host="0.0.0.0", role=Role.BOTH, default_port=14579
    )
    assert good.control_host == "::1"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("sharding", "shard"),
        ("recieve_slab_bytes", "receive_slab_bytes"),
        ("offer_timeout", "offer_timeout_s"),
        ("authkey", "auth_key"),
    ],
)
def test_unknown_key_names_the_nearest_and_all(wrong: str, right: str) -> None:
    message = refused(**{wrong: 1})
    assert f"unknown key {wrong!r}" in message
    assert f"did you mean {right}?" in message
    assert all(name in message for name in keys())


@pytest.mark.parametrize("name", ["role", "_key_bytes", "xyzzy"])
def test_what_is_no_key_cannot_be_set(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{name}'"):
        Config.from_extra({name: 1}, role=Role.BOTH, default_host="::1", default_port=1)


@given(st.dictionaries(st.sampled_from(sorted(keys())), st.text() | st.integers() | st.none()))
def test_bad_input_is_only_ever_a_config_error(extra: dict[str, object]) -> None:
    try:
        config = Config.from_extra(extra, role=Role.BOTH, default_host="::1", default_port=1)
    except ConfigError:
        return
    assert dataclasses.replace(config) == config


# --- keys that depend on one another


@pytest.mark.parametrize("heartbeat", [2.5, 3, 5])
def test_heartbeat_must_fit_twice_into_peer_timeout(heartbeat: float) -> None:
    message = refused(heartbeat_s=heartbeat)
    assert "heartbeat_s is" in message
    assert "peer_timeout_s 5" in message
    assert read(heartbeat_s=heartbeat, peer_timeout_s=11).heartbeat_s == heartbeat


def test_receiver_may_not_outwait_the_offer() -> None:
    assert "raise offer_timeout_s" in refused(receive_timeout_s=121)
    assert read(receive_timeout_s=121, offer_timeout_s=130).receive_timeout_s == 121
    assert read(Role.CONSUMER, receive_timeout_s=121).receive_timeout_s == 121
    assert read(Role.PRODUCER, offer_timeout_s=5).offer_timeout_s == 5


def test_resolving_is_part_of_receiving() -> None:
    assert "lower resolve_timeout_s" in refused(Role.CONSUMER, receive_timeout_s=4)
    assert read(Role.CONSUMER, receive_timeout_s=4, resolve_timeout_s=2).receive_timeout_s == 4


def test_encode_locally_needs_a_receiver() -> None:
    message = refused(Role.PRODUCER, on_failure="encode_locally")
    assert "ec_producer" in message
    assert "set it on the consumer" in message
    assert read(Role.CONSUMER, on_failure="encode_locally").on_failure is OnFailure.ENCODE_LOCALLY


def test_shared_memory_is_not_on_a_gpu() -> None:
    assert "transport to mooncake" in refused(transport="shm", slab_device="cuda")
    assert read(transport="mooncake", slab_device="cuda").slab_device is SlabDevice.CUDA


# --- the key


def test_auth_key_is_never_shown() -> None:
    config = read(auth_key=SECRET)
    assert config.key_bytes == SECRET.encode()
    assert SECRET not in repr(config)
    assert SECRET not in refused(auth_key=SECRET, auth_key_file="/somewhere")
    for wrong in ["short secret", 1234567890123456]:
        message = refused(auth_key=wrong)
        assert message.startswith("auth_key is (hidden): must")
        assert str(wrong) not in message


def test_auth_key_file_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET + "\n")
    config = read(auth_key_file=str(file))
    file.unlink()
    assert config.key_bytes == SECRET.encode()
    assert SECRET not in repr(config)


@pytest.mark.parametrize(("content", "count"), [(b"short\n", 5), (b"", 0), (b"x" * 5000, 4097)])
def test_auth_key_file_of_a_wrong_length(tmp_path: Path, content: bytes, count: int) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    assert f"has {count} bytes, but must have from 16 to 4096" in refused(auth_key_file=str(file))


def test_auth_key_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refused(auth_key_file=str(tmp_path / "none"))
    assert "Is a directory" in refused(auth_key_file=str(tmp_path))


# --- ports


def test_port_plan() -> None:
    config = read(control_port=1000)
    assert config.ports(0, 1) == (1000, (1001,))
    assert config.ports(0, 2) == (1000, (1001, 1002))
    assert config.ports(3, 4) == (1015, (1016, 1017, 1018, 1019))


@given(st.integers(1, 8), st.integers(1, 16))
def test_port_blocks_of_data_parallel_engines_do_not_overlap(tp_size: int, dp_size: int) -> None:
    plans = [read(control_port=2000).ports(dp_rank, tp_size) for dp_rank in range(dp_size)]
    used = [port for plan in plans for port in (plan.head, *plan.ranks)]
    assert used == list(range(2000, 2000 + dp_size * (1 + tp_size)))


def test_ports_end_at_65535() -> None:
    config = read(control_port=65533)
    assert config.ports(0, 2).ranks == (65534, 65535)
    with pytest.raises(ConfigError, match="lower control_port by at least 1"):
        config.ports(0, 3)


# --- shape of the module


def test_sizes_are_shown_exactly() -> None:
    shown = [values.show_size(nbytes) for nbytes in (1, 1536, 1 << 20, 3 << 29, 1 << 40)]
    assert shown == ["1B", "1536B", "1MiB", "1536MiB", "1TiB"]


def test_import_is_light() -> None:
    code = (
        "import sys, epd_connector.config, epd_connector.stats; "
        "print(*{'torch', 'vllm', 'zmq', 'mooncake'} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == ""


# --- the document

ROW = re.compile(r"^\| `(?P<name>\w+)` \| (?P<default>[^|]+) \|(?P<unit>[^|]*)\|", re.MULTILINE)


def documented() -> dict[str, tuple[str, str]]:
    rows = ROW.findall(DOC.read_text(encoding="utf-8"))
    assert len(rows) == len({name for name, _, _ in rows}), "a key is documented twice"
    return {name: (default.strip(), unit.strip()) for name, default, unit in rows}


def test_document_and_code_have_the_same_keys() -> None:
    assert list(documented()) == list(keys())


def test_document_and_code_have_the_same_defaults_and_units() -> None:
    fixed = defaults()
    for name, (default, unit) in documented().items():
        assert unit == keys()[name].unit, name
        if name not in fixed:
            assert not default.startswith("`"), f"{name} has no fixed default"
            continue
        assert re.fullmatch(r"`[^`]*`|empty", default), name
        written: object = "" if default == "empty" else default.strip("`")
        if isinstance(fixed[name], bool):
            written = {"true": True, "false": False}[str(written)]
        elif isinstance(fixed[name], float | int) and unit != "bytes":
            written = float(str(written))
        elif unit == "bytes":
            written = keys()[name].parse(written)
        assert written == fixed[name], name


def test_examples_in_the_document_are_accepted() -> None:
    examples = re.findall(r"'({.ec_connector.*?})'", DOC.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) >= 6
    for example in examples:
        check_example(example)


def check_example(example: str) -> None:
    transfer = json.loads(example)
    role = Role(transfer["ec_role"])
    extra = dict(transfer.get("ec_connector_extra_config", {}))
    # The key file of an example exists on the reader's machine only.
    extra.pop("auth_key_file", None)
    config = Config.from_extra(
        extra,
        role=role,
        default_host=transfer.get("ec_ip", "127.0.0.1"),
        default_port=role.default_port(transfer.get("ec_port", 14579)),
    )
    assert transfer["ec_connector"] == "EPDConnector"
    assert config.ports(0, 2)
