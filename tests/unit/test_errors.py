# SPDX-License-Identifier: Apache-2.0
"""The error tree and the failure that travels on the wire."""

from __future__ import annotations

import msgspec
import pytest

from epd_connector import errors
from epd_connector.errors import MAX_REASON_CHARS, Code, EPDError, Failure


def test_every_error_is_an_epd_error() -> None:
    raised = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert len(raised) == 7
    assert all(issubclass(error, EPDError) for error in raised)


@pytest.mark.parametrize("error", [errors.ConfigError, errors.RequestError])
def test_bad_values_are_value_errors_too(error: type[Exception]) -> None:
    assert issubclass(error, ValueError)


def test_codes_are_their_lower_case_names() -> None:
    assert [code.value for code in Code] == [code.name.lower() for code in Code]


@pytest.mark.parametrize("code", list(Code))
def test_failure_survives_the_wire(code: Code) -> None:
    failure = Failure(code, "no room: 5 > 4, raise max_rooms")
    wire = msgspec.msgpack.encode(failure)
    assert msgspec.msgpack.decode(wire, type=Failure) == failure


def test_unknown_code_on_the_wire_is_refused() -> None:
    wire = msgspec.msgpack.encode({"code": "melted", "reason": ""})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wire, type=Failure)


def test_failure_is_hashable_and_reads_well() -> None:
    failure = Failure(Code.TIMEOUT, "no grant within 120 s")
    assert {failure: 1}[Failure(Code.TIMEOUT, "no grant within 120 s")] == 1
    assert str(failure) == "timeout: no grant within 120 s"


def test_a_reason_is_cut_to_what_the_wire_carries() -> None:
    failure = Failure(Code.INTERNAL, "x" * 5000)
    assert len(failure.reason) == MAX_REASON_CHARS
    assert failure.reason.endswith("x…")
    whole = Failure(Code.INTERNAL, "ß" * MAX_REASON_CHARS)
    assert whole.reason == "ß" * MAX_REASON_CHARS


def test_a_reason_that_is_no_text_can_be_sent_all_the_same() -> None:
    failure = Failure(Code.INTERNAL, "no such file: \udcff")
    assert failure.reason == "no such file: ?"
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failure), type=Failure) == failure


def test_a_longer_reason_from_the_wire_is_refused() -> None:
    wire = msgspec.msgpack.encode({"code": "internal", "reason": "x" * (MAX_REASON_CHARS + 1)})
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(wire, type=Failure)


def test_a_request_is_sent_again_unless_the_failure_is_its_own_or_ours() -> None:
    final = {code for code in Code if not code.retryable}
    assert final == {Code.BAD_REQUEST, Code.MISMATCH, Code.TOO_LARGE, Code.INTERNAL}
