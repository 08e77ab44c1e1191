# SPDX-License-Identifier: Apache-2.0
"""A consumer on the host's second model runner, whose kernels are interpreted here."""

from collections.abc import Iterator

import pytest

from epd_connector.testing.chat import user_message
from epd_connector.testing.engines import V2_RUNNER_ENV, epd_params, mint_room
from epd_connector.testing.pictures import random_picture
from epd_connector.testing.ports import Ports
from tests.engine.fleet import FLOAT32, Monolithics, Pair, PairOptions, Pairs

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def pair(pairs: Pairs) -> Iterator[Pair]:
    with pairs.start(PairOptions(prefill_env=V2_RUNNER_ENV, flags=FLOAT32)) as started:
        yield started


def test_the_consumer_runs_on_the_second_runner(pair: Pair) -> None:
    assert "V2 Model Runner" in pair.prefill.log_path.read_text(errors="replace")


@pytest.mark.parametrize(
    "sizes", [[(160, 160)], [(120, 80), (64, 200)]], ids=["one image", "two images"]
)
def test_tokens_are_those_of_the_monolithic_engine(
    pair: Pair, monolithics: Monolithics, sizes: list[tuple[int, int]]
) -> None:
    pictures = [random_picture(*size, seed=n) for n, size in enumerate(sizes)]
    messages = user_message("On the second runner.", pictures)
    before = pair.published()
    result = pair.send(messages, max_tokens=6)
    expected = monolithics.tokens(pair.options.kind, messages, flags=FLOAT32, max_tokens=6)
    assert result.prefill.token_ids == expected
    assert pair.published() == before + len(sizes)


def test_what_cannot_be_had_fails_and_the_next_request_works(
    pair: Pair, monolithics: Monolithics
) -> None:
    lost = user_message("Lost.", [random_picture(96, 96, 31)])
    params = epd_params([(mint_room(), f"127.0.0.1:{Ports(1).first}")])
    assert not pair.prefill.chat(lost, max_tokens=4, ec_transfer_params=params).ok
    messages = user_message("Found.", [random_picture(96, 96, 32)])
    result = pair.send(messages, max_tokens=4)
    assert result.prefill.token_ids == monolithics.tokens(
        pair.options.kind, messages, flags=FLOAT32, max_tokens=4
    )


def test_a_repeated_item_is_not_received_twice(pair: Pair, monolithics: Monolithics) -> None:
    picture = random_picture(128, 96, 33)
    before = pair.published()
    for prompt in ("Once.", "Once more."):
        messages = user_message(prompt, [picture])
        result = pair.send(messages, max_tokens=4)
        expected = monolithics.tokens(pair.options.kind, messages, flags=FLOAT32, max_tokens=4)
        assert result.prefill.token_ids == expected
    assert pair.published() == before + 1
