# SPDX-License-Identifier: Apache-2.0
"""Where `epd doctor` looks at the machine; thin on purpose.

Owns: reading versions, limits, devices and sizes, and trying to bind ports.
Changes nothing: what it opens it closes. Does not own: whether what it saw is
good (``cli/checks.py``).
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from epd_connector.cli.checks import Facts, Hooks, PortTrial, SharedMemory
from epd_connector.config import Config
from epd_connector.errors import TransportError
from epd_connector.hosts.vllm import version
from epd_connector.transport.base import TransportClass

SHM = Path("/dev/shm")
SHM_PATTERN = "epd-*"
RDMA = Path("/sys/class/infiniband")
PLUGIN_NAME = "epd_connector"

HOST_IMPORT_TIMEOUT_S = 180.0
LAST_WORDS_CHARS = 200


def gather(*, fast: bool, auth_key_file: str) -> Facts:
    """Look at everything once. Slow unless ``fast``: a process of its own imports the host."""
    hosts = version.installed()
    return Facts(
        python=sys.version_info[:2],
        hosts=hosts,
        hooks=None if fast or not hosts else look_at_hooks(),
        plugin_registered=plugin_registered(),
        transports=probe_transports(),
        shared_memory=shared_memory(),
        memlock_bytes=memlock(),
        rdma_devices=tuple(sorted(path.name for path in RDMA.glob("*"))),
        eventfd=eventfd_works(),
        auth_key_file_mode=file_mode(auth_key_file),
    )


def look_at_hooks() -> Hooks:
    """Import the host in a process of its own: seconds, much output, and it may crash."""
    command = [sys.executable, "-m", version.__name__]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=HOST_IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Hooks(error=f"importing the host took more than {HOST_IMPORT_TIMEOUT_S:g} s")
    for line in done.stdout.splitlines():
        if line.startswith(version.HOOKS_PREFIX):
            return Hooks(missing=tuple(line.removeprefix(version.HOOKS_PREFIX).split()))
    words = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return Hooks(error=f"the host cannot be imported: {words[0][-LAST_WORDS_CHARS:]}")


def plugin_registered() -> bool:
    found = metadata.entry_points(group=version.PLUGIN_GROUP)
    return any(point.name == PLUGIN_NAME for point in found)


def probe_transports() -> dict[str, str | None]:
    """By name: None where usable in this process, else why not and what to do."""
    from epd_connector.transport import registry

    return {name: _probe(loader) for name, loader in registry.available().items()}


def _probe(loader: Callable[[], TransportClass]) -> str | None:
    try:
        return loader().probe()
    except TransportError as error:
        return str(error)


def shared_memory() -> SharedMemory | None:
    if not SHM.is_dir():
        return None
    usage = shutil.disk_usage(SHM)
    return SharedMemory(usage.total, usage.free, len(list(SHM.glob(SHM_PATTERN))))


def memlock() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def eventfd_works() -> bool:
    try:
        os.close(os.eventfd(0))
    except OSError:
        return False
    return True


def file_mode(path: str) -> int | None:
    """Permission bits; None without a path, or where there is no such file."""
    try:
        return stat.S_IMODE(Path(path).stat().st_mode) if path else None
    except OSError:
        return None


def try_ports(config: Config, dp_rank: int, tp_size: int) -> tuple[PortTrial, ...]:
    """Bind the head's and every rank's port once. ConfigError if they do not fit."""
    plan = config.ports(dp_rank, tp_size)
    return tuple(_try_all(config.listen_host, (plan.head, *plan.ranks)))


def _try_all(host: str, ports: Iterable[int]) -> Iterable[PortTrial]:
    for port in ports:
        try:
            _bind(host, port)
        except OSError as error:
            reason = error.strerror or str(error)
            yield PortTrial(host, port, reason, in_use=error.errno == errno.EADDRINUSE)
        else:
            yield PortTrial(host, port)


def _bind(host: str, port: int) -> None:
    name = None if host == "*" else host
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as trial:
        # As the real listener: a port whose last connections linger is free.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)
        # Binding alone would not collide with a socket that is bound the same way.
        trial.listen(1)
