# SPDX-License-Identifier: Apache-2.0
"""The doors of the transports that come with the package, group `epd_connector.transports`.

Each function returns a transport's class. Importing this module costs nothing, and a call
imports that one transport alone; whether it can be used here is for its `probe()` to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epd_connector.transport.mooncake import MooncakeTransport
    from epd_connector.transport.shm import ShmTransport


def shm() -> type[ShmTransport]:
    """The transport between processes of one host, over POSIX shared memory."""
    from epd_connector.transport.shm import ShmTransport

    return ShmTransport


def mooncake() -> type[MooncakeTransport]:
    """The transport between hosts, over the Mooncake engine."""
    from epd_connector.transport.mooncake import MooncakeTransport

    return MooncakeTransport
