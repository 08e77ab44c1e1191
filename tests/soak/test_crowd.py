# SPDX-License-Identifier: Apache-2.0
"""Very many clients at once over slabs for four items, and clients that go away.

One pair of engines, over Mooncake. What it holds afterwards is what it held before.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest

from epd_connector.testing.chat import ChatResult, JSONValue
from epd_connector.testing.engines import EngineProcess
from tests.engine.fleet import FLOAT32, Monolithics
from tests.engine.trouble import (
    BOUND_S,
    being_sent_rows,
    counter,
    reasons,
    settled,
    stopped,
    until,
    worker,
)
from tests.soak import crowd
from tests.soak.crowd import MAX_TOKENS, Client, Holdings, Router
from tests.soak.stage import KIND, Stage, failed

pytestmark = pytest.mark.engine

QUARTER = (416, 416)
"""A picture of 169 rows, 260 kB: four fill a slab of a mebibyte."""
TINY = (96, 96)
AT_ONCE = 200
GONE_BY_S = 4.0
LONGEST_S = 150.0
"""Until an encode engine gives up an item of whose client the prefill engine never heard."""


@dataclass(frozen=True)
class Two:
    stage: Stage
    encode: EngineProcess
    prefill: EngineProcess

    def send(self, clients: list[Client]) -> dict[int, ChatResult | None]:
        return Router(self.encode, self.prefill, AT_ONCE).send(clients)

    def calm(self) -> None:
        """Nothing is left of any request, in either engine."""
        for engine in (self.encode, self.prefill):
            until(partial(calm, engine), LONGEST_S + BOUND_S)
        until(lambda: settled(self.encode))


def calm(engine: EngineProcess) -> bool:
    return not crowd.left_over(engine)


@pytest.fixture(scope="module")
def two(stage: Stage) -> Iterator[Two]:
    encode = stage.start("ec_producer", {"send_slab_bytes": "1MiB", "offer_timeout_s": LONGEST_S})
    patient: dict[str, JSONValue] = {"receive_slab_bytes": "1MiB", "receive_timeout_s": LONGEST_S}
    prefill = stage.start("ec_consumer", patient)
    stage.ready(encode, prefill)
    two = Two(stage, encode, prefill)
    stage.works(encode, prefill)
    yield two
    two.calm()


def right(
    clients: list[Client], answers: dict[int, ChatResult | None], monolithics: Monolithics
) -> None:
    """Who stayed got the tokens of an engine that needs no other."""
    staying = [client for client in clients if client.stays]
    lost = [client.number for client in staying if not (answers[client.number] or _NONE).ok]
    assert not lost
    for client in staying:
        expected = monolithics.tokens(KIND, client.messages, flags=FLOAT32, max_tokens=MAX_TOKENS)
        answer = answers[client.number]
        assert answer is not None
        assert answer.token_ids == expected, client.number


_NONE = ChatResult(0)


def test_200_requests_at_once_over_slabs_for_four_items(two: Two, monolithics: Monolithics) -> None:
    """Whatever the order in which the engines get to them: none is refused, and none is lost."""
    clients = crowd.clients(range(AT_ONCE), QUARTER)
    landed = counter(two.prefill, "items_landed")
    right(clients, two.send(clients), monolithics)
    assert counter(two.prefill, "items_landed") == landed + AT_ONCE
    assert reasons(two.prefill) == []
    assert counter(two.encode, "slabs_filled") > 0
    two.calm()


def test_1000_requests_of_which_a_third_is_aborted_leave_nothing(
    two: Two, monolithics: Monolithics
) -> None:
    engines = (two.encode, two.prefill)
    warm = crowd.fickle(crowd.clients(range(1_000, 1_300), TINY), seed=1, longest_s=GONE_BY_S)
    two.send(warm)
    two.calm()
    before = Holdings.of(engines)
    clients = crowd.fickle(crowd.clients(range(2_000, 3_000), TINY), seed=2, longest_s=GONE_BY_S)
    answers = two.send(clients)
    two.calm()
    assert sum(not client.stays for client in clients) == 333
    right(clients, answers, monolithics)
    until(lambda: not Holdings.of(engines).beyond(before))


def test_a_client_leaves_before_its_picture_is_encoded(two: Two) -> None:
    """The encode engine hears that nobody needs it, long before its own patience ends."""
    errand = two.stage.granted(two.encode, two.prefill, QUARTER, stays=False)
    assert not settled(two.encode)
    errand.leave()
    two.calm()
    two.stage.works(two.encode, two.prefill)


def test_a_client_leaves_in_the_middle_of_a_write(two: Two) -> None:
    """The writer is stopped half-way: the request is over at once, its memory when it goes on."""
    errand = two.stage.granted(two.encode, two.prefill, QUARTER, stays=False)
    receiver, writer = worker(two.prefill), worker(two.encode)
    with contextlib.ExitStack() as pause:
        with stopped(receiver):
            errand.feed()
            until(lambda: being_sent_rows(receiver))
            pause.enter_context(stopped(writer))
        errand.leave()
        until(lambda: not crowd.requests(two.prefill))
        assert crowd.left_over(two.prefill).keys() == {"transfers", "bytes", "rooms to receive"}
    two.calm()
    two.stage.works(two.encode, two.prefill)


def test_a_client_leaves_the_encode_engine_before_its_picture_is_encoded(two: Two) -> None:
    """Its worker is stopped meanwhile. The prefill request ends, with its tokens or a reason."""
    with stopped(worker(two.encode)):
        errand = two.stage.errand(two.encode, two.prefill).ask().feed(leaves_s=1.0)
        assert not errand.encoded()
    if errand.answer().ok:
        two.stage.right(errand)
    else:
        assert failed(errand)
    two.calm()
    two.stage.works(two.encode, two.prefill)
