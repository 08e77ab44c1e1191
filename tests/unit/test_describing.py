# SPDX-License-Identifier: Apache-2.0
"""What machines look like from outside, who is answered, and how large an answer gets."""

import functools

import msgspec
import pytest

from epd_connector.cli.inspect import as_text
from epd_connector.core.describe import (
    describe_encode,
    describe_prefill,
    describe_receiver,
    describe_sender,
)
from epd_connector.core.encode_head import EncodeHead, EncodeHeadSettings
from epd_connector.errors import Code, Failure
from epd_connector.link.base import PeerId
from epd_connector.protocol.codec import MAX_FRAME_BYTES, Codec
from epd_connector.protocol.frames import (
    EngineDescription,
    Envelope,
    Rejected,
    SenderSilent,
)
from epd_connector.protocol.state import (
    LISTED,
    LISTED_ITEMS,
    EncodeState,
    PrefillState,
    RankState,
    name,
)
from epd_connector.runtime.describing import (
    MAX_ASKED,
    MAX_FAILURES,
    PATIENCE_S,
    Describing,
    HeadPlace,
    process_state,
)
from epd_connector.stats import Counters
from tests.unit.admission_harness import HERE, item, known, settings
from tests.unit.receive_bench import Bench as ReceiveBench
from tests.unit.send_bench import Bench as SendBench

# --- who asks, and how much is said ---------------------------------------------------------


ENCODE = EncodeState("bfloat16", {"image": 64})


def describing(ranks: int, prefill: PrefillState | None = None) -> Describing:
    place = HeadPlace("ec_both", "f" * 500, 1, 2, ranks, "tcp://here:1", "")
    made = Describing(place, lambda: ranks, Counters, lambda now: prefill, ENCODE)
    for _ in range(2 * MAX_FAILURES):
        made.failed("x" * 2000, 0.0)
    return made


def test_a_rank_that_does_not_answer_is_waited_for_and_named() -> None:
    asked = describing(2)
    assert asked.ask(PeerId(7), 9, now=10.0)
    asked.heard(full_rank(0))
    assert asked.answers(10.0) == []
    assert asked.next_wait(10.0) == PATIENCE_S
    ((peer, asker, frame),) = asked.answers(10.0 + PATIENCE_S)
    assert (peer, asker) == (7, 9)
    assert [rank.rank for rank in frame.state.ranks] == [0]
    assert frame.state.silent_ranks == (1,)
    assert asked.next_wait(10.0) is None


def test_everybody_who_waits_is_answered_and_no_more_than_so_many_wait() -> None:
    asked = describing(1)
    assert [asked.ask(PeerId(n), n, now=0.0) for n in range(MAX_ASKED + 1)] == [
        *[True] * MAX_ASKED,
        False,
    ]
    asked.heard(full_rank(0))
    assert len(asked.answers(0.0)) == MAX_ASKED


@functools.cache
def full_rank(rank: int) -> RankState:
    """One whose every table holds more than can be listed."""
    sending, receiving = SendBench(max_rooms=1000), ReceiveBench(max_rooms=1000)
    for number in range(2 * LISTED):
        sending.claim(number, hash=f"{number:03}" + "\N{GRINNING FACE}" * 100)
        sending.hello(rank=number)
        receiving.open(number, incarnation=10_000 + number)
    return RankState(
        rank=rank,
        incarnation=name(rank),
        endpoint="tcp://" + "h" * 250 + ":1",
        transports=("shm", "mooncake"),
        process=process_state(),
        send=describe_sender(sending.machine, 1.0),
        receive=describe_receiver(receiving.machine, 1.0),
    )


def test_tables_are_cut_to_the_oldest_and_totals_count_all() -> None:
    rank = full_rank(0)
    assert rank.send is not None
    assert rank.receive is not None
    assert len(rank.send.rooms) == len(rank.receive.rooms) == LISTED
    assert rank.send.room_totals == {"claimed": 2 * LISTED}
    assert rank.receive.room_totals == {"granted": 2 * LISTED}
    assert rank.receive.peers_total == 2 * LISTED


