# SPDX-License-Identifier: Apache-2.0
"""A head's runtime, turned by hand: ranks, encode engines and tools over links in memory."""

import threading

import pytest

from epd_connector.core import admission_state as admission
from epd_connector.core.admission_state import ItemSpec, RequestState
from epd_connector.core.encode_head import RequestOver
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    MAX_FRAMES,
    Abandon,
    AnyFrame,
    Describe,
    EndRoom,
    HostGone,
    Identify,
    Identity,
    NotReady,
    Open,
    RankUp,
    Rejected,
    RoomLanded,
    RoomReceivers,
    RoomReleased,
    RoomsSkipped,
    SkipRooms,
    Tally,
)
from epd_connector.runtime import head as head_module
from epd_connector.runtime import own_ranks
from tests.unit.head_bench import (
    CODEC,
    CONTROL,
    ENCODE,
    HEAD,
    IDENTITY,
    LINK,
    TOKEN,
    Bench,
    Party,
    rooms,
)
from tests.unit.pair_bench import until

# --- ranks ----------------------------------------------------------------------------------


def test_an_item_goes_through_every_rank() -> None:
    bench = Bench()
    bench.ranks_up()
    bench.identified()
    bench.needs("r", room=2)
    assert bench.head.ask("r") is RequestState.WAITING
    bench.turn()
    assert [rooms(rank.hears(), Open) for rank in bench.ranks] == [[2], [2]]
    bench.rank_says(0, RoomLanded(2, 512))
    assert bench.head.ask("r") is RequestState.WAITING
    bench.rank_says(1, RoomLanded(2, 512))
    assert bench.head.ask("r") is RequestState.READY
    assert bench.head.promise("item-2")
    assert bench.head.held("item-2").ticket.room == 2
    assert not bench.head.promise("item-1")


def test_ranks_hear_of_decisions_in_their_order() -> None:
    bench = Bench(ranks=1)
    bench.ranks_up()
    bench.identified()
    for room in (2, 3, 4):
        bench.needs(f"r{room}", room)
        bench.head.tell(admission.Left(f"r{room}"))
    bench.turn()
    said = [(type(f), f.room) for f in bench.ranks[0].hears() if isinstance(f, Open | Abandon)]
    assert said == [(kind, room) for room in (2, 3, 4) for kind in (Open, Abandon)]


def test_a_room_fails_at_once_when_a_rank_is_not_up() -> None:
    bench = Bench()
    bench.ranks_up([0])
    bench.identified()
    bench.needs("r", room=2)
    bench.turn()
    failure = bench.failures()["r"]
    assert failure.code is Code.UNREACHABLE
    assert "rank 1" in failure.reason
    assert "not up" in failure.reason
    heard = bench.ranks[0].hears()
    assert (rooms(heard, Open), rooms(heard, Abandon)) == ([2], [2])
    # The rank that is not up has granted nothing: only the other one is waited for.
    bench.rank_says(0, RoomReleased(2))
    bench.head.tell(admission.Left("r"))
    assert bench.prefill.idle()


def test_a_room_fails_at_once_when_the_queue_to_a_rank_is_full() -> None:
    bench = Bench(ranks=1, send_queue=1)
    bench.ranks_up()
    bench.identified()
    bench.needs("one", room=2)
    bench.turn()
    bench.needs("two", room=3)
    bench.turn()
    failures = bench.failures()
    assert list(failures) == ["two"]
    assert failures["two"].code is Code.OVERLOADED
    assert "rank 0" in failures["two"].reason
    assert rooms(bench.ranks[0].hears(), Open) == [2]


def test_an_abandon_that_finds_the_queue_full_is_said_later() -> None:
    bench = Bench(ranks=1, send_queue=1)
    bench.ranks_up()
    bench.identified()
    bench.needs("one", room=2)
    bench.turn()
    bench.head.tell(admission.Left("one"))
    bench.turn()
    assert not bench.prefill.idle(), "a region is free before its rank has said so"
    assert bench.head.next_wait(0.0) is not None
    bench.turn()
    assert rooms(bench.ranks[0].hears(), Open) == [2]
    bench.turn()
    assert rooms(bench.ranks[0].hears(), Abandon) == [2]
    bench.rank_says(0, RoomReleased(2))
    assert bench.prefill.idle()
    assert bench.encode.hears() == [SkipRooms((2,))]
    bench.encode.answer(HEAD, RoomsSkipped((2,)))
    bench.turn()
    assert bench.head._ranks.next_wait() is None
    assert bench.prefill.next_deadline() is None


