# SPDX-License-Identifier: Apache-2.0
"""The other process of a transport test: registers a slab, then answers digests of its parts.

Arguments: transport (shm or mooncake) and slab size in bytes. Prints the session, then one
SHA-256 per input line "<offset> <nbytes>", until its input ends.
"""

import hashlib
import sys

from epd_connector.memory.segment import Segment
from epd_connector.transport.base import Transport, TransportOptions
from epd_connector.transport.mooncake import MooncakeTransport
from epd_connector.transport.shm import ShmTransport


def main() -> None:
    name, nbytes = sys.argv[1], int(sys.argv[2])
    slab = Segment.create(nbytes, shared=name == "shm", owner_tag="test peer")
    slab.buffer[:] = b"\xee" * nbytes
    options = TransportOptions(host="127.0.0.1")
    transport: Transport = ShmTransport(options) if name == "shm" else MooncakeTransport(options)
    print(transport.register_destination(slab), flush=True)
    for line in sys.stdin:
        offset, length = map(int, line.split())
        print(hashlib.sha256(slab.buffer[offset : offset + length]).hexdigest(), flush=True)
    transport.close()
    slab.close()


if __name__ == "__main__":
    main()
