# SPDX-License-Identifier: Apache-2.0
"""Skips are said until they are answered, a few times, in few frames."""

from epd_connector.core.skips import FIRST_RETRY_S, MAX_PER_FRAME, TRIES, Skips
from epd_connector.protocol.frames import SkipRooms

HERE, THERE = "encode:1", "encode:2"


def run(skips: Skips, until: float) -> list[tuple[str, SkipRooms]]:
    said = []
    while (due := skips.next_deadline()) is not None and due <= until:
        said += skips.take(due)
    return said


def test_what_is_said_at_once_goes_into_one_frame_per_engine() -> None:
    skips = Skips(limit=8)
    for room, address in ((1, HERE), (2, THERE), (3, HERE)):
        skips.add(address, room)
    assert skips.take(0.0) == [(HERE, SkipRooms((1, 3))), (THERE, SkipRooms((2,)))]
    assert skips.take(0.0) == []
    assert len(skips) == 3


def test_an_answer_ends_it() -> None:
    skips = Skips(limit=8)
    skips.add(HERE, 1)
    skips.add(HERE, 2)
    skips.take(0.0)
    skips.heard(THERE, (1, 2))
    assert len(skips) == 2
    skips.heard(HERE, (1, 7))
    assert run(skips, FIRST_RETRY_S) == [(HERE, SkipRooms((2,)))]
    skips.heard(HERE, (2,))
    assert len(skips) == 0
    assert skips.next_deadline() is None


def test_without_an_answer_it_is_repeated_ever_more_slowly_and_given_up() -> None:
    skips = Skips(limit=8)
    skips.add(HERE, 1)
    times = []
    now = 0.0
    while True:
        if skips.take(now):
            times.append(now)
        due = skips.next_deadline()
        if due is None:
            break
        now = due
    assert times == [0.0, 1.0, 3.0, 7.0]
    assert len(times) == TRIES
    assert len(skips) == 0
    assert skips.take_deaf() == {HERE}
    assert skips.take_deaf() == set()


def test_nobody_is_told_again_who_is_gone() -> None:
    skips = Skips(limit=8)
    skips.add(HERE, 1)
    skips.add(THERE, 2)
    skips.take(0.0)
    skips.give_up(HERE)
    assert run(skips, 1.0) == [(THERE, SkipRooms((2,)))]


def test_beyond_the_limit_a_skip_is_said_once() -> None:
    skips = Skips(limit=1)
    skips.add(HERE, 1)
    skips.add(HERE, 2)
    assert skips.take(0.0) == [(HERE, SkipRooms((1, 2)))]
    assert run(skips, 1.0) == [(HERE, SkipRooms((1,)))]


def test_frames_are_bounded() -> None:
    skips = Skips(limit=3 * MAX_PER_FRAME)
    for room in range(2 * MAX_PER_FRAME + 1):
        skips.add(HERE, room)
    assert [len(frame.rooms) for _, frame in skips.take(0.0)] == [MAX_PER_FRAME, MAX_PER_FRAME, 1]
