# SPDX-License-Identifier: Apache-2.0
"""Encode engines that failed: what comes next does not wait for them, and finds them again."""

from epd_connector.core.admission_state import Broken, Joined, RequestState
from epd_connector.core.effects import Hangup, Send
from epd_connector.core.topology import SUSPECT_S
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    NotReady,
    RoomsSkipped,
    SenderBack,
    SenderSilent,
    SkipRooms,
)
from tests.unit.admission_harness import (
    HERE,
    Harness,
    asked,
    failed,
    identity,
    item,
    known,
    rooms_opened,
    skipped,
)

WAITING, READY, FAILED = RequestState.WAITING, RequestState.READY, RequestState.FAILED
SILENCE = Failure(Code.PEER_DEAD, "encode rank at tcp://a was silent for 5.0 s")


def writer() -> int:
    """The incarnation of the encode rank that serves rank 0."""
    return identity().ranks[0].incarnation


def silent(head: Harness, room: int) -> None:
    """Rank 0's writer falls silent: its room fails, and the head hears who it was."""
    head.rank(0, SenderSilent(writer(), SILENCE))
    head.fail(room, Code.PEER_DEAD)


def test_a_silent_writer_is_refused_at_once_for_the_next_item() -> None:
    head = known()
    head.start("one", item("a", 5))
    silent(head, 5)
    head.start("two", item("b", 6))
    effects = head.hear(identity())
    failure = failed(effects)["two"]
    assert failure.code is Code.PEER_DEAD
    for part in (HERE, "30.0 s", "failed_peer_s", SILENCE.reason):
        assert part in failure.reason
    assert rooms_opened(effects) == []


def test_it_is_trusted_again_as_soon_as_it_speaks() -> None:
    head = known()
    head.start("one", item("a", 5))
    silent(head, 5)
    head.rank(0, SenderBack(writer()))
    head.start("two", item("b", 6))
    assert rooms_opened(head.hear(identity())) == [6]


def test_it_is_tried_again_after_a_while() -> None:
    head = known()
    head.start("one", item("a", 5))
    silent(head, 5)
    head.leave("one")
    head.wait(30.0)
    head.start("two", item("b", 6))
    assert rooms_opened(head.hear(identity())) == [6]


def test_an_engine_that_was_restarted_is_another_one() -> None:
    head = known()
    head.start("one", item("a", 5))
    silent(head, 5)
    head.start("two", item("b", 6))
    assert rooms_opened(head.hear(identity(incarnation=77))) == [6]


def test_a_word_of_the_encode_side_about_our_own_silence_is_no_reason_for_distrust() -> None:
    head = known()
    head.start("one", item("a", 5))
    head.fail(5, Code.PEER_DEAD)
    head.start("two", item("b", 6))
    assert rooms_opened(head.hear(identity())) == [6]


def test_an_address_that_did_not_answer_costs_the_next_request_a_moment_only() -> None:
    head = Harness()
    head.start("one", item("a", 5))
    assert "one" in failed(head.wait(5.0, "one"))
    head.wait(2.0)
    head.start("two", item("b", 6))
    assert head.state("two") is WAITING
    assert "two" in failed(head.wait(SUSPECT_S, "two"))


def test_it_is_found_again_by_the_first_request_after_it_is_back() -> None:
    head = Harness()
    head.start("one", item("a", 5))
    head.wait(5.0, "one")
    head.wait(2.0)
    assert asked(head.start("two", item("b", 6))) == [f"tcp://{HERE}"]
    assert rooms_opened(head.hear(identity())) == [6]


def test_an_engine_that_is_starting_is_no_suspect() -> None:
    head = Harness()
    head.start("one", item("a", 5))
    head.hear(NotReady("1 of 2 ranks are up"))
    head.wait(5.0, "one")
    head.wait(2.0)
    head.start("two", item("b", 6))
    assert failed(head.wait(4.9, "two")) == {}


def test_a_broken_connection_makes_the_head_look_again() -> None:
    head = known()
    head.do(Broken(HERE))
    assert asked(head.start("r", item("a", 5))) == [f"tcp://{HERE}"]
    assert rooms_opened(head.hear(identity(incarnation=77))) == [5]


def test_a_skip_is_repeated_until_it_is_answered() -> None:
    head = known()
    head.start("r", item("a", 5))
    assert skipped(head.leave("r")) == [5]
    assert skipped(head.wait(1.0)) == [5]
    assert head.head.skips_unanswered() == 1
    head.hear(RoomsSkipped((5,)))
    assert head.head.skips_unanswered() == 0
    assert skipped(head.wait(60.0)) == []


def test_rooms_skipped_at_once_go_into_one_frame() -> None:
    head = known()
    head.start("r", item("a", 5), item("b", 6))
    effects = head.leave("r")
    frames = [effect.frame for effect in effects if isinstance(effect, Send)]
    assert frames == [SkipRooms((5, 6))]


def test_the_connection_to_an_address_that_answers_no_skip_is_closed() -> None:
    head = Harness()
    head.do(Joined("r", (item("a", 5),)))
    assert skipped(head.leave("r")) == [5]
    assert Hangup(f"tcp://{HERE}") in head.wait(15.0)


def test_one_that_is_known_is_kept_though_it_answers_no_skip() -> None:
    head = known()
    head.start("r", item("a", 5))
    head.leave("r")
    assert Hangup(f"tcp://{HERE}") not in head.wait(20.0)
