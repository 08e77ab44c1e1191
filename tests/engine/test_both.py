# SPDX-License-Identifier: Apache-2.0
"""One engine in both roles: serves by itself, sends to others, receives from others."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from epd_connector.runtime.report import fetch_report
from epd_connector.testing.chat import Message, user_message
from epd_connector.testing.engines import (
    EngineProcess,
    connector_spec,
    encode_request,
    epd_params,
    mint_room,
    running,
    wait_until,
)
from epd_connector.testing.pictures import random_picture
from epd_connector.testing.tiny_models import ModelKind
from tests.engine.fleet import SMALL_SLABS, Monolithics

pytestmark = pytest.mark.engine
KIND = ModelKind.QWEN2_5_VL


@pytest.fixture(scope="module")
def engines(
    models: Mapping[ModelKind, Path], logs: Path, monolithics: Monolithics
) -> Iterator[list[EngineProcess]]:
    monolithics.prepare(KIND)
    specs = [connector_spec(f"both-{n}", models[KIND], "ec_both", SMALL_SLABS) for n in range(2)]
    with running(specs, logs) as started:
        yield started


def expect(monolithics: Monolithics, messages: list[Message]) -> tuple[int, ...]:
    return monolithics.tokens(KIND, messages, max_tokens=16)


def test_it_serves_by_itself(engines: list[EngineProcess], monolithics: Monolithics) -> None:
    messages = user_message("Alone.", [random_picture(140, 140, 1)])
    result = engines[0].chat(messages, max_tokens=16)
    assert result.token_ids == expect(monolithics, messages)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_each_sends_to_the_other(
    engines: list[EngineProcess], monolithics: Monolithics, source: int, target: int
) -> None:
    messages = user_message("Across.", [random_picture(140, 140, 10 + source)])
    params = epd_params([(mint_room(), engines[source].control_address)])
    encode_request(engines[source], messages, params)
    result = engines[target].chat(messages, max_tokens=16, ec_transfer_params=params)
    assert result.token_ids == expect(monolithics, messages)
    report = fetch_report(engines[target].control_address, 5.0)
    assert report.counters["items_landed"] == 1
    assert report.counters["items_published"] == 1


def test_a_room_to_itself_needs_no_transfer(
    engines: list[EngineProcess], monolithics: Monolithics
) -> None:
    messages = user_message("To itself.", [random_picture(140, 140, 20)])
    engine = engines[0]

    def concluded() -> float:
        return fetch_report(engine.control_address, 5.0).counters["rooms_concluded"]

    before = concluded()
    params = epd_params([(mint_room(), engine.control_address)])
    encode_request(engine, messages, params)
    assert concluded() == before, "it is offered until the second request says who needs it"
    result = engine.chat(messages, max_tokens=16, ec_transfer_params=params)
    assert result.token_ids == expect(monolithics, messages)
    assert wait_until(lambda: concluded() == before + 1, 20.0)