def test_a_question_does_not_wait_for_a_rank_that_is_stopped() -> None:
    bench = Bench(ranks=1, send_queue=1)
    bench.ranks_up()
    for _ in range(3):
        bench.tool.say(CONTROL, HEAD, Describe())
        bench.turn()
    assert bench.ranks[0].hears() == [Describe()]
    bench.turn()
    assert bench.ranks[0].hears() == []


def test_words_to_end_rooms_wait_in_their_order() -> None:
    bench = Bench(ranks=1, send_queue=1, encode=True)
    bench.ranks_up()
    over = Failure(Code.ENCODE_FAILED, "over")
    for room in (3, 4, 5):
        bench.head.tell_encode(RequestOver((room,), over))
        bench.turn()
    heard: list[AnyFrame] = []
    for _ in range(3):
        bench.turn()
        heard += bench.ranks[0].hears()
    assert heard == [EndRoom(room, over) for room in (3, 4, 5)]


def test_what_ranks_are_told_at_once_is_one_message() -> None:
    bench = Bench(ranks=2, encode=True, prefill=False)
    bench.ranks_up()
    over = Failure(Code.ENCODE_FAILED, "over")
    rooms_ = range(1, MAX_FRAMES + 2)
    bench.head.tell_encode(RequestOver(tuple(rooms_), over))
    bench.turn()
    for rank in bench.ranks:
        messages = [CODEC.decode(payload).frames() for _, payload in rank.link.wait(0)]
        assert [len(frames) for frames in messages] == [MAX_FRAMES, 1]
        assert [frame for frames in messages for frame in frames] == [
            EndRoom(room, over) for room in rooms_
        ]


def test_ranks_hear_who_receives_a_room() -> None:
    bench = Bench(ranks=2, encode=True, prefill=False)
    bench.ranks_up()
    bench.tool.say(CONTROL, HEAD, RoomReceivers(3, 1))
    bench.turn()
    assert [rank.hears() for rank in bench.ranks] == [[RoomReceivers(3, 1)]] * 2


def test_an_engine_that_encodes_nothing_takes_no_word_of_receivers() -> None:
    bench = Bench(ranks=1)
    bench.ranks_up()
    bench.tool.say(CONTROL, HEAD, RoomReceivers(3, 1))
    bench.turn()
    assert bench.ranks[0].hears() == []
    assert bench.report().counters["frames_malformed"] == 1


def test_what_waits_for_a_rank_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_ranks, "MAX_WAITING", 1)
    bench = Bench(ranks=1, send_queue=1, encode=True)
    bench.ranks_up()
    for room in (3, 4, 5):
        bench.head.tell_encode(RequestOver((room,), Failure(Code.ENCODE_FAILED, "over")))
        bench.turn()
    assert "rank 0" in caplog.text
    heard = bench.ranks[0].hears()
    bench.turn()
    assert rooms(heard + bench.ranks[0].hears(), EndRoom) == [3, 4]


def test_a_rank_that_dials_again_is_answered_over_its_new_connection() -> None:
    bench = Bench(ranks=1)
    bench.ranks_up()
    bench.identified()
    again = bench.ranks[0] = Party(bench.network, 100)
    bench.rank_says(0, Tally({}, (), ()))
    bench.needs("r", room=2)
    bench.turn()
    assert rooms(again.hears(), Open) == [2]


def test_a_rank_of_another_engine_shape_is_not_taken() -> None:
    bench = Bench(ranks=1)
    bench.rank_says(0, RankUp(1, "", {}, 0))
    assert bench.ranks[0].hears() == []
    assert bench.report().counters["frames_malformed"] == 1


# --- who may say what -----------------------------------------------------------------------


