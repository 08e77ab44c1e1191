# SPDX-License-Identifier: Apache-2.0
"""Tombstones: remembered for a while, in a bounded number, the oldest forgotten first."""

from epd_connector.core.tombstones import Tombstones


def test_what_was_buried_is_found() -> None:
    tombs: Tombstones[int, str] = Tombstones(limit=2, keep_s=10.0)
    tombs.bury(1, "landed", 0.0)
    assert tombs.find(1) == "landed"
    assert 1 in tombs
    assert tombs.find(2) is None
    assert 2 not in tombs


def test_the_oldest_make_room_for_the_newest() -> None:
    tombs: Tombstones[int, str] = Tombstones(limit=2, keep_s=10.0)
    for key in (1, 2, 1, 3):
        tombs.bury(key, str(key), 0.0)
    assert len(tombs) == 2
    assert (1 in tombs, 2 in tombs, 3 in tombs) == (True, False, True)


def test_time_forgets_exactly_what_is_old() -> None:
    tombs: Tombstones[int, str] = Tombstones(limit=9, keep_s=10.0)
    tombs.bury(1, "a", 0.0)
    tombs.bury(2, "b", 5.0)
    tombs.forget(9.9)
    assert len(tombs) == 2
    tombs.forget(10.0)
    assert (1 in tombs, 2 in tombs) == (False, True)


def test_burying_again_starts_the_time_again() -> None:
    tombs: Tombstones[int, str] = Tombstones(limit=9, keep_s=10.0)
    tombs.bury(1, "a", 0.0)
    tombs.bury(2, "b", 1.0)
    tombs.bury(1, "c", 8.0)
    tombs.forget(12.0)
    assert tombs.find(1) == "c"
    assert 2 not in tombs


def test_what_was_removed_is_not_found() -> None:
    tombs: Tombstones[int, str] = Tombstones(limit=9, keep_s=10.0)
    tombs.bury(1, "a", 0.0)
    tombs.remove(1)
    tombs.remove(2)
    assert 1 not in tombs
