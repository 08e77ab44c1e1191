# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces with a cable between them that can be cut.

Owns the namespaces, made with ``ip``. Does not own what runs in them.
"""

import secrets
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A namespace, and its address on the cable."""

    namespace: str
    address: str
    device: str


class Cable:
    """Two hosts, connected. ``close`` removes both; processes in them must have ended.

    Raises:
        OSError: this machine or user cannot have namespaces; says why.

    """

    def __init__(self) -> None:
        if shutil.which("ip") is None:
            raise OSError("there is no `ip` (iproute2) here")
        name = secrets.token_hex(3)
        self.hosts = tuple(
            Host(f"epd-{name}-{end}", f"10.203.91.{end}", f"epd{name}{end}") for end in (1, 2)
        )
        try:
            self._lay()
        except OSError:
            self.close()
            raise

    def _lay(self) -> None:
        first, second = self.hosts
        for host in self.hosts:
            _ip("netns", "add", host.namespace)
        pair = (first.device, "netns", first.namespace, "type", "veth")
        _ip("link", "add", *pair, "peer", "name", second.device, "netns", second.namespace)
        for host in self.hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/30", "dev", host.device)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", host.device, "up")

    def cut(self) -> None:
        """Nothing gets through, and nobody is told."""
        _ip("-n", self.hosts[0].namespace, "link", "set", self.hosts[0].device, "down")

    def mend(self) -> None:
        _ip("-n", self.hosts[0].namespace, "link", "set", self.hosts[0].device, "up")

    def close(self) -> None:
        for host in self.hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    """Raises OSError with what ``ip`` said."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"`ip {' '.join(arguments)}`: {done.stderr.strip()}")
