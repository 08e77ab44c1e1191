# SPDX-License-Identifier: Apache-2.0
"""``ec_transfer_params``: what is read, and what is refused with the value and the remedy."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_connector.core.admission_state import Ticket
from epd_connector.errors import RequestError
from epd_connector.hosts.vllm.tickets import read_tickets

ROOM = "05f3c1a29b7d4e60"
ENTRY = {"room": ROOM, "encode": "10.0.0.1:14579"}


def test_one_ticket_per_item_in_their_order() -> None:
    other = {"room": "0000000000000001", "encode": "[0::1]:80"}
    assert read_tickets({"epd": [ENTRY, None, other]}, 3) == (
        Ticket(0x05F3C1A29B7D4E60, "10.0.0.1:14579"),
        None,
        Ticket(1, "[0::1]:80"),
    )


def test_without_parameters_no_item_has_one() -> None:
    assert read_tickets(None, 2) == (None, None)
    assert read_tickets({"epd": []}, 0) == ()


def test_what_others_put_next_to_it_is_ignored() -> None:
    assert read_tickets({"epd": [None], "other": 1}, 1) == (None,)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, ["epd"]),
        ([], ["[]"]),
        ("epd", ["'epd'"]),
        ({"epd": "x"}, ["one entry per media item"]),
        ({"epd": {"0": ENTRY}}, ["one entry per media item"]),
        ({"epd": [ENTRY]}, ["1 entries", "2 media items", "null"]),
        ({"epd": [ENTRY, 7]}, ["entry 1", "7"]),
        ({"epd": [ENTRY, {"room": ROOM}]}, ["entry 1", "encode"]),
        ({"epd": [ENTRY, {**ENTRY, "more": 1}]}, ["entry 1", "more"]),
        ({"epd": [ENTRY, ENTRY]}, [ROOM, "two items"]),
        ({"epd": [None, {**ENTRY, "room": 7}]}, ["room of entry 1", "7", "16"]),
        ({"epd": [None, {**ENTRY, "room": "f" * 16}]}, ["ffffffffffffffff", "63-bit"]),
        ({"epd": [None, {**ENTRY, "room": ROOM.upper()}]}, ["lower-case"]),
        ({"epd": [None, {**ENTRY, "room": ROOM + "\n"}]}, ["room of entry 1"]),
        ({"epd": [None, {**ENTRY, "encode": 80}]}, ["encode address of entry 1", "80"]),
        ({"epd": [None, {**ENTRY, "encode": "nowhere"}]}, ["entry 1", "'nowhere'", "port"]),
        ({"epd": [None, {**ENTRY, "encode": "a:0"}]}, ["entry 1", "port 0"]),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_value(params: object, words: list[str]) -> None:
    with pytest.raises(RequestError) as refused:
        read_tickets(params, 2)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(RequestError) as refused:
        read_tickets("x" * 100_000, 1)
    assert len(str(refused.value)) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("epd"), inner),
)


@given(params=JSON, items=st.integers(0, 4))
def test_anything_is_read_or_refused(params: object, items: int) -> None:
    with contextlib.suppress(RequestError):
        assert len(read_tickets(params, items)) == items