@pytest.mark.parametrize("addressee", [0, HEAD, TOKEN + 1])
def test_a_peer_without_the_token_cannot_speak_for_a_rank(addressee: int) -> None:
    bench = Bench(ranks=1)
    bench.ranks_up()
    bench.identified()
    bench.needs("r", room=2)
    bench.turn()
    bench.ranks[0].hears()
    for frame in (RankUp(0, "tcp://evil:1", {}, 1), RoomLanded(2, 512), RoomReleased(2)):
        bench.tool.say(CONTROL, addressee, frame)
    bench.turn()
    assert bench.head.ask("r") is RequestState.WAITING
    assert bench.report().counters["frames_malformed"] == 3
    bench.needs("s", room=3)
    bench.turn()
    assert rooms(bench.ranks[0].hears(), Open) == [3]
    assert bench.tool.hears() == []


def test_a_rank_that_did_not_announce_itself_is_stale() -> None:
    bench = Bench(ranks=1)
    bench.rank_says(0, RoomLanded(2, 512))
    assert bench.report().counters["frames_stale"] == 1


def test_an_answer_to_an_earlier_start_is_stale() -> None:
    bench = Bench(ranks=1)
    bench.ranks_up()
    bench.needs("r", room=2)
    bench.turn()
    bench.encode.hears()
    bench.encode.answer(HEAD - 1, IDENTITY)
    bench.turn()
    assert bench.ranks[0].hears() == []
    assert bench.report().counters["frames_stale"] == 1


def test_a_prefill_engine_answers_no_one_who_asks_who_it_is() -> None:
    bench = Bench(ranks=1)
    bench.tool.say(CONTROL, 0, Identify("model/a"))
    bench.turn()
    assert bench.tool.hears() == []
    assert bench.report().counters["frames_malformed"] == 1


# --- the encode head ------------------------------------------------------------------------


def test_an_encode_engine_is_not_ready_until_every_rank_is_up() -> None:
    bench = Bench(encode=True, prefill=False)
    for up, expected in (((), "0 of 2"), ((0,), "1 of 2")):
        bench.ranks_up(up)
        bench.tool.say(CONTROL, 0, Identify("model/a"))
        bench.turn()
        (answer,) = bench.tool.hears()
        assert isinstance(answer, NotReady)
        assert expected in answer.reason
    bench.ranks_up([1])
    bench.tool.say(CONTROL, 0, Identify("model/a"))
    bench.turn()
    (identity,) = bench.tool.hears()
    assert isinstance(identity, Identity)
    assert [rank.endpoint for rank in identity.ranks] == ["tcp://here:2", "tcp://here:3"]
    assert [rank.incarnation for rank in identity.ranks] == [100, 101]


def test_another_model_is_rejected() -> None:
    bench = Bench(encode=True, prefill=False)
    bench.tool.say(CONTROL, 0, Identify("model/b"))
    bench.turn()
    (answer,) = bench.tool.hears()
    assert isinstance(answer, Rejected)
    assert answer.failure.code is Code.MISMATCH


# --- figures --------------------------------------------------------------------------------


def test_a_report_is_given_with_no_rank_up() -> None:
    bench = Bench()
    report = bench.report()
    assert (report.ranks_up, report.role, report.fingerprint) == (0, "ec_both", "model/a")
    bench.ranks_up([1])
    assert bench.report().ranks_up == 1


def test_ranks_counts_and_failures_are_in_the_report_and_in_the_interval() -> None:
    bench = Bench(ranks=1)
    assert bench.head.take_counted() is None
    bench.ranks_up()
    bench.rank_says(0, Tally({"bytes_sent": 10.0, "unheard_of": 1.0}, (0.5,), ("room x: broke",)))
    bench.rank_says(0, Tally({"bytes_sent": 5.0}, (), ()))
    counted = bench.head.take_counted()
    assert counted is not None
    assert (counted.bytes_sent, counted.encoded_to_landed_s) == (15, [0.5])
    assert bench.head.take_counted() is None
    report = bench.report()
    assert report.counters["bytes_sent"] == 15
    assert report.encoded_to_landed_s == (0.5,)
    assert report.failures == ("room x: broke",)


