# SPDX-License-Identifier: Apache-2.0
"""Copies rows of the engine into the send slab, on threads of its own, or lends them to writes.

Owns those threads and what is said of a copy that fails. Does not own the rows (``RowStore``),
or where a copy goes (``core.send``).
"""

import logging
from collections.abc import Callable
from typing import Protocol

from epd_connector.core.effects import Stage
from epd_connector.core.send_events import Staged
from epd_connector.errors import Code, Failure
from epd_connector.transport.base import SlabBuffer
from epd_connector.transport.workers import Job, Workers

logger = logging.getLogger(__name__)

_MAX_WAITING = 65536


class RowStore(Protocol):
    """The rows behind tokens: tensors of the engine, held until they are staged or dropped."""

    def stage(self, token: int, offset: int, nbytes: int) -> None:
        """Copies the rows of ``token`` to ``offset`` of the send slab, and lets go of them.

        Returns when the copy is complete, also on a device. Called on a staging thread.
        """

    def lend(self, token: int) -> SlabBuffer:
        """The memory of the rows of ``token``, which were said to be lendable. It lives as long
        as the result does. Any thread."""

    def drop(self, token: int) -> None:
        """Lets go of the rows of ``token``. Any thread."""


class Staging:
    """Carries out ``Stage``; ``report`` is told once how each of them ended, on any thread."""

    def __init__(
        self, rows: RowStore | None, threads: int, report: Callable[[Staged], None]
    ) -> None:
        self._rows = rows
        self._report = report
        self._workers = Workers("epd-stage", threads=threads, backlog=_MAX_WAITING)

    def start(self, order: Stage) -> None:
        """Begins a copy. Never blocks."""
        job = Job(run=lambda: self._run(order), abandon=lambda: self._abandon(order))
        if not self._workers.submit(order.copy, job):
            self._abandon(order)

    def lend(self, token: int) -> SlabBuffer:
        """The rows of ``token``, for writes to read where they are."""
        assert self._rows is not None
        return self._rows.lend(token)

    def drop(self, token: int) -> None:
        """The rows of ``token`` are not needed."""
        assert self._rows is not None
        self._rows.drop(token)

    def close(self, timeout_s: float) -> None:
        """Drops what waits, and waits a while for what is being copied. Idempotent."""
        self._workers.close(timeout_s)

    def _run(self, order: Stage) -> None:
        assert self._rows is not None
        failure = None
        try:
            self._rows.stage(order.token, order.offset, order.nbytes)
        except Exception as error:
            logger.exception("staging %d bytes failed", order.nbytes)
            failure = Failure(Code.ENCODE_FAILED, f"staging {order.nbytes} bytes failed: {error}")
        self._report(Staged(order.copy, failure))

    def _abandon(self, order: Stage) -> None:
        self.drop(order.token)
        failure = Failure(Code.OVERLOADED, "too many copies wait to be staged")
        self._report(Staged(order.copy, failure))
