# SPDX-License-Identifier: Apache-2.0
"""Chunked prefill over an image's middle, preemption there, and items that the prefill engine
encodes itself."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from epd_connector.testing.chat import Message, user_message
from epd_connector.testing.engines import epd_params, mint_room
from epd_connector.testing.pictures import random_picture
from epd_connector.testing.ports import Ports
from tests.engine.fleet import FLOAT32, Monolithics, Pair, PairOptions, Pairs
from tests.engine.media import largest_picture, without_pixels

pytestmark = pytest.mark.engine

LARGEST = (256, 416)
"""A picture of 104 rows: as many as the encoder cache of the prefill engine holds."""
CHUNK = 48
"""Tokens per step: fewer than the rows of the largest picture."""
BLOCKS = 12
"""Of 128 tokens each: enough for three long requests, and not for five."""
CROWD = 5
MAX_CROWDS = 6


@pytest.fixture(scope="module")
def pair(pairs: Pairs) -> Iterator[Pair]:
    options = PairOptions(
        extra={"resolve_timeout_s": 1.0, "receive_timeout_s": 3.0},
        prefill_extra={"on_failure": "encode_locally"},
        flags=FLOAT32,
        prefill_flags=(
            f"--max-num-batched-tokens={CHUNK}",
            "--no-enable-prefix-caching",
            "--max-model-len=1024",
            f"--num-gpu-blocks-override={BLOCKS}",
            *largest_picture(*LARGEST),
        ),
    )
    with pairs.start(options) as started:
        yield started


def reference(monolithics: Monolithics, pair: Pair, messages: list[Message]) -> tuple[int, ...]:
    return monolithics.tokens(pair.options.kind, messages, flags=FLOAT32, max_tokens=16)


def test_a_chunk_boundary_inside_an_image(pair: Pair, monolithics: Monolithics) -> None:
    pictures = [random_picture(*LARGEST, 1), random_picture(64, 64, 2), random_picture(300, 200, 3)]
    messages = user_message("In chunks.", pictures)
    result = pair.send(messages).prefill
    assert result.prompt_tokens > 3 * CHUNK
    assert result.token_ids == reference(monolithics, pair, messages)
    assert pair.published() == 3
    assert pair.prefill_report().counters["items_encoded_locally"] == 0


def test_an_evicted_item_is_loaded_again_for_the_next_request(
    pair: Pair, monolithics: Monolithics
) -> None:
    """The encoder cache of this engine holds one such item, its slab many more."""
    reloaded = pair.prefill_report().counters["items_reloaded"]
    pictures = [random_picture(*LARGEST, 10 + n) for n in range(6)]
    for picture in [*pictures, pictures[0]]:
        messages = user_message("One of many.", [picture])
        assert pair.send(messages).prefill.token_ids == reference(monolithics, pair, messages)
    assert pair.prefill_report().counters["items_reloaded"] == reloaded + 1


def test_preempted_requests_load_their_items_again_without_a_transfer(
    pair: Pair, monolithics: Monolithics
) -> None:
    """A request that is preempted while its item is the last one in the encoder cache does not
    load it again; whether all of a crowd are like that is up to the engine, so there are some."""
    before = pair.prefill_report().counters
    crowds = 0
    while (after := pair.prefill_report().counters)["items_reloaded"] == before["items_reloaded"]:
        assert crowds < MAX_CROWDS, "no crowd of preempted requests has loaded an item again"
        send_crowd(pair, monolithics, first=30 + CROWD * crowds)
        crowds += 1
    assert pair.prefill.metrics()["vllm:num_preemptions_total"] > 0
    assert after["items_landed"] == before["items_landed"] + CROWD * crowds
    assert after["items_encoded_locally"] == before["items_encoded_locally"]


def send_crowd(pair: Pair, monolithics: Monolithics, first: int) -> None:
    """Requests whose tokens do not fit into the KV cache together; every one gets its own."""
    messages = [
        user_message(f"Long {n}.", [random_picture(*LARGEST, n)])
        for n in range(first, first + CROWD)
    ]
    with ThreadPoolExecutor(CROWD) as pool:
        results = list(pool.map(lambda m: pair.send(m, max_tokens=160), messages))
    for message, result in zip(messages, results, strict=True):
        expected = monolithics.tokens(pair.options.kind, message, flags=FLOAT32, max_tokens=160)
        assert result.prefill.token_ids == expected


def test_an_unreachable_encode_engine_is_made_good_for(
    pair: Pair, monolithics: Monolithics
) -> None:
    messages = user_message("Encoded here.", [random_picture(200, 200, 21)])
    params = epd_params([(mint_room(), f"127.0.0.1:{Ports(1).first}")])
    before = pair.prefill_report().counters["items_encoded_locally"]
    result = pair.prefill.chat(messages, max_tokens=16, ec_transfer_params=params)
    assert result.token_ids == reference(monolithics, pair, messages)
    assert pair.prefill_report().counters["items_encoded_locally"] == before + 1


def test_a_room_that_is_never_offered_is_made_good_for(
    pair: Pair, monolithics: Monolithics
) -> None:
    messages = user_message("Encoded here too.", [random_picture(200, 200, 22)])
    params = epd_params([(mint_room(), pair.encode.control_address)])
    result = pair.prefill.chat(messages, max_tokens=16, ec_transfer_params=params)
    assert result.token_ids == reference(monolithics, pair, messages)


def test_without_pixels_only_that_request_fails(pair: Pair, monolithics: Monolithics) -> None:
    picture = random_picture(160, 160, 23)
    encoded = pair.encode.chat(user_message("x", [picture]), max_tokens=1)
    params = epd_params([(mint_room(), f"127.0.0.1:{Ports(1).first}")])
    messages = without_pixels(encoded, "Nothing to encode from.")
    lost = pair.prefill.chat(messages, max_tokens=8, ec_transfer_params=params)
    none = pair.prefill.chat(messages, max_tokens=8)
    assert not lost.ok
    assert not none.ok
    log = pair.prefill.log_path.read_text(errors="replace")
    assert re.search(r"request \S+ fails: .*resolve_timeout_s", log)
    assert re.search(r"request \S+ fails: .*without pixels and without a room", log)
    good = user_message("After it.", [random_picture(160, 160, 24)])
    assert pair.send(good).prefill.token_ids == reference(monolithics, pair, good)


def test_a_picture_without_parameters_is_encoded_here(pair: Pair, monolithics: Monolithics) -> None:
    messages = user_message("No parameters.", [random_picture(120, 120, 25)])
    before = pair.published()
    result = pair.prefill.chat(messages, max_tokens=16)
    assert result.token_ids == reference(monolithics, pair, messages)
    mixed = user_message("One of two.", [random_picture(120, 120, 26), random_picture(90, 90, 27)])
    room = (mint_room(), pair.encode.control_address)
    pair.encode.chat(mixed, max_tokens=1, ec_transfer_params=epd_params([None, room]))
    result = pair.prefill.chat(mixed, max_tokens=16, ec_transfer_params=epd_params([None, room]))
    assert result.token_ids == reference(monolithics, pair, mixed)
    assert pair.published() == before + 1
