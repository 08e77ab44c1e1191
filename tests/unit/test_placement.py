# SPDX-License-Identifier: Apache-2.0
"""Where received items lie, and in which order unneeded ones go."""

import dataclasses

import pytest

from epd_connector.core.admission_state import Item, Ticket, Transfer, TransferState
from epd_connector.core.placement import Placement
from epd_connector.errors import Code
from epd_connector.memory.slab import ALIGNMENT
from tests.unit.admission_harness import settings

UNITS = 16


def placement(ranks: int = 2, **choices: object) -> Placement:
    changes = {"slab_nbytes": UNITS * ALIGNMENT, "ranks": ranks, **choices}
    return Placement(dataclasses.replace(settings(), **changes))  # type: ignore[arg-type]


def transfer(room: int, units: int = 1) -> Transfer:
    made = Transfer(Ticket(room, "encode:1"), Item(f"i{room}", 4, "image"), 0.0, 0.0)
    made.nbytes = units * ALIGNMENT
    return made


def landed(place: Placement, room: int, units: int) -> Transfer:
    made = transfer(room, units)
    assert place.lease([made])
    made.state = TransferState.READY
    place.landed(made)
    return made


@pytest.mark.parametrize(
    ("rows", "ranks", "smallest", "nbytes"),
    [(10, 4, None, 1000), (10, 4, 0, 300), (1, 4, 100, 100), (12, 4, 0, 300), (10, 1, 0, 1000)],
)
def test_an_item_takes_the_bytes_of_the_largest_part(
    rows: int, ranks: int, smallest: int | None, nbytes: int
) -> None:
    made = transfer(1)
    assert placement(ranks, shard_min_bytes=smallest).measure(made, rows, 100) is None
    assert made.nbytes == nbytes
    assert made.item_nbytes == rows * 100


def test_an_item_fits_to_the_byte() -> None:
    place = placement()
    assert place.measure(transfer(1), UNITS, ALIGNMENT) is None
    failure = place.measure(transfer(1), 1, UNITS * ALIGNMENT + 1)
    assert failure is not None
    assert failure.code is Code.TOO_LARGE
    assert str(UNITS * ALIGNMENT + 1) in failure.reason
    assert str(UNITS * ALIGNMENT) in failure.reason


def test_items_fit_together_with_what_alignment_costs() -> None:
    place = placement()
    small = [transfer(room, 0) for room in range(UNITS)]
    assert place.never(small) is None
    assert place.lease(small)
    failure = place.never([*small, transfer(99, 0)])
    assert failure is not None
    assert failure.code is Code.TOO_LARGE
    assert f"{UNITS + 1} items" in failure.reason


def test_all_are_leased_or_none() -> None:
    place = placement()
    first = transfer(1, 10)
    assert place.lease([first])
    both = [transfer(2, 4), transfer(3, 4)]
    assert not place.lease(both)
    assert [made.region for made in both] == [None, None]
    place.check([first, *both])
    place.free(first)
    assert place.lease(both)
    place.check(both)


def test_the_resident_that_was_unpinned_first_goes_first() -> None:
    place = placement()
    made = [landed(place, room, 2) for room in (1, 2, 3)]
    assert place.oldest_resident() is None
    for one in (made[1], made[0], made[2]):
        place.unpin(one)
    assert place.oldest_resident() is made[1]
    place.pin(made[1])
    assert place.oldest_resident() is made[0]
    place.unpin(made[1])
    place.free(made[0])
    assert place.oldest_resident() is made[2]
    place.check(made[1:])


def test_pinning_and_unpinning_twice_is_once() -> None:
    place = placement()
    made = landed(place, 1, 2)
    place.pin(made)
    place.unpin(made)
    place.unpin(made)
    assert place.slab.balance().resident == 2 * ALIGNMENT
    place.pin(made)
    place.pin(made)
    assert place.slab.balance().landed == 2 * ALIGNMENT


def test_what_is_quarantined_is_not_free_until_it_is_freed() -> None:
    place = placement()
    made = transfer(1, UNITS)
    assert place.lease([made])
    made.state = TransferState.CLEARING
    place.quarantine(made)
    assert not place.lease([transfer(2)])
    place.check([made])
    place.free(made)
    assert place.lease([transfer(2)])


def test_freeing_what_has_no_memory_is_nothing() -> None:
    place = placement()
    place.free(transfer(1))
    place.check([])


def test_check_finds_bytes_that_nobody_has() -> None:
    place = placement()
    made = transfer(1)
    assert place.lease([made])
    with pytest.raises(AssertionError):
        place.check([])
    made.state = TransferState.RECEIVING
    place.check([made])
