# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: requests that fail, encode engines, and engines that do both."""

import logging

import pytest

from epd_connector.config import Role
from epd_connector.hosts.vllm.plan import ClaimSpec, StepPlan
from epd_connector.protocol.frames import (
    DropRoom,
    EndRoom,
    SlabFree,
    SlabFull,
)
from tests.unit.head_bench import ENCODE, TOKEN, rooms
from tests.unit.host_bench import ME, ROWS, Host, request, tickets

# --- failures -------------------------------------------------------------------------------


def test_bad_parameters_fail_a_request_once(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    r = request("r-17", "ab", tickets(1))
    assert not host.available(r)
    assert not host.available(r)
    assert host.adapter.take_unavailable_requests() == {"r-17"}
    assert host.adapter.take_unavailable_requests() == set()
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "r-17" in errors[0]
    assert "1 entries" in errors[0]
    host.finish(r)


def test_a_lost_item_fails_its_request_once_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host()
    r, other = request("r-17", "a", tickets(1)), request("other", "b", tickets(2))
    assert not host.available(r)
    assert not host.available(other)
    host.land()
    host.lose(1)
    assert host.adapter.take_unavailable_requests() == {"r-17"}
    assert not host.available(r)
    assert host.adapter.take_unavailable_requests() == set()
    assert "request r-17 fails" in caplog.text
    assert "the tower is broken" in caplog.text
    host.land(2)
    assert host.available(other)


def test_a_lost_item_with_pixels_is_encoded_here_where_that_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host(encode_locally=True)
    r = request("r-17", "a", tickets(1), pixels=True)
    assert not host.available(r)
    host.land()
    host.lose(1)
    assert host.available(r)
    assert host.adapter.take_unavailable_requests() == set()
    assert not host.adapter.has_cache_item("a")
    assert "r-17" in caplog.text


def test_an_item_without_pixels_and_room_fails_its_request_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host()
    assert not host.available(request("r", "a"))
    assert host.adapter.take_unavailable_requests() == {"r"}
    assert "without pixels and without a room" in caplog.text


def test_a_request_that_finished_is_not_reported() -> None:
    host = Host()
    r = request("r", "a", tickets(1))
    assert not host.available(r)
    host.land()
    host.lose(1)
    host.finish(r)
    assert host.adapter.take_unavailable_requests() == set()


def test_a_request_that_is_aborted_while_it_waits_gives_up_its_rooms() -> None:
    host = Host()
    r = request("r", "ab", tickets(1, 2))
    assert not host.available(r)
    assert host.finish(r) is None
    assert sorted(host.skipped()) == [1, 2]


def test_nothing_of_a_request_is_kept_when_it_is_over() -> None:
    host = Host(Role.BOTH)
    for number, encode in ((1, ENCODE), (2, ME)):
        r = request(f"r{number}", "a", tickets(number, encode=encode), pixels=True)
        host.available(r)
        host.finish(r)
    host.step()
    adapter = host.adapter
    assert not adapter._entries
    assert not adapter._claimed
    assert not adapter._unavailable


# --- the encode side ------------------------------------------------------------------------


def test_a_producer_claims_the_rooms_of_its_requests_and_lets_them_through() -> None:
    host = Host(Role.PRODUCER)
    r = request("r", "ab", tickets(1, None), pixels=True)
    assert host.available(r)
    assert host.step().claims == [ClaimSpec(1, "a", ROWS)]
    assert host.available(r, computed=14)
    assert host.step() == StepPlan()


def test_claims_of_a_step_without_tokens_travel_with_the_next_one() -> None:
    host = Host(Role.PRODUCER)
    assert host.available(request("r", "a", tickets(1), pixels=True))
    assert host.step(total_num_scheduled_tokens=0) == StepPlan()
    assert host.step().claims == [ClaimSpec(1, "a", ROWS)]


def test_a_producer_answers_with_what_a_router_needs() -> None:
    host = Host(Role.PRODUCER)
    r = request("r", "ab", tickets(1, 2), pixels=True)
    host.available(r)
    assert host.finish(r) == {"a": "image", "b": "image"}
    assert host.finish(request("text", "")) is None


def test_a_hash_is_unclaimed_when_its_last_request_is_over() -> None:
    host = Host(Role.PRODUCER)
    one = request("one", "a", tickets(1), pixels=True)
    two = request("two", "a", tickets(2), pixels=True)
    host.available(one)
    host.available(two)
    assert [claim.room for claim in host.step().claims] == [1, 2]
    host.finish(one)
    assert host.step().unclaimed == []
    host.finish(two)
    assert host.step().unclaimed == ["a"]
    assert host.step() == StepPlan()
    host.bench.turn()
    assert rooms(host.bench.ranks[0].hears(), EndRoom) == [1, 2]


def test_a_request_that_is_over_before_its_step_claims_nothing() -> None:
    host = Host(Role.PRODUCER)
    r = request("r", "a", tickets(1), pixels=True)
    host.available(r)
    host.finish(r)
    assert host.step().claims == []


def test_a_claim_made_while_the_hash_is_given_up_is_not_forgotten() -> None:
    host = Host(Role.PRODUCER)
    one = request("one", "a", tickets(1), pixels=True)
    host.available(one)
    host.step()
    host.finish(one)
    host.available(request("two", "a", tickets(2), pixels=True))
    plan = host.step()
    assert (plan.unclaimed, [claim.room for claim in plan.claims]) == (["a"], [2])


# --- both roles in one engine ---------------------------------------------------------------


def test_rooms_of_the_own_address_are_claimed_and_others_received() -> None:
    host = Host(Role.BOTH)
    params = {"epd": tickets(1, encode=ME)["epd"] + tickets(2)["epd"]}  # type: ignore[operator]
    r = request("r", "ab", params, pixels=True)
    assert not host.available(r)
    assert host.step().claims == [ClaimSpec(1, "a", ROWS)]
    host.land(2)
    assert host.available(r)
    assert host.opened() == [2]


def test_an_own_room_that_is_used_here_a_second_time_is_skipped() -> None:
    host = Host(Role.BOTH)
    encode = request("encode", "a", tickets(1, encode=ME), pixels=True)
    assert host.available(encode)
    assert host.step().claims == [ClaimSpec(1, "a", ROWS)]
    host.runs(encode, 0)
    assert host.available(request("prefill", "a", tickets(1, encode=ME)))
    assert host.step().claims == []
    host.bench.turn()
    assert rooms(host.bench.ranks[0].hears(), DropRoom) == [1]


def test_a_request_without_media_is_none_of_its_business() -> None:
    host = Host(Role.BOTH)
    r = request("r", "")
    assert host.available(r)
    assert host.finish(r) is None


# --- a send slab that is full ---------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.PRODUCER, Role.BOTH])
def test_requests_wait_while_the_send_slab_is_full_but_for_those_that_would_empty_it(
    role: Role,
) -> None:
    host = Host(role)
    names = {"running": 1, "waiting": 2, "granted": 3}
    claims = {
        name: request(name, chr(96 + room), tickets(room, encode="elsewhere:1"), pixels=True)
        for name, room in names.items()
    }
    if role is Role.BOTH:
        for name, room in names.items():
            claims[name].ec_transfer_params = tickets(room, encode=ME)
    assert host.available(claims["running"])
    host.runs(claims["running"], 0)
    rank = host.bench.ranks[0]
    rank.answer(TOKEN, SlabFull((3,)))
    host.bench.turn()
    assert {name: host.available(claim) for name, claim in claims.items()} == {
        "running": True,
        "waiting": False,
        "granted": True,
    }
    assert host.available(request("text", ""))
    rank.answer(TOKEN, SlabFree())
    host.bench.turn()
    assert host.available(claims["waiting"])
