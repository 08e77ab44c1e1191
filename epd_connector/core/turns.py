# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is for memory: requests in the order of their need, each for all it needs.

Owns the line of requests that wait for memory. A part of ``admission.PrefillHead``; takes
memory and opens transfers at the desk (``transfers``), decides nothing else of them.

Whoever is first in line and does not fit is waited for, so that nobody starves, and nobody
is given a part of what it needs. Items are shared, though: those behind can hold an item
that was there before them. ``_untangle`` sees to it that nobody waits for ever over that.
"""

from epd_connector.core.admission_state import Request, Transfer, TransferState
from epd_connector.core.transfers import TransferDesk
from epd_connector.errors import Code, Failure
from epd_connector.stats import Counters

CrowdedOut = tuple[Request, Failure]
"""A request that cannot have its items, and why."""

_UNCLEAR = (TransferState.RESOLVING, TransferState.CLEARING)


class Turns:
    """The line for memory of one prefill head."""

    def __init__(self, desk: TransferDesk, counters: Counters) -> None:
        self._desk = desk
        self._counters = counters
        self._line: dict[str, Request] = {}

    def line_up(self, request: Request) -> None:
        """``request`` waits for memory, behind those that already do."""
        self._line.setdefault(request.request, request)
        self._desk.memory_changed = True

    def step_out(self, request: Request) -> None:
        """``request`` does not wait for memory (any more)."""
        self._line.pop(request.request, None)

    def give(self) -> CrowdedOut | None:
        """Gives memory to whose turn it is; who has to go without, if somebody has to."""
        for request in list(self._line.values()):
            if self._is_unclear(request):
                continue
            failure = self._desk.placement.never(self._transfers(request))
            if failure is not None:
                return request, failure
            if not self._place(request):
                return self._untangle(request)
        return None

    def _transfers(self, request: Request) -> list[Transfer]:
        found = (self._desk.items[hash].transfer for hash in request.waits)
        return [transfer for transfer in found if transfer is not None]

    def _is_unclear(self, request: Request) -> bool:
        """Whether it cannot be said yet what ``request`` needs: then it is in nobody's way."""
        for transfer in self._transfers(request):
            if transfer.state is TransferState.QUEUED and not self._desk.is_current(transfer):
                self._desk.look_again(transfer)
        items = [self._desk.items[hash] for hash in request.waits]
        return any(item.transfer is None or item.transfer.state in _UNCLEAR for item in items)

    def _place(self, request: Request) -> bool:
        """False where ``request`` does not fit now."""
        queued = [t for t in self._transfers(request) if t.state is TransferState.QUEUED]
        while not self._desk.placement.lease(queued):
            if not self._desk.drop_oldest():
                self._counters.add("leases_deferred")
                return False
        self.step_out(request)
        for transfer in queued:
            self._desk.open(transfer)
        return True

    def _untangle(self, first: Request) -> CrowdedOut | None:
        """Those in line hold what ``first`` needs and wait behind it: the last gives way.

        Nobody gives way while anything else may still free memory.
        """
        if any(self._comes_free(transfer) for transfer in self._desk.transfers.values()):
            return None
        holders = [r for r in self._line.values() if self._holds_more_than(r, first)]
        capacity = self._desk.placement.slab.capacity
        failure = Failure(
            Code.OVERLOADED,
            f"requests that wait for each other hold the receive slab of {capacity} bytes: "
            "raise receive_slab_bytes",
        )
        return (holders[-1] if holders else first), failure

    def _comes_free(self, transfer: Transfer) -> bool:
        """Whether the memory of ``transfer`` is returned without anybody in line giving way."""
        if transfer.region is None:
            return False
        if transfer.state is not TransferState.READY or self._desk.is_pinned(transfer):
            return True
        return not transfer.item.wanted_by.keys() <= self._line.keys()

    def _holds_more_than(self, request: Request, first: Request) -> bool:
        hashes = (hash for hash in request.waits if hash not in first.waits)
        return any(self._desk.held(hash) is not None for hash in hashes)
