# SPDX-License-Identifier: Apache-2.0
"""What is wrong is said, ends one request only, and the next good request works."""

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from epd_connector.testing.chat import ChatResult, JSONValue, user_message
from epd_connector.testing.engines import (
    EngineProcess,
    connector_spec,
    epd_params,
    mint_room,
    running,
)
from epd_connector.testing.pictures import random_picture
from epd_connector.testing.ports import Ports
from epd_connector.testing.tiny_models import ModelKind
from tests.engine.fleet import FLOAT32, Monolithics, Pair, PairOptions, Pairs
from tests.engine.trouble import counter, reasons, refusal, settled, stopped, until, worker

pytestmark = pytest.mark.engine

PROMPT = "What is this?"
TIMES: Mapping[str, JSONValue] = {
    "resolve_timeout_s": 1.0,
    "receive_timeout_s": 4.0,
    "offer_timeout_s": 6.0,
}


@pytest.fixture(scope="module")
def pair(pairs: Pairs) -> Iterator[Pair]:
    slabs: Mapping[str, JSONValue] = {"send_slab_bytes": "1MiB", "receive_slab_bytes": "1MiB"}
    with pairs.start(PairOptions(extra={**TIMES, **slabs}, flags=FLOAT32)) as started:
        yield started


def ask(pair: Pair, params: JSONValue, items: int = 1, seed: int = 0) -> ChatResult:
    pictures = [random_picture(100, 100, 1000 + seed + n) for n in range(items)]
    return pair.prefill.chat(
        user_message(PROMPT, pictures), max_tokens=8, ec_transfer_params=params
    )


def reason_of_the_last_failure(engine: EngineProcess) -> str:
    found = reasons(engine)
    assert found, engine.log_tail()
    return found[-1]


def the_next_good_request_works(pair: Pair, monolithics: Monolithics, seed: int) -> None:
    messages = user_message(PROMPT, [random_picture(96, 96, seed)])
    result = pair.send(messages)
    assert result.prefill.token_ids == monolithics.tokens(
        pair.options.kind, messages, flags=pair.options.flags, max_tokens=16
    )


def entry(**changes: JSONValue) -> dict[str, JSONValue]:
    return {"epd": [{"room": "0123456789abcdef", "encode": "127.0.0.1:9", **changes}]}


@pytest.mark.parametrize(
    ("params", "says"),
    [
        (entry(room="xyz"), r"room of entry 0 is 'xyz': expected 16 lower-case hex digits"),
        (entry(room=7), r"room of entry 0 is 7"),
        (entry(encode="nowhere"), r"address 'nowhere' has no port: write \"host:port\""),
        (entry(encode=None), r"encode address of entry 0 is None"),
        (entry(extra=1), r"entry 0 of ec_transfer_params is .*expected"),
        ({"epd": []}, r"0 entries and the request 1 media items: give one entry per item"),
        ({"epd": [None, None]}, r"2 entries and the request 1 media items"),
        ({"epd": "no"}, r"expected .*one entry per media item"),
        ({"edp": []}, r"expected .*one entry per media item"),
    ],
)
def test_malformed_parameters(
    pair: Pair, monolithics: Monolithics, params: JSONValue, says: str
) -> None:
    result = ask(pair, params)
    assert (result.ok, result.status) == (False, 500)
    assert re.search(says, reason_of_the_last_failure(pair.prefill))


def test_one_room_for_two_items(pair: Pair) -> None:
    place = (mint_room(), pair.encode.control_address)
    assert not ask(pair, epd_params([place, place]), items=2).ok
    assert "is given to two items" in reason_of_the_last_failure(pair.prefill)


def test_after_malformed_parameters_a_good_request_works(
    pair: Pair, monolithics: Monolithics
) -> None:
    the_next_good_request_works(pair, monolithics, seed=2001)


def test_malformed_parameters_on_the_encode_engine(pair: Pair, monolithics: Monolithics) -> None:
    messages = user_message(PROMPT, [random_picture(80, 80, 5)])
    result = pair.encode.chat(messages, max_tokens=1, ec_transfer_params=entry(room="xyz"))
    assert not result.ok
    assert "'xyz'" in reason_of_the_last_failure(pair.encode)
    the_next_good_request_works(pair, monolithics, seed=2002)


def test_an_unknown_encode_address_fails_in_seconds_and_is_named(
    pair: Pair, monolithics: Monolithics
) -> None:
    address = f"127.0.0.1:{Ports(1).first}"
    result = ask(pair, epd_params([(mint_room(), address)]), seed=10)
    assert not result.ok
    reason = reason_of_the_last_failure(pair.prefill)
    assert address in reason
    assert "resolve_timeout_s" in reason
    the_next_good_request_works(pair, monolithics, seed=2003)


