# SPDX-License-Identifier: Apache-2.0
"""One question, one answer: for command-line tools that have no loop of their own."""

import time

from epd_connector.errors import LinkError
from epd_connector.link.base import endpoint, parse_address
from epd_connector.link.zmq_link import ZmqLink


def ask(address: str, payload: bytes, timeout_s: float) -> bytes:
    """Send ``payload`` to ``address`` ("host:port", "[v6]:port") and return the first answer.

    Blocks the calling thread for at most about ``timeout_s`` seconds; any thread may call it.
    Raises LinkError, naming the address, if no answer came in time; RequestError if the address
    is malformed.
    """
    where = endpoint(*parse_address(address))
    deadline = time.monotonic() + timeout_s
    link = ZmqLink(send_queue=1, max_peers=1)
    try:
        if not link.send(link.connect(where), payload):
            raise LinkError(f"cannot send {len(payload)} bytes to {address}: too large for a frame")
        while (left_s := deadline - time.monotonic()) > 0:
            for _, answer in link.wait(left_s):
                return answer
    finally:
        link.close()
    raise LinkError(
        f"no answer from {address} within {timeout_s:g} s: check that an engine with this "
        "connector runs there, that the port is its control_port, that both sides have the same "
        "auth_key (--auth-key-file), and that no firewall is between"
    )
