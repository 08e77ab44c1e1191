# SPDX-License-Identifier: Apache-2.0
"""So little memory for keys and values that requests are preempted in the middle of their images.

What they computed is lost, their items are not: these are loaded again, without a transfer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from epd_connector.testing.engines import EngineProcess
from tests.engine.media import largest_picture
from tests.engine.trouble import counter, in_order, settled, until
from tests.soak.stage import Stage

pytestmark = pytest.mark.engine

BLOCKS = 10
"""Of 128 tokens each. One request needs three in the end."""
CHUNK = 64
"""Tokens per step: an image of 169 rows takes three steps or more."""
IMAGE = (416, 416)
AT_ONCE = 6
TOKENS = 160


@dataclass(frozen=True)
class Two:
    encode: EngineProcess
    prefill: EngineProcess


@pytest.fixture(scope="module")
def two(stage: Stage) -> Iterator[Two]:
    flags = (
        "--max-model-len=1024",
        f"--num-gpu-blocks-override={BLOCKS}",
        f"--max-num-batched-tokens={CHUNK}",
        "--no-enable-prefix-caching",
        *largest_picture(*IMAGE),
    )
    encode = stage.start("ec_producer")
    prefill = stage.start("ec_consumer", flags=flags)
    stage.ready(encode, prefill)
    yield Two(encode, prefill)
    for engine in (encode, prefill):
        assert engine.alive()
        assert in_order(engine)


def preemptions(engine: EngineProcess) -> float:
    return engine.metrics()["vllm:num_preemptions_total"]


def test_preempted_requests_load_their_items_again(two: Two, stage: Stage) -> None:
    errands = [
        stage.errand(two.encode, two.prefill, IMAGE, max_tokens=TOKENS) for _ in range(AT_ONCE)
    ]
    for errand in errands:
        errand.ask()
    for errand in errands:
        errand.feed()
    for errand in errands:
        stage.right(errand)
    assert preemptions(two.prefill) > 0
    assert counter(two.prefill, "items_reloaded") > 0
    assert counter(two.prefill, "items_landed") == AT_ONCE
    until(lambda: settled(two.encode))
