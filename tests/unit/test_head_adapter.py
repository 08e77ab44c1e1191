# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of a prefill engine: may a request run, and what do its steps load?"""

from vllm.v1.request import RequestStatus

from epd_connector.hosts.vllm.plan import LoadSpec, StepPlan
from epd_connector.rows import Layout
from tests.unit.host_bench import ROWS, RUNNING, Host, feature, request, tickets

# --- receiving ------------------------------------------------------------------------------


def test_a_request_waits_until_its_items_have_landed_and_then_loads_them() -> None:
    host = Host()
    r = request("r", "ab", tickets(1, 2))
    assert not host.available(r)
    host.land(1)
    assert not host.available(r)
    host.land(2)
    assert host.available(r)
    plan = host.runs(r, 0, 1)
    offsets = [load.offset for load in plan.loads]
    assert plan.loads == [
        LoadSpec(room, hash, offset, ROWS, 64, "bfloat16", Layout.WHOLE)
        for room, hash, offset in zip((1, 2), "ab", offsets, strict=True)
    ]
    assert len(set(offsets)) == 2
    assert (plan.claims, plan.unclaimed) == ([], [])
    assert host.step() == StepPlan()


def test_rooms_are_opened_for_what_is_still_to_be_computed_only() -> None:
    host = Host()
    assert not host.available(request("r", "abc", tickets(1, 2, 3)), computed=14)
    host.land()
    assert host.opened() == [3]


def test_a_prefix_hit_lets_a_request_through_and_keeps_its_rooms_until_it_runs() -> None:
    host = Host()
    r = request("r", "ab", tickets(1, 2))
    assert host.available(r, computed=24)
    assert host.skipped() == []
    # The hit was gone before the request was scheduled.
    assert not host.available(r, computed=0)
    host.land(1, 2)
    assert host.opened() == [1, 2]
    assert host.available(r, computed=0)
    assert host.skipped() == []


def test_rooms_of_computed_items_are_skipped_once_when_the_request_runs() -> None:
    host = Host()
    r = request("r", "ab", tickets(1, 2))
    assert host.available(r, computed=10) is False
    host.land(2)
    assert host.available(r, computed=10)
    host.runs(r, 1)
    assert host.available(r, computed=14)
    assert host.skipped() == [1]
    assert host.available(r, computed=14)
    assert host.skipped() == []


def test_decode_steps_do_nothing() -> None:
    host = Host()
    r = request("r", "ab", tickets(1, 2))
    assert not host.available(r)
    host.land(1, 2)
    assert host.available(r)
    host.runs(r, 0, 1)
    assert host.available(r, computed=14)
    calls = host.calls()
    for computed in range(14, 200):
        assert host.available(r, computed)
        assert host.step() == StepPlan()
        assert host.adapter.take_unavailable_requests() == set()
    assert host.calls() == calls


def test_a_chunked_prefill_asks_for_nothing_twice() -> None:
    host = Host()
    r = request("r", "ab", tickets(1, 2))
    assert not host.available(r)
    host.land(1, 2)
    assert host.available(r)
    host.runs(r, 0)
    assert host.available(r, computed=7)
    plan = host.runs(r, 1)
    assert [load.hash for load in plan.loads] == ["b"]
    assert host.available(r, computed=12)
    assert host.step() == StepPlan()
    assert host.opened() == [1, 2]
    assert host.skipped() == []


def test_an_item_that_comes_twice_is_received_once_and_loaded_once() -> None:
    host = Host()
    r = request("r", "aa", tickets(1, 2))
    assert not host.available(r)
    host.land(1)
    assert host.available(r)
    assert host.skipped() == [2]
    plan = host.runs(r, 0)
    assert [load.room for load in plan.loads] == [1]


def test_a_preempted_request_needs_its_items_again_and_has_them() -> None:
    host = Host()
    r = request("r", "a", tickets(1))
    assert not host.available(r)
    host.land(1)
    assert host.available(r)
    host.runs(r, 0)
    host.free(r, 0)
    r.status = RequestStatus.PREEMPTED
    host.step(preempted_req_ids={"r"}, free_encoder_mm_hashes=["a"])
    assert host.available(r)
    plan = host.runs(r, 0)
    assert [load.hash for load in plan.loads] == ["a"]


def test_what_was_not_promised_is_not_loaded() -> None:
    host = Host()
    r = request("r", "a", tickets(1), pixels=True)
    assert not host.available(r)
    host.land(1)
    host.allocate(r, 0)
    assert host.step().loads == []