def test_an_effect_that_cannot_be_carried_out_does_not_hold_up_the_next_one() -> None:
    bench = Bench(ranks=1)
    bench.ranks_up()
    unwritable = ItemSpec("a", 4, "image", 1 << 70, ENCODE)
    for request, item in (("r", unwritable), ("s", ItemSpec("b", 4, "image", 2, ENCODE))):
        bench.head.tell(admission.Joined(request, (item,)))
        bench.head.tell(admission.Spared(request, (item.hash,)))
    bench.turn()
    assert bench.encode.hears() == [SkipRooms((2,))]
    assert bench.report().counters["errors_internal"] == 1


def test_an_event_that_raises_is_counted_and_the_next_one_is_handled() -> None:
    bench = Bench(ranks=1)
    bench.rank_says(0, Tally({"bytes_sent": float("inf")}, (), ()))
    bench.ranks_up()
    bench.rank_says(0, Tally({"bytes_sent": float("inf")}, (), ()))
    assert bench.report().counters["errors_internal"] == 1


def test_outcomes_are_told_once() -> None:
    bench = Bench(ranks=1)
    bench.head.tell(admission.Joined("r", (ItemSpec("a", 4, "image"),)))
    bench.head.tell(admission.Needed("r", ("a",)))
    assert bench.failures()["r"].code is Code.BAD_REQUEST
    assert bench.failures() == {}


# --- ranks that are gone, hosts that are said to be -----------------------------------------


def test_what_waits_for_a_rank_whose_process_has_ended_fails_in_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_module, "BEAT_S", 0.0)
    bench = Bench(ranks=2)
    bench.ranks_up()
    bench.identified()
    bench.needs("r", room=2)
    bench.turn()
    assert bench.failures() == {}
    bench.ranks[1].link.close()
    until(lambda: "r" in bench.failures_after_a_turn())
    failure = bench.failures()["r"]
    assert failure.code is Code.PEER_DEAD
    assert "rank 1 of this engine is gone" in failure.reason
    # It is said once; who comes now is told at once, and it is not called an overload.
    bench.asked_again("next", room=3)
    failure = bench.failures()["next"]
    assert failure.code is Code.PEER_DEAD
    assert "rank 1 of this engine is gone" in failure.reason


def test_a_rank_that_makes_a_new_connection_is_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head_module, "BEAT_S", 0.0)
    bench = Bench(ranks=1)
    bench.ranks_up()
    bench.identified()
    bench.needs("r", room=2)
    bench.turn()
    bench.ranks[0].link.close()
    until(lambda: "r" in bench.failures_after_a_turn())
    bench.failures()
    bench.ranks[0] = Party(bench.network, 100)
    bench.rank_says(0, RankUp(0, "tcp://here:2", {"shm": "x"}, 1 << 20))
    bench.asked_again("next", room=3)
    assert rooms(bench.ranks[0].hears(), Open) == [3]


def test_the_word_that_a_host_is_dead_reaches_every_rank_and_is_confirmed() -> None:
    bench = Bench(ranks=2)
    bench.ranks_up()
    bench.tool.say(CONTROL, 0, HostGone("10.0.0.1"))
    bench.turn()
    assert bench.tool.hears() == [HostGone("10.0.0.1")]
    for rank in bench.ranks:
        assert HostGone("10.0.0.1") in rank.hears()


def test_a_broken_connection_makes_the_head_ask_again_who_is_there() -> None:
    bench = Bench(ranks=1)
    bench.ranks_up()
    bench.identified()
    bench.encode.link.close()
    bench.turn()
    bench.encode = Party(bench.network, 51, f"tcp://{ENCODE}")
    bench.needs("r", room=2)
    bench.turn()
    assert bench.encode.hears() == [Identify("model/a")]


def test_closing_waits_until_skips_were_heard() -> None:
    bench = Bench(ranks=1)
    bench.ranks_up()
    bench.identified()
    bench.needs("r", room=2)
    bench.turn()
    bench.head._loop.start()
    closing = threading.Thread(target=bench.head.close, args=(30.0,))
    closing.start()
    until(lambda: rooms(bench.ranks[0].hears(), Abandon) == [2])
    bench.ranks[0].say(LINK, TOKEN, RoomReleased(2))
    until(lambda: SkipRooms((2,)) in bench.encode.hears())
    assert closing.is_alive()
    bench.encode.answer(HEAD, RoomsSkipped((2,)))
    closing.join(30)
    assert not closing.is_alive()
