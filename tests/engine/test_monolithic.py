# SPDX-License-Identifier: Apache-2.0
"""What the comparisons rest on: one engine answers exactly, and the picture matters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from epd_connector.testing.chat import user_message
from epd_connector.testing.engines import EngineError, EngineProcess, EngineSpec
from epd_connector.testing.pictures import default_picture, random_picture, random_video
from epd_connector.testing.processes import group_members
from epd_connector.testing.tiny_models import ModelKind
from tests.engine.fleet import FLOAT32, Monolithics

pytestmark = pytest.mark.engine

PROMPT = "What is this?"
FIRST, SECOND = random_picture(224, 160, 1), random_picture(224, 160, 2)
MEDIA = {
    "text": [],
    "picture": [FIRST],
    "twice": [FIRST, FIRST],
    "sizes": [FIRST, random_picture(100, 100, 3), random_picture(300, 200, 4)],
    "shipped": [default_picture()[1]],
    "video": [random_video(112, 112, 8, 5)],
}


@pytest.fixture(
    scope="module",
    # With the flags of engines that live already, because others are compared with them.
    params=[(ModelKind.QWEN2_5_VL, ()), (ModelKind.QWEN3_VL, FLOAT32)],
    ids=lambda param: str(param[0]),
)
def engine(request: pytest.FixtureRequest, monolithics: Monolithics) -> EngineProcess:
    return monolithics.engine(*request.param)


@pytest.mark.parametrize("items", MEDIA.values(), ids=MEDIA)
def test_an_answer_is_repeated_exactly(engine: EngineProcess, items: Sequence[str]) -> None:
    messages = user_message(PROMPT, items)
    first, again = engine.chat(messages), engine.chat(messages, stream=True)
    assert first.ok, first
    assert len(first.token_ids) == 32
    assert again.token_ids == first.token_ids
    assert again.ttft_s is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FIRST, SECOND),
        (random_video(112, 112, 8, 5), random_video(112, 112, 8, 6)),
    ],
    ids=["pictures", "videos"],
)
def test_the_item_matters(engine: EngineProcess, one: str, other: str) -> None:
    answers = [engine.chat(user_message(PROMPT, [item])) for item in (one, other)]
    assert answers[0].prompt_tokens == answers[1].prompt_tokens
    assert answers[0].token_ids[:8] != answers[1].token_ids[:8]


def test_a_large_picture_has_the_rows_that_large_item_tests_need(engine: EngineProcess) -> None:
    answer = engine.chat(user_message(PROMPT, [random_picture(1200, 1200, 7)]), max_tokens=1)
    assert answer.prompt_tokens > 1365


def test_a_refused_request_says_why(engine: EngineProcess) -> None:
    answer = engine.chat(user_message(PROMPT), max_tokens=100_000)
    assert (answer.ok, answer.status) == (False, 400)
    assert "100000" in answer.error


def test_an_engine_that_cannot_start_shows_its_log_and_leaves_nothing(tmp_path: Path) -> None:
    spec = EngineSpec("broken", tmp_path, flags=("--no-such-flag",))
    with EngineProcess(spec, tmp_path) as engine:
        message = r"(?s)engine broken ended with code \d+\n.*--no-such-flag"
        with pytest.raises(EngineError, match=message):
            engine.wait_ready()
        pid = engine.pid
    assert group_members(pid) == []


def test_stopping_while_starting_leaves_nothing(tmp_path: Path) -> None:
    engine = EngineProcess(EngineSpec("brief", tmp_path / "no-model"), tmp_path)
    engine.stop()
    engine.stop()
    assert group_members(engine.pid) == []
    assert not engine.alive()
