# SPDX-License-Identifier: Apache-2.0
"""The mirror of the host's encoder cache: entries, who refers to them, what a pass removes."""

from epd_connector.hosts.vllm.mirror import CacheMirror


def test_an_entry_is_held_and_referred_to_until_it_is_released() -> None:
    mirror = CacheMirror()
    assert not mirror.holds("a")
    assert not mirror.referenced("a")
    mirror.allocated("a", "r")
    mirror.allocated("a", "s")
    mirror.released("a", "r")
    assert mirror.referenced("a")
    mirror.released("a", "s")
    assert mirror.holds("a")
    assert not mirror.referenced("a")


def test_what_a_pass_removed_is_gone_with_its_references() -> None:
    mirror = CacheMirror()
    mirror.allocated("a", "r")
    mirror.allocated("b", "r")
    mirror.pass_ended(removed=["a", "never seen"], preempted=())
    assert not mirror.holds("a")
    assert mirror.referenced("b")
    mirror.left("r")
    assert mirror.holds("b")
    assert not mirror.referenced("b")


def test_a_request_that_leaves_or_is_preempted_refers_to_nothing() -> None:
    mirror = CacheMirror()
    for request in ("r", "s", "t"):
        mirror.allocated("a", request)
    mirror.left("r")
    mirror.left("r")
    mirror.pass_ended(removed=(), preempted=["s", "unknown"])
    assert mirror.referenced("a")
    mirror.left("t")
    assert not mirror.referenced("a")


def test_an_entry_removed_and_made_again_is_referred_to_by_its_maker_only() -> None:
    mirror = CacheMirror()
    mirror.allocated("a", "r")
    mirror.pass_ended(removed=["a"], preempted=())
    mirror.allocated("a", "s")
    mirror.left("r")
    assert mirror.referenced("a")
    mirror.left("s")
    assert not mirror.referenced("a")


def test_nothing_is_kept_of_requests_without_references() -> None:
    mirror = CacheMirror()
    for number in range(100):
        mirror.allocated("a", f"r{number}")
        mirror.released("a", f"r{number}")
        mirror.released("a", f"r{number}")
    assert mirror._by_request == {}
    mirror.pass_ended(removed=["a"], preempted=())
    assert mirror._entries == {}