def test_a_promise_holds_for_one_pass() -> None:
    host = Host()
    r = request("r", "a", tickets(1))
    assert not host.adapter.has_cache_item("a")
    assert not host.available(r)
    host.land(1)
    assert host.adapter.has_cache_item("a")
    host.step()
    host.allocate(r, 0)
    assert host.step().loads == []


def test_loads_of_a_step_without_tokens_travel_with_the_next_one() -> None:
    host = Host()
    r = request("r", "a", tickets(1))
    assert not host.available(r)
    host.land(1)
    assert host.available(r)
    assert host.adapter.has_cache_item("a")
    host.allocate(r, 0)
    assert host.step(total_num_scheduled_tokens=0) == StepPlan()
    assert [load.hash for load in host.step().loads] == ["a"]


# --- the host's encoder cache ---------------------------------------------------------------


def cached(host: Host) -> None:
    """Item ``a`` is in the host's encoder cache, nobody refers to it, and no slab holds it."""
    maker = request("maker", "a", None, pixels=True)
    assert host.available(maker)
    host.runs(maker, 0)
    host.free(maker, 0)
    host.finish(maker)


def test_an_entry_with_pixels_is_relied_on_and_needs_no_room() -> None:
    host = Host()
    cached(host)
    r = request("r", "a", tickets(2), pixels=True)
    assert host.available(r)
    assert host.opened() == []


def test_an_entry_without_pixels_that_nobody_refers_to_is_received_all_the_same() -> None:
    """The host may remove it in the pass under way, and could not encode the item itself."""
    host = Host()
    cached(host)
    r = request("r", "a", tickets(2))
    assert not host.available(r)
    host.land(2)
    assert host.available(r)


def test_a_resumed_request_does_not_rely_on_what_it_needed_before() -> None:
    host = Host()
    q, r = request("q", "a", tickets(1)), request("r", "a", tickets(2))
    assert not host.available(q)
    assert not host.available(r)
    host.land(1)
    assert host.available(q)
    host.runs(q, 0)
    # r is let through by the entry that q refers to, runs past it, and is preempted.
    assert host.available(r)
    r.status = RUNNING
    assert host.available(r, computed=ROWS)
    r.status = RequestStatus.PREEMPTED
    host.finish(q)
    host.step(free_encoder_mm_hashes=["a"], preempted_req_ids={"r"})
    drop_residents(host)
    assert not host.available(r)
    assert not host.adapter.has_cache_item("a")
    assert host.adapter.take_unavailable_requests() == {"r"}


def test_with_pixels_a_resumed_request_whose_room_is_used_is_encoded_by_the_host() -> None:
    host = Host()
    r = request("r", "a", tickets(1), pixels=True)
    assert not host.available(r)
    host.land(1)
    assert host.available(r)
    host.runs(r, 0)
    r.status = RequestStatus.PREEMPTED
    host.step(free_encoder_mm_hashes=["a"], preempted_req_ids={"r"})
    drop_residents(host)
    assert host.available(r)
    assert not host.adapter.has_cache_item("a")
    assert host.adapter.take_unavailable_requests() == set()


def test_a_request_that_ends_before_it_was_asked_for_lets_its_rooms_go() -> None:
    host = Host()
    host.finish(request("r", "ab", tickets(1, 2)))
    assert sorted(host.skipped()) == [1, 2]
    assert host.adapter.take_unavailable_requests() == set()


def test_media_that_a_session_brings_later_is_seen() -> None:
    host = Host()
    r = request("r", "a", tickets(1))
    assert not host.available(r)
    host.land(1)
    assert host.available(r)
    host.runs(r, 0)
    assert host.available(r, computed=ROWS)
    r.mm_features.append(feature("b", 1))
    assert not host.available(r, computed=ROWS)
    assert host.adapter.take_unavailable_requests() == {"r"}


def drop_residents(host: Host) -> None:
    """Another item takes the bytes of those that nobody waits for."""
    prefill = host.runtime._prefill
    assert prefill is not None
    while prefill._desk.drop_oldest():
        pass


def test_a_request_that_allocates_itself_does_not_rely_on_an_entry_without_references() -> None:
    host = Host()
    cached(host)
    r = request("r", "ba", tickets(3, 2))
    assert not host.available(r)
    host.land(3, 2)
    assert host.available(r)


def test_an_entry_that_a_request_refers_to_stays() -> None:
    host = Host()
    maker = request("maker", "a", None, pixels=True)
    assert host.available(maker)
    host.runs(maker, 0)
    assert host.available(request("other", "b", None, pixels=True))
    assert host.available(request("r", "a", tickets(2)))