def test_a_room_that_is_never_offered_fails_by_the_deadline(
    pair: Pair, monolithics: Monolithics
) -> None:
    room = mint_room()
    result = ask(pair, epd_params([(room, pair.encode.control_address)]), seed=20)
    assert not result.ok
    reason = reason_of_the_last_failure(pair.prefill)
    assert room in reason
    assert pair.encode.control_address in reason
    assert "receive_timeout_s" in reason
    the_next_good_request_works(pair, monolithics, seed=2004)


def test_an_item_larger_than_the_slab(pair: Pair, monolithics: Monolithics) -> None:
    # 1200 x 1200 pixels are more than 1,365 rows of 768 bytes: more than 1 MiB.
    messages = user_message(PROMPT, [random_picture(1200, 1200, 30)])
    result = pair.send(messages)
    assert not result.prefill.ok
    reason = reason_of_the_last_failure(pair.prefill)
    assert re.search(r"takes \d+ bytes, receive slab of 1048576 bytes", reason)
    assert "receive_slab_bytes" in reason
    the_next_good_request_works(pair, monolithics, seed=2005)


def test_an_aborted_request_leaves_nothing(pair: Pair, monolithics: Monolithics) -> None:
    room = mint_room()
    params = epd_params([(room, pair.encode.control_address)])
    messages = user_message(PROMPT, [random_picture(100, 100, 40)])
    cancelled = pair.prefill_report().counters["rooms_cancelled"]
    with pytest.raises(OSError, match="timed out"):
        pair.prefill.chat(messages, timeout_s=1.0, ec_transfer_params=params)
    assert pair.wait_for(pair.prefill, "rooms_cancelled", cancelled + 1)
    the_next_good_request_works(pair, monolithics, seed=2006)


def test_clients_that_leave_while_their_picture_is_in_flight_leave_nothing(
    pair: Pair, monolithics: Monolithics
) -> None:
    """Both requests are with engines of which the one that is to send does not run meanwhile."""
    params = epd_params([(mint_room(), pair.encode.control_address)])
    messages = user_message(PROMPT, [random_picture(200, 200, 41)])
    cancelled = counter(pair.prefill, "rooms_cancelled")

    def leave(engine: EngineProcess) -> None:
        with pytest.raises(OSError, match="timed out"):
            engine.chat(messages, timeout_s=2.0, ec_transfer_params=params)

    with stopped(worker(pair.encode)), ThreadPoolExecutor(2) as pool:
        list(pool.map(leave, (pair.prefill, pair.encode)))
        until(lambda: counter(pair.prefill, "rooms_cancelled") > cancelled)
    until(lambda: settled(pair.encode))
    the_next_good_request_works(pair, monolithics, seed=2008)


def test_failed_rooms_conclude_on_the_encode_side(pair: Pair) -> None:
    opened = pair.encode_report().counters["rooms_opened"]
    assert pair.wait_for(pair.encode, "rooms_concluded", opened)


def test_another_model_on_the_encode_side_is_refused_with_both_named(
    pair: Pair, monolithics: Monolithics, models: Mapping[ModelKind, Path], logs: Path
) -> None:
    spec = connector_spec("encode-other", models[ModelKind.QWEN2_5_VL], "ec_producer", TIMES)
    with running([spec], logs) as (other,):
        result = ask(pair, epd_params([(mint_room(), other.control_address)]), seed=50)
        theirs = other_fingerprint(other)
    assert not result.ok
    reason = reason_of_the_last_failure(pair.prefill)
    assert theirs in reason
    assert pair.prefill_report().fingerprint in reason
    assert "serve one model on both" in reason
    the_next_good_request_works(pair, monolithics, seed=2007)


def test_an_encode_engine_that_is_killed_is_missed_at_once_and_used_when_it_is_back(
    pair: Pair, monolithics: Monolithics
) -> None:
    """The last test that uses its engine."""
    room = mint_room()
    opened = counter(pair.encode, "rooms_opened")
    with ThreadPoolExecutor(1) as pool:
        params = epd_params([(room, pair.encode.control_address)])
        answer = pool.submit(ask, pair, params, seed=60)
        until(lambda: counter(pair.encode, "rooms_opened") > opened)
        pair.encode.kill()
        assert not answer.result().ok
    reason = reason_of_the_last_failure(pair.prefill)
    assert room in reason
    assert "its process is gone" in reason
    with pair.encode.again() as encode:
        encode.wait_ready()
        the_next_good_request_works(replace(pair, encode=encode), monolithics, seed=2009)


def other_fingerprint(engine: EngineProcess) -> str:
    from epd_connector.runtime.report import fetch_report

    return fetch_report(engine.control_address, 5.0).fingerprint


def test_a_wrong_configuration_stops_the_start(
    models: Mapping[ModelKind, Path], logs: Path
) -> None:
    extra: Mapping[str, JSONValue] = {"recieve_slab_bytes": 1}
    spec = connector_spec("wrong-key", models[ModelKind.QWEN2_5_VL], "ec_consumer", extra)
    with EngineProcess(spec, logs) as engine:
        says = refusal(engine)
    assert re.search(r"unknown key 'recieve_slab_bytes'.*receive_slab_bytes", says), says[-2000:]