@functools.cache
def full_head() -> PrefillState:
    """One with more of everything than can be listed, under names of a client's choice."""
    head = known(settings(max_rooms=1 << 14))
    for number in range(2 * LISTED):
        hashes = [f"{number:03}{i:02}" + "\N{GRINNING FACE}" * 100 for i in range(LISTED_ITEMS + 1)]
        specs = [
            item(h, number * 100 + i + 9, address=f"e{number}:1") for i, h in enumerate(hashes)
        ]
        head.start(f"{number}" + "\N{GRINNING FACE}" * 500, *specs)
    return describe_prefill(head.head, head.now)


@pytest.mark.parametrize("ranks", [1, 8, 64, 512])
def test_however_full_the_tables_an_answer_fits_into_a_frame(ranks: int) -> None:
    asked = describing(ranks, full_head())
    asked.ask(PeerId(1), 1, now=0.0)
    for rank in range(ranks):
        asked.heard(msgspec.structs.replace(full_rank(0), rank=rank))
    ((_, _, frame),) = asked.answers(0.0)
    payload = Codec(b"key").encode(Envelope(1 << 60, 1 << 60, frame))
    assert len(payload) <= MAX_FRAME_BYTES
    decoded = Codec(b"key").decode(payload).frame
    assert isinstance(decoded, EngineDescription)
    assert decoded.state == frame.state
    assert decoded.state.prefill is not None
    assert len(decoded.state.failures) == MAX_FAILURES
    assert sum(decoded.state.prefill.request_totals.values()) == 2 * LISTED
    assert [rank.rank for rank in decoded.state.ranks] == list(range(ranks))
    assert as_text(decoded.state)


def test_one_rank_and_a_full_head_are_listed_in_full() -> None:
    asked = describing(1, full_head())
    asked.ask(PeerId(1), 1, now=0.0)
    asked.heard(full_rank(0))
    ((_, _, frame),) = asked.answers(0.0)
    assert frame.state.prefill == full_head()
    assert frame.state.ranks == (full_rank(0),)


def test_a_name_that_cannot_be_sent_as_it_is_does_not_keep_the_answer_away() -> None:
    head = known()
    head.start("request \ud800", item("item \ud800", 5))
    sending = SendBench()
    sending.claim(1, hash="item \ud800")
    state = describe_prefill(head.head, head.now)
    assert [(r.request, r.waits_for) for r in state.requests] == [("request ?", ("item ?",))]
    assert [t.item for t in state.transfers] == ["item ?"]
    assert [room.item for room in describe_sender(sending.machine, 0.0).rooms] == ["item ?"]


# --- what machines look like ----------------------------------------------------------------


def test_a_prefill_head_is_described_with_what_waits_for_what() -> None:
    head = known(settings(max_rooms=1000))
    head.start("r", item("a", 5))
    head.start("s", item("a", 6), item("b", 7, address="elsewhere:1"))
    state = describe_prefill(head.head, head.now + 2.0)
    assert (state.dtype, state.width_unit) == ("bfloat16", 64)
    assert state.transfer_totals == {"receiving": 1, "resolving": 1}
    waits = [(r.request, r.waits, r.waits_for, r.in_state_s) for r in state.requests]
    assert waits == [("r", 1, ("a",), 2.0), ("s", 2, ("a", "b"), 2.0)]
    assert {a.address: a.state for a in state.encode_engines}["elsewhere:1"] == "asking"
    assert [t.age_s for t in state.transfers] == [2.0, 2.0]


def test_requests_that_wait_come_first_the_longest_wait_at_the_top() -> None:
    head = known()
    head.start("has", item("a", 5))
    head.land(5)
    for room, request in ((6, "first"), (7, "second")):
        head.now += 10.0
        head.start(request, item(request, room))
    state = describe_prefill(head.head, head.now + 1.0)
    assert [(r.request, r.state, r.in_state_s) for r in state.requests] == [
        ("first", "waiting", 11.0),
        ("second", "waiting", 1.0),
        ("has", "ready", 21.0),
    ]


def test_a_request_that_starts_to_wait_again_waits_from_then_on() -> None:
    head = known()
    head.start("r", item("a", 5), item("b", 6))
    head.now += 10.0
    head.land(5, 6)
    assert [r.in_state_s for r in describe_prefill(head.head, head.now).requests] == [0.0]
    head.now += 5.0
    head.need("r", "a")
    assert [r.in_state_s for r in describe_prefill(head.head, head.now).requests] == [5.0]


