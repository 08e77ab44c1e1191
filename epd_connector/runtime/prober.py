# SPDX-License-Identifier: Apache-2.0
"""Finds out whether a process is gone: nobody is connected, and its host refuses to connect.

Owns the threads that try to connect, since names are looked up and hosts may not answer.
Does not own what follows from an answer (``core.receive``), or the connections of the link.
"""

import socket
from collections.abc import Callable

from epd_connector.errors import RequestError
from epd_connector.link.base import parse_address
from epd_connector.transport.workers import Job, Workers

CONNECT_TIMEOUT_S = 2.0
_THREADS = 4
_MAX_WAITING = 1024


class Prober:
    """Probes endpoints on threads of its own, which start with the first probe."""

    def __init__(self) -> None:
        self._workers = Workers("epd-probe", threads=_THREADS, backlog=_MAX_WAITING)

    def probe(self, endpoint: str, answer: Callable[[bool], None]) -> None:
        """Calls ``answer`` once, on a thread of the prober's or at once: whether the host of
        ``endpoint`` (``tcp://host:port``) refuses connections. What is not known is False."""
        job = Job(run=lambda: answer(refuses(endpoint)), abandon=lambda: answer(False))
        if not self._workers.submit(endpoint, job):
            answer(False)

    def close(self, timeout_s: float) -> None:
        """Ends the threads. Idempotent."""
        self._workers.close(timeout_s)


def refuses(endpoint: str, timeout_s: float = CONNECT_TIMEOUT_S) -> bool:
    """Whether every address of ``endpoint`` refuses a connection: nobody listens there.

    False where one accepts, or says nothing, or cannot be reached or looked up. Blocks.
    """
    try:
        host, port = parse_address(endpoint.removeprefix("tcp://"))
        socket.create_connection((host, port), timeout_s, all_errors=True).close()
    except ExceptionGroup as errors:
        return all(isinstance(error, ConnectionRefusedError) for error in errors.exceptions)
    except (OSError, RequestError, UnicodeError):
        return False
    return False
