# SPDX-License-Identifier: Apache-2.0
"""Where received items lie, and how: one offset per item, the same on every rank.

Owns the receive slab's bookkeeping, the layout of items in it, and the order in which items
that nobody waits for are dropped. A part of ``admission.PrefillHead``; decides only where and
how, never whether.
"""

from collections import OrderedDict
from collections.abc import Iterable

from epd_connector.core.admission_state import AdmissionSettings, Transfer, TransferState
from epd_connector.errors import Code, Failure
from epd_connector.memory.slab import ALIGNMENT, Region, RegionState, Slab
from epd_connector.rows import choose_layout, region_rows


class Placement:
    """Regions of transfers, and what lies in them on the ranks of one engine."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.slab = Slab(settings.slab_nbytes)
        self._settings = settings
        self._residents: OrderedDict[int, Transfer] = OrderedDict()

    def measure(self, transfer: Transfer, rows: int, row_nbytes: int) -> Failure | None:
        """Chooses the layout of ``transfer`` and notes its sizes; why it can never fit, or None."""
        settings = self._settings
        transfer.item_nbytes = rows * row_nbytes
        transfer.layout = choose_layout(
            transfer.item_nbytes,
            settings.ranks,
            shares_slab=settings.shares_slab,
            shard_min_bytes=settings.shard_min_bytes,
        )
        transfer.nbytes = region_rows(rows, settings.ranks, transfer.layout) * row_nbytes
        if self.slab.fits(transfer.nbytes):
            return None
        return Failure(
            Code.TOO_LARGE,
            f"item of {rows} rows takes {transfer.nbytes} bytes, receive slab of "
            f"{self.slab.capacity} bytes: raise receive_slab_bytes on the prefill engine",
        )

    def never(self, transfers: list[Transfer]) -> Failure | None:
        """Why ``transfers`` can never all be in the slab at once, or None."""
        total = sum(max(1, -(-t.nbytes // ALIGNMENT)) * ALIGNMENT for t in transfers)
        if self.slab.fits(total):
            return None
        return Failure(
            Code.TOO_LARGE,
            f"{len(transfers)} items of one request take {total} bytes, receive slab of "
            f"{self.slab.capacity} bytes: raise receive_slab_bytes on the prefill engine",
        )

    def lease(self, transfers: list[Transfer]) -> bool:
        """Regions for all of ``transfers``, or for none."""
        leased: list[Region] = []
        for transfer in transfers:
            region = self.slab.lease(transfer.nbytes)
            if region is None:
                for taken in leased:
                    self.slab.free(taken)
                return False
            leased.append(region)
        for transfer, region in zip(transfers, leased, strict=True):
            transfer.region = region
        return True

    def landed(self, transfer: Transfer) -> None:
        """The item is complete, and somebody waits for it."""
        assert transfer.region is not None
        self.slab.move(transfer.region, RegionState.LANDED)

    def quarantine(self, transfer: Transfer) -> None:
        """The item is given up while peers may still write into its region."""
        assert transfer.region is not None
        self.slab.move(transfer.region, RegionState.QUARANTINED)

    def pin(self, transfer: Transfer) -> None:
        """The item must stay: somebody waits for it, or a step loads it."""
        if self._residents.pop(transfer.ticket.room, None) is not None:
            self.landed(transfer)

    def unpin(self, transfer: Transfer) -> None:
        """The item stays as long as nothing else needs its bytes."""
        assert transfer.region is not None
        if transfer.ticket.room not in self._residents:
            self.slab.move(transfer.region, RegionState.RESIDENT)
            self._residents[transfer.ticket.room] = transfer

    def oldest_resident(self) -> Transfer | None:
        """The unpinned item that was unpinned first."""
        return next(iter(self._residents.values()), None)

    def free(self, transfer: Transfer) -> None:
        """The bytes of ``transfer``, if it has any, are free."""
        self._residents.pop(transfer.ticket.room, None)
        if transfer.region is not None:
            self.slab.free(transfer.region)
            transfer.region = None

    def check(self, transfers: Iterable[Transfer]) -> None:
        """Holds the balance of the slab. Raises AssertionError."""
        self.slab.check()
        expected = dict.fromkeys(RegionState, 0)
        for transfer in transfers:
            if transfer.region is None:
                assert transfer.state in (TransferState.RESOLVING, TransferState.QUEUED)
                continue
            expected[transfer.region.state] += transfer.region.size
        balance = self.slab.balance()
        assert balance.leased == expected[RegionState.LEASED], balance
        assert balance.landed == expected[RegionState.LANDED], balance
        assert balance.resident == expected[RegionState.RESIDENT], balance
        assert balance.quarantined == expected[RegionState.QUARANTINED], balance
