# SPDX-License-Identifier: Apache-2.0
"""The encode head: who it says it is, when, and what it passes on to its ranks."""

from epd_connector.core.effects import Reply, TellRanks
from epd_connector.core.encode_head import (
    EncodeHead,
    EncodeHeadSettings,
    FromPeer,
    RankReady,
    RequestOver,
    RoomsUnneeded,
)
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import (
    DropRoom,
    EndRoom,
    Identify,
    Identity,
    NotReady,
    Ping,
    RankAddress,
    RankUp,
    Rejected,
    RoomReceivers,
    RoomsSkipped,
    SkipRooms,
)

SETTINGS = EncodeHeadSettings(2, "model-a", "bfloat16", 2, {"image": 384})


def up(rank: int, incarnation: int) -> RankReady:
    return RankReady(incarnation, RankUp(rank, f"tcp://10.0.0.1:{9000 + rank}", {"shm": "h"}, 0))


def ask(head: EncodeHead, fingerprint: str = "model-a") -> object:
    (reply,) = head.handle(FromPeer(7, 99, Identify(fingerprint)), 0.0)
    assert isinstance(reply, Reply)
    assert (reply.route, reply.addressee) == (7, 99)
    return reply.frame


def test_it_is_not_ready_before_every_rank_is_up() -> None:
    head = EncodeHead(SETTINGS)
    assert ask(head) == NotReady("0 of 2 ranks are up")
    head.handle(up(1, 11), 0.0)
    head.handle(up(1, 11), 0.0)
    assert ask(head) == NotReady("1 of 2 ranks are up")


def test_it_says_who_it_is_in_rank_order() -> None:
    head = EncodeHead(SETTINGS)
    head.handle(up(1, 11), 0.0)
    head.handle(up(0, 10), 0.0)
    addresses = tuple(
        RankAddress(f"tcp://10.0.0.1:{9000 + rank}", 10 + rank, {"shm": "h"}) for rank in (0, 1)
    )
    assert ask(head) == Identity("model-a", "bfloat16", 2, {"image": 384}, addresses)
    assert head.ranks_up() == 2


def test_a_rank_that_started_again_replaces_its_older_self() -> None:
    head = EncodeHead(SETTINGS)
    for event in (up(0, 10), up(1, 11), up(1, 12)):
        head.handle(event, 0.0)
    identity = ask(head)
    assert isinstance(identity, Identity)
    assert [rank.incarnation for rank in identity.ranks] == [10, 12]


def test_a_rank_that_this_engine_does_not_have_is_not_counted() -> None:
    head = EncodeHead(SETTINGS)
    head.handle(up(0, 10), 0.0)
    head.handle(up(5, 11), 0.0)
    assert ask(head) == NotReady("1 of 2 ranks are up")


def test_another_model_is_rejected_with_both_names_even_before_it_is_ready() -> None:
    answer = ask(EncodeHead(SETTINGS), "model-b")
    assert isinstance(answer, Rejected)
    assert answer.failure.code is Code.MISMATCH
    assert "model-a" in answer.failure.reason
    assert "model-b" in answer.failure.reason


def test_word_of_rooms_is_passed_on_to_every_rank() -> None:
    head = EncodeHead(SETTINGS)
    failure = Failure(Code.CANCELLED, "gone")
    drops = [TellRanks(DropRoom(1)), TellRanks(DropRoom(2))]
    answer = Reply(7, 99, RoomsSkipped((1, 2)))
    assert head.handle(FromPeer(7, 99, SkipRooms((1, 2))), 0.0) == [*drops, answer]
    assert head.handle(RoomsUnneeded((1, 2)), 0.0) == drops
    assert head.handle(RequestOver((3,), failure), 0.0) == [TellRanks(EndRoom(3, failure))]
    receivers = RoomReceivers(4, 2)
    assert head.handle(FromPeer(7, 99, receivers), 0.0) == [TellRanks(receivers)]


def test_a_frame_that_is_not_for_a_head_does_nothing() -> None:
    assert EncodeHead(SETTINGS).handle(FromPeer(7, 99, Ping()), 0.0) == []
