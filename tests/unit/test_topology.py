# SPDX-License-Identifier: Apache-2.0
"""Addresses of encode engines: asked without waiting, remembered, refused, asked again."""

import msgspec
import pytest

from epd_connector.core.effects import Hangup, Send
from epd_connector.core.topology import MAX_ADDRESSES, NEGATIVE_S, Expected, Topology
from epd_connector.errors import Code, Failure
from epd_connector.protocol.frames import Identify, Identity, NotReady, Pong, RankAddress, Rejected

WHERE = "10.0.0.1:14579"
IDENTITY = Identity(
    "model-a", "bfloat16", 2, {"image": 384}, (RankAddress("tcp://10.0.0.1:14580", 1, {}),)
)
QUESTION = Send(f"tcp://{WHERE}", 0, Identify("model-a"))


def topology() -> Topology:
    return Topology(Expected("model-a", "bfloat16", 128), resolve_timeout_s=5.0)


def run(asked: Topology, until: float) -> None:
    while (due := asked.next_deadline()) is not None and due <= until:
        asked.tick(due)


def refusal(asked: Topology, now: float) -> Failure:
    found = asked.find(WHERE, now)
    assert isinstance(found, Failure)
    return found


def test_an_address_is_asked_once_and_remembered() -> None:
    asked = topology()
    assert asked.find(WHERE, 0.0) is None
    assert asked.find(WHERE, 0.1) is None
    assert asked.effects == [QUESTION]
    assert asked.hear(WHERE, IDENTITY, 0.2)
    assert asked.find(WHERE, 1e6) is IDENTITY
    assert asked.effects == [QUESTION]
    assert asked.next_deadline() is None


def test_it_is_asked_again_until_it_answers() -> None:
    asked = topology()
    asked.find(WHERE, 0.0)
    run(asked, 4.9)
    assert asked.effects == [QUESTION] * 10
    assert asked.hear(WHERE, IDENTITY, 4.9)


@pytest.mark.parametrize("said", [None, NotReady("1 of 2 ranks are up")])
def test_it_is_given_up_in_time_with_its_address_and_what_it_said(said: NotReady | None) -> None:
    asked = topology()
    asked.find(WHERE, 0.0)
    if said is not None:
        assert not asked.hear(WHERE, said, 0.1)
    run(asked, 5.0)
    failure = refusal(asked, 5.0)
    assert failure.code is Code.UNREACHABLE
    assert WHERE in failure.reason
    assert "resolve_timeout_s" in failure.reason
    assert (said.reason if said else "no answer") in failure.reason
    assert Hangup(f"tcp://{WHERE}") in asked.effects


def test_a_refusal_is_remembered_for_a_short_while() -> None:
    asked = topology()
    asked.find(WHERE, 0.0)
    run(asked, 5.0)
    asked.effects.clear()
    refusal(asked, 5.0 + NEGATIVE_S / 2)
    assert asked.effects == []
    run(asked, 5.0 + NEGATIVE_S)
    assert asked.find(WHERE, 5.0 + NEGATIVE_S) is None
    assert asked.effects == [QUESTION]


def test_a_rejection_is_passed_on_with_the_address() -> None:
    asked = topology()
    asked.find(WHERE, 0.0)
    assert asked.hear(WHERE, Rejected(Failure(Code.MISMATCH, "another model")), 0.1)
    failure = refusal(asked, 0.2)
    assert failure.code is Code.MISMATCH
    assert WHERE in failure.reason
    assert "another model" in failure.reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fingerprint": "model-b"}, ["model-a", "model-b"]),
        ({"dtype": "float16"}, ["float16", "bfloat16", "--dtype"]),
        ({"widths": {"image": 200}}, ["200", "128", "image"]),
        ({"widths": {"image": 0}}, ["0", "128"]),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_with_both_values(
    change: dict[str, object], words: list[str]
) -> None:
    asked = topology()
    asked.find(WHERE, 0.0)
    assert asked.hear(WHERE, msgspec.structs.replace(IDENTITY, **change), 0.1)
    failure = refusal(asked, 0.2)
    assert failure.code is Code.MISMATCH
    assert all(word in failure.reason for word in [WHERE, *words])


def test_an_address_is_silent_while_it_is_refused_for_not_answering() -> None:
    asked = topology()
    assert not asked.silent(WHERE)
    asked.find(WHERE, 0.0)
    assert not asked.silent(WHERE)
    run(asked, 5.0)
    assert asked.silent(WHERE)
    run(asked, 5.0 + NEGATIVE_S)
    assert not asked.silent(WHERE)


def test_an_engine_that_refuses_is_not_silent() -> None:
    asked = topology()
    asked.find(WHERE, 0.0)
    asked.hear(WHERE, Rejected(Failure(Code.MISMATCH, "another model")), 0.1)
    assert not asked.silent(WHERE)


def test_what_proved_wrong_is_asked_again() -> None:
    asked = topology()
    asked.find(WHERE, 0.0)
    asked.hear(WHERE, IDENTITY, 0.1)
    asked.forget(WHERE)
    assert asked.find(WHERE, 1.0) is None
    asked.forget(WHERE)
    asked.forget("nobody:1")
    assert asked.effects == [QUESTION, QUESTION]


def test_answers_that_nobody_asked_for_mean_nothing() -> None:
    asked = topology()
    assert not asked.hear(WHERE, IDENTITY, 0.0)
    asked.find(WHERE, 0.0)
    assert not asked.hear(WHERE, Pong(), 0.1)
    asked.hear(WHERE, IDENTITY, 0.1)
    assert not asked.hear(WHERE, NotReady("late"), 0.2)
    assert asked.find(WHERE, 0.2) is IDENTITY


def test_the_table_is_bounded_and_what_is_only_remembered_gives_way() -> None:
    asked = topology()
    for number in range(MAX_ADDRESSES):
        assert asked.find(f"host-{number}:1", 0.0) is None
    overload = asked.find("one-more:1", 0.0)
    assert isinstance(overload, Failure)
    assert overload.code is Code.OVERLOADED
    asked.hear("host-3:1", IDENTITY, 0.1)
    assert asked.find("one-more:1", 0.2) is None
    assert Hangup("tcp://host-3:1") in asked.effects
