# SPDX-License-Identifier: Apache-2.0
"""`epd doctor`: judgements over made-up facts, and one look at this machine."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from epd_connector.cli import checks, doctor, facts
from epd_connector.cli.checks import (
    Facts,
    Finding,
    Hooks,
    Level,
    PortTrial,
    SharedMemory,
)
from epd_connector.cli.main import main
from epd_connector.config import Config, Role
from epd_connector.errors import HostVersionError
from epd_connector.hosts.vllm import version
from epd_connector.hosts.vllm.version import Installed

GIB = 1 << 30
GOOD = Facts(
    python=(3, 11),
    hosts=(Installed("vllm", "0.32.0"),),
    hooks=Hooks(),
    plugin_registered=True,
    transports={"shm": None, "mooncake": None},
    shared_memory=SharedMemory(total=8 * GIB, free=4 * GIB, segments=0),
    memlock_bytes=None,
    rdma_devices=("mlx5_0",),
    eventfd=True,
    auth_key_file_mode=None,
)


def config(role: Role = Role.CONSUMER, /, **extra: object) -> Config:
    return Config.from_extra(extra, role=role, default_host="127.0.0.1", default_port=14579)


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.check: finding.level for finding in findings}


def test_a_good_machine_has_no_complaints() -> None:
    findings = checks.check_machine(GOOD) + checks.check_config(config(), GOOD, 1)
    assert set(levels(findings).values()) == {Level.OK}
    assert not any(finding.remedy for finding in findings)


@pytest.mark.parametrize(
    ("check", "facts_seen", "said"),
    [
        ("python", replace(GOOD, python=(3, 10)), "3.10"),
        ("host", replace(GOOD, hosts=()), "epd-connector[vllm]"),
        ("host", replace(GOOD, hosts=(Installed("vllm", "0.29.1"),)), "0.29.1"),
        ("host", replace(GOOD, hosts=(Installed("vllm", "dev"),)), "released version"),
        ("host", replace(GOOD, hosts=GOOD.hosts * 2), "uninstall both"),
        ("host hooks", replace(GOOD, hooks=Hooks(missing=("start_save_caches",))), "start_save"),
        ("host hooks", replace(GOOD, hooks=Hooks(error="No module named x")), "No module named x"),
        ("plugin", replace(GOOD, plugin_registered=False), "with pip"),
        ("eventfd", replace(GOOD, eventfd=False), "seccomp"),
    ],
)
def test_failures_of_the_machine(check: str, facts_seen: Facts, said: str) -> None:
    findings = checks.check_machine(facts_seen)
    failed = [finding for finding in findings if finding.level is Level.FAIL]
    assert [finding.check for finding in failed] == [check]
    assert failed[0].remedy
    assert said in failed[0].value + failed[0].remedy


def test_hooks_that_were_not_looked_at_are_no_failure() -> None:
    assert checks.check_hooks(None).level is Level.OK


@pytest.mark.parametrize(
    ("transport", "usable", "level", "said"),
    [
        ("auto", {"shm": None, "mooncake": None}, Level.OK, "shm on this host, mooncake to other"),
        ("auto", {"shm": None, "mooncake": "install it"}, Level.WARN, "install it"),
        ("auto", {"shm": None}, Level.WARN, "epd-connector[mooncake]"),
        ("auto", {"shm": "no", "mooncake": None}, Level.OK, "mooncake everywhere"),
        ("auto", {"shm": "no /dev/shm", "mooncake": "no"}, Level.FAIL, "shm: no /dev/shm"),
        ("auto", {}, Level.FAIL, "no transport is registered"),
        ("shm", {"shm": None}, Level.OK, "shm"),
        ("shm", {"shm": "no /dev/shm"}, Level.FAIL, "no /dev/shm"),
        ("pigeon", {"shm": None, "mooncake": None}, Level.FAIL, "mooncake, shm"),
    ],
)
def test_choice_of_transport(
    transport: str, usable: dict[str, str | None], level: Level, said: str
) -> None:
    finding = checks.check_choice(config(transport=transport), usable)
    assert finding.level is level
    assert said in finding.value + finding.remedy


def test_auto_with_device_slabs_is_mooncake() -> None:
    finding = checks.check_choice(config(slab_device="cuda"), GOOD.transports)
    assert finding.value == "auto: mooncake everywhere"


def test_an_unusable_transport_is_a_warning() -> None:
    finding = checks.check_transport("mooncake", "install it")
    assert (finding.level, finding.remedy) == (Level.WARN, "install it")


def test_shared_memory_must_hold_every_ranks_slab() -> None:
    wanted = config(receive_slab_bytes="3GiB")
    assert checks.check_shared_memory(wanted, GOOD.shared_memory, 1).level is Level.OK
    assert checks.check_shared_memory(wanted, GOOD.shared_memory, 2).level is Level.OK
    apart = replace(wanted, share_slab=False)
    finding = checks.check_shared_memory(apart, GOOD.shared_memory, 2)
    assert finding.level is Level.FAIL
    assert "4.0GiB free of 8.0GiB" in finding.value
    assert "2 x receive_slab_bytes = 6GiB" in finding.limit
    assert "--shm-size" in finding.remedy


def test_shared_memory_that_is_absent() -> None:
    assert checks.check_shared_memory(config(), None, 1).level is Level.FAIL


@pytest.mark.parametrize(
    "unused",
    [config(Role.PRODUCER), config(transport="mooncake"), config(slab_device="cuda")],
)
def test_shared_memory_that_is_not_used(unused: Config) -> None:
    without = replace(GOOD, shared_memory=None)
    assert "shared memory" not in levels(checks.check_config(unused, without, 1))


def test_ports() -> None:
    good = (PortTrial("::1", 1), PortTrial("::1", 2))
    assert checks.check_ports("ec_both", good).level is Level.OK
    taken = checks.check_ports("ec_both", (*good, PortTrial("::1", 3, "in use", in_use=True)))
    assert taken.level is Level.FAIL
    assert "port 3" in taken.value
    assert "control_port" in taken.remedy
    foreign = checks.check_ports("ec_both", (PortTrial("10.9.9.9", 3, "cannot assign"),))
    assert "bind_host" in foreign.remedy


def test_authentication(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sixteen letters and more")
    with_file = config(auth_key_file=str(file))
    assert checks.check_auth(config(), None).level is Level.OK
    assert checks.check_auth(config(control_host="10.0.0.1"), None).level is Level.WARN
    assert checks.check_auth(config(bind_host="0.0.0.0"), None).level is Level.WARN
    assert checks.check_auth(with_file, 0o400).level is Level.OK
    assert "chmod 600" in checks.check_auth(with_file, 0o644).remedy
    assert "auth_key_file" in checks.check_auth(config(auth_key="x" * 16), None).remedy


def test_rdma_needs_locked_memory_and_devices() -> None:
    rdma = config(Role.BOTH, mooncake_protocol="rdma", mooncake_device="mlx5_0")
    assert levels(checks.check_config(rdma, GOOD, 1))["locked memory"] is Level.OK
    poor = replace(GOOD, memlock_bytes=8 << 20, rdma_devices=())
    found = {finding.check: finding for finding in checks.check_config(rdma, poor, 1)}
    assert found["locked memory"].level is Level.FAIL
    assert found["locked memory"].limit == "2GiB of slabs per rank"
    assert found["RDMA devices"].level is Level.FAIL
    wrong = checks.check_rdma_devices(rdma, ("mlx5_1",))
    assert wrong.remedy == "mooncake_device names mlx5_0: name one of mlx5_1"
    assert checks.check_memlock(rdma, 2 * GIB).level is Level.OK


# --- the host's version


@pytest.mark.parametrize("good", ["0.30", "0.30.0", "0.32.1.dev4+g1", "0.33.9", "v0.31.0rc1"])
def test_supported_versions(good: str) -> None:
    version.check(good)


@pytest.mark.parametrize("bad", ["0.29.9", "0.34.0", "0.34", "1.0", "dev", ""])
def test_unsupported_versions(bad: str) -> None:
    with pytest.raises(HostVersionError) as caught:
        version.check(bad)
    assert bad in str(caught.value)
    assert ">=0.30 and <0.34" in str(caught.value)


# --- looking at this machine


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_port_with_a_listener_is_in_use(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    trials = facts.try_ports(config(control_port=port), 0, 0)
    assert [(trial.port, trial.in_use) for trial in trials] == [(port, True)]
    listener.close()
    assert [trial.error for trial in facts.try_ports(config(control_port=port), 0, 0)] == [""]


def test_a_host_that_is_not_here_cannot_be_bound() -> None:
    documentation_address = config(control_host="192.0.2.1", control_port=1024)
    (trial,) = facts.try_ports(documentation_address, 0, 0)
    assert trial.error
    assert not trial.in_use


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    seen = facts.gather(fast=True, auth_key_file="")
    assert seen.python >= checks.MIN_PYTHON
    assert seen.eventfd
    assert seen.hooks is None
    assert "shm" in seen.transports
    main(["doctor", "--fast"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("doctor: ")


# --- the command


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code = main(["doctor", "--fast", "--json", *arguments])
    report: dict[str, object] = json.loads(capsys.readouterr().out)
    assert (code == 0) is report["ok"]
    return report


def test_a_refused_configuration_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "--role", "ec_consumer", "--config", '{"shard": "sometimes"}')
    assert report["ok"] is False
    assert "shard is 'sometimes'" in json.dumps(report["findings"])


def test_ports_that_do_not_fit_are_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_json(capsys, "--role", "ec_producer", "--ec-port", "65530", "--tp-size", "8")
    assert "lower control_port" in json.dumps(report["findings"])


def test_the_secret_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    secret = "tell nobody about this"
    for given in [{"auth_key": secret}, {"auth_key": secret, "shard": 1}]:
        report = run_json(capsys, "--config", json.dumps(given))
        assert secret not in json.dumps(report)
    with pytest.raises(SystemExit):
        main(["doctor", "--config", f"{{'auth_key': '{secret}'}}"])
    assert secret not in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--config", "[]"], ["--config", "{"], ["--role", "boss"], ["--tp-size", "0"]],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["doctor", *arguments])
    assert done.value.code == 2
    assert "usage: epd doctor" in capsys.readouterr().err


def test_text_ends_with_the_sum() -> None:
    good = Finding("python", Level.OK, "3.11")
    bad = Finding("plugin", Level.FAIL, "not registered", "an entry point", "install it")
    assert doctor.as_text([good]).splitlines()[-1] == "doctor: OK"
    lines = doctor.as_text([good, bad]).splitlines()
    assert lines[-1] == "doctor: 1 problem(s)"
    assert lines[1] == "FAIL  plugin  not registered  (needs: an entry point)"
    assert lines[2].split() == ["->", "install", "it"]


def test_findings_shared_by_two_roles_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    findings = doctor.diagnose(parser.parse_args(["--fast"]))
    assert len(findings) == len(set(findings))
    assert {"config ec_producer", "config ec_consumer"} <= levels(findings).keys()
    capsys.readouterr()