def test_an_encode_engine_that_is_not_used_is_listed_with_the_reason() -> None:
    head = known()
    head.rank(0, SenderSilent(1, Failure(Code.PEER_DEAD, "it does not answer")))
    head.start("r", item("a", 5, address="wrong:1"))
    head.hear(Rejected(Failure(Code.MISMATCH, "another model")), "wrong:1")
    state = describe_prefill(head.head, head.now)
    reasons = {a.address: (a.state, a.reason) for a in state.encode_engines}
    assert "another model" in reasons["wrong:1"][1]
    assert reasons["wrong:1"][0] == "refused"
    assert reasons[HERE][0] == "known"
    assert "it does not answer" in reasons[HERE][1]
    assert state.encode_engine_totals == {"known": 2, "refused": 1}
    later = describe_prefill(head.head, head.now + head.settings.failed_peer_s)
    assert {a.address: a.reason for a in later.encode_engines}[HERE] == ""


def test_an_encode_head_is_described_with_what_its_tower_gives() -> None:
    machine = EncodeHead(EncodeHeadSettings(1, "model", "float16", 2, {"image": 64, "video": 128}))
    assert describe_encode(machine) == EncodeState("float16", {"image": 64, "video": 128})


def test_a_room_of_an_encode_rank_has_an_age_and_a_time_in_its_state() -> None:
    bench = SendBench()
    bench.asked(1)
    bench.now = 3.0
    bench.claim(1)
    bench.now = 5.0
    before = bench.machine.balance()
    state = describe_sender(bench.machine, 9.0)
    (room,) = state.rooms
    assert (room.state, room.age_s, room.in_state_s) == ("claimed", 9.0, 6.0)
    assert (room.grants, room.answered, room.writing) == (1, 0, 0)
    assert [(p.rank, p.ranks, p.heard_s, p.open_grants) for p in state.peers] == [(0, 1, 9.0, 1)]
    assert bench.machine.balance() == before


def test_a_write_in_flight_is_seen_at_its_room_its_peer_and_its_rank() -> None:
    bench = SendBench()
    bench.asked(1)
    effects = bench.offer(1)
    state = describe_sender(bench.machine, 0.0)
    assert (state.rooms[0].writing, state.peers[0].writing, state.writes) == (1, 1, 1)
    assert state.slab.landed > 0
    bench.wrote(effects)
    state = describe_sender(bench.machine, 0.0)
    assert (state.rooms, state.peers[0].writing, state.writes) == ((), 0, 0)


def test_a_write_to_a_peer_that_was_lost_is_still_counted() -> None:
    bench = SendBench()
    bench.asked(1)
    bench.offer(1)
    bench.tick(5.0)
    state = describe_sender(bench.machine, 6.0)
    assert (state.peers, state.writes) == ((), 1)
    assert state.room_totals == {"draining": 1}


def test_a_silent_writer_and_its_room_are_seen_at_a_prefill_rank() -> None:
    bench = ReceiveBench()
    bench.open(1)
    bench.run(6.0)
    state = describe_receiver(bench.machine, 8.0)
    (room,), (peer,) = state.rooms, state.peers
    assert (room.state, room.age_s, room.in_state_s) == ("quarantined", 8.0, 3.0)
    assert (peer.silent, peer.heard_s, peer.rooms) == (True, 8.0, 1)


def test_looking_changes_nothing() -> None:
    head, sending, receiving = known(), SendBench(), ReceiveBench()
    head.start("r", item("a", 5))
    sending.asked(1)
    receiving.open(1)
    for _ in range(2):
        # A machine that is told of time much later would end what it waits for.
        describe_prefill(head.head, head.now + 1e6)
        describe_sender(sending.machine, 1e6)
        describe_receiver(receiving.machine, 1e6)
    assert head.head.transfers()
    assert sending.state(1) is not None
    assert receiving.state(1) is not None
    for machine in (head.head, sending.machine, receiving.machine):
        machine.check()
