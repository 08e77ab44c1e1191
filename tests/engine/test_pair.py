# SPDX-License-Identifier: Apache-2.0
"""An encode and a prefill engine give the tokens of one monolithic engine, whatever is sent."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from epd_connector.testing.chat import Message, user_message
from epd_connector.testing.engines import Order, epd_params, mint_room
from epd_connector.testing.pictures import default_picture, random_picture, random_video
from epd_connector.testing.tiny_models import ModelKind
from tests.engine.fleet import FLOAT32, Monolithics, Pair, PairOptions, Pairs
from tests.engine.media import without_pixels

pytestmark = pytest.mark.engine

PROMPT = "What is this?"
PICTURE = random_picture(224, 160, seed=1)
OTHER = random_picture(224, 160, seed=2)
FOUR = [
    PICTURE,
    random_picture(100, 100, 3),
    random_picture(300, 200, 4),
    random_picture(64, 128, 5),
]
VIDEO = random_video(112, 112, frames=8, seed=6)


@pytest.fixture(
    scope="module",
    # The other two combinations are among those of test_ranks.
    params=[(ModelKind.QWEN2_5_VL, "shm"), (ModelKind.QWEN3_VL, "mooncake")],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def pair(request: pytest.FixtureRequest, pairs: Pairs) -> Iterator[Pair]:
    kind, transport = request.param
    with pairs.start(PairOptions(kind=kind, transport=transport, flags=FLOAT32)) as started:
        yield started


def reference(monolithics: Monolithics, pair: Pair, messages: list[Message]) -> tuple[int, ...]:
    flags = pair.options.flags
    return monolithics.tokens(pair.options.kind, messages, flags=flags, max_tokens=16)


def sent_equals_published(pair: Pair) -> None:
    """Every item that was sent was published: none was ignored in silence."""
    landed = pair.prefill_report().counters["items_landed"]
    assert pair.wait_for(pair.prefill, "items_published", landed)
    assert pair.wait_for(pair.encode, "items_sent", landed)
    counters = pair.encode_report().counters
    assert counters["items_sent"] == landed == pair.published()
    assert counters["bytes_sent"] == pair.prefill_report().counters["bytes_landed"]


def test_the_first_request_on_idle_engines_is_answered_at_once(
    pair: Pair, monolithics: Monolithics
) -> None:
    messages = user_message("Describe it.", [default_picture()[1]])
    result = pair.send(messages)
    assert result.prefill.token_ids == reference(monolithics, pair, messages)
    assert pair.published() == 1
    sent_equals_published(pair)
    assert pair.prefill.metrics()["vllm:epd_items_landed_total"] == 1


@pytest.mark.parametrize(
    ("order", "seed"), [("both", 21), ("encode_first", 22), ("prefill_first", 23)]
)
def test_any_order_of_the_two_requests(
    pair: Pair, monolithics: Monolithics, order: Order, seed: int
) -> None:
    picture = random_picture(160, 160, seed)
    messages = user_message(PROMPT, [picture])
    before = pair.published()
    result = pair.send(messages, order=order)
    assert result.prefill.token_ids == reference(monolithics, pair, messages)
    assert pair.published() == before + 1


@pytest.mark.parametrize(
    ("prompt", "items", "transfers"),
    [
        pytest.param("One.", [PICTURE], 1, id="one image"),
        pytest.param("Four.", FOUR, 3, id="four images of different sizes, one seen before"),
        pytest.param("Again.", [PICTURE], 0, id="an image in the encoder cache"),
        pytest.param("Twice.", [OTHER, OTHER], 1, id="one image twice, no text between"),
        pytest.param("No image.", [], 0, id="text only"),
        pytest.param("A video.", [VIDEO], 1, id="a video"),
        pytest.param("Both.", [VIDEO, PICTURE], 0, id="a video and an image, both seen"),
    ],
)
def test_items(
    pair: Pair, monolithics: Monolithics, prompt: str, items: list[str], transfers: int
) -> None:
    messages = user_message(prompt, items)
    before = pair.published()
    result = pair.send(messages)
    assert result.prefill.ok, result.prefill
    assert result.prefill.token_ids == reference(monolithics, pair, messages)
    assert pair.published() == before + transfers
    sent_equals_published(pair)


def test_one_encode_request_per_item(pair: Pair, monolithics: Monolithics) -> None:
    messages = user_message(
        "Each by itself.", [random_picture(90 + n, 120, n) for n in (31, 32, 33)]
    )
    before = pair.published()
    result = pair.send(messages, per_item=True)
    assert len(result.encodes) == 3
    assert result.prefill.token_ids == reference(monolithics, pair, messages)
    assert pair.published() == before + 3


def test_the_picture_matters(pair: Pair) -> None:
    one = pair.send(user_message("Which?", [random_picture(128, 128, 41)])).prefill
    other = pair.send(user_message("Which?", [random_picture(128, 128, 42)])).prefill
    assert one.prompt_tokens == other.prompt_tokens
    assert one.token_ids != other.token_ids


def test_a_repeated_request_hits_the_prefix_cache_and_its_room_is_skipped(
    pair: Pair, monolithics: Monolithics
) -> None:
    # The host caches whole blocks of 128 tokens: the picture's rows lie within the first.
    messages = user_message("Tell me about this picture at some length, please. " * 4, [PICTURE])
    first = pair.send(messages)
    skipped = pair.prefill_report().counters["rooms_skipped"]
    second = pair.send(messages)
    expected = reference(monolithics, pair, messages)
    assert first.prefill.token_ids == second.prefill.token_ids == expected
    assert second.prefill.cached_tokens > 0
    assert pair.wait_for(pair.prefill, "rooms_skipped", skipped + 1)
    assert pair.wait_for(
        pair.encode, "rooms_concluded", pair.encode_report().counters["rooms_opened"]
    )


def test_one_image_in_two_requests_at_once_is_sent_once(
    pair: Pair, monolithics: Monolithics
) -> None:
    picture = random_picture(200, 200, seed=51)
    messages = [user_message(prompt, [picture]) for prompt in ("First one.", "The second one.")]
    before = pair.published()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda m: pair.send(m, order="prefill_first"), messages))
    for message, result in zip(messages, results, strict=True):
        assert result.prefill.token_ids == reference(monolithics, pair, message)
    assert pair.published() == before + 1
    sent_equals_published(pair)


def test_sixteen_requests_at_once(pair: Pair, monolithics: Monolithics) -> None:
    messages = [
        user_message(f"Number {n}.", [random_picture(80 + 8 * n, 100, 60 + n)]) for n in range(16)
    ]
    before = pair.published()
    with ThreadPoolExecutor(16) as pool:
        results = list(pool.map(lambda m: pair.send(m), messages))
    for message, result in zip(messages, results, strict=True):
        assert result.prefill.token_ids == reference(monolithics, pair, message)
    assert pair.published() == before + 16
    sent_equals_published(pair)


def test_a_request_without_pixels(pair: Pair, monolithics: Monolithics) -> None:
    """The encode engine's answer has what a request without pixels needs."""
    picture = random_picture(240, 120, seed=71)
    messages = user_message("Without pixels.", [picture])
    before = pair.published()
    room = mint_room()
    params = epd_params([(room, pair.encode.control_address)])
    encoded = pair.encode.chat(messages, max_tokens=1, ec_transfer_params=params)
    result = pair.prefill.chat(
        without_pixels(encoded, "Without pixels."), max_tokens=16, ec_transfer_params=params
    )
    assert result.ok, result
    assert result.token_ids == reference(monolithics, pair, messages)
    assert pair.published() == before + 1
