# SPDX-License-Identifier: Apache-2.0
"""Encode engines that are killed, however far an item of theirs has come.

One prefill engine lives through all of it. An encode engine that was killed is started again
after each test, and nothing is done on the prefill side.
"""

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from epd_connector.testing.engines import EngineProcess
from tests.engine.trouble import (
    being_sent_rows,
    core,
    counter,
    in_order,
    stopped,
    unread,
    until,
    worker,
)
from tests.soak.stage import LARGE, Errand, Stage, failed

pytestmark = pytest.mark.engine

GONE = "its process is gone"


@dataclass
class Two:
    """The engines that live now."""

    stage: Stage
    encode: EngineProcess
    prefill: EngineProcess

    def errand(self, size: tuple[int, int] = LARGE) -> Errand:
        return self.stage.errand(self.encode, self.prefill, size)

    def granted(self) -> Errand:
        return self.stage.granted(self.encode, self.prefill)

    def comes_back(self) -> None:
        """The encode engine is started again on the same ports, and the next request works."""
        self.encode = self.stage.again(self.encode)
        self.works()

    def works(self) -> None:
        self.stage.works(self.encode, self.prefill)
        assert in_order(self.prefill)
        assert in_order(self.encode)


@pytest.fixture(scope="module")
def engines(stage: Stage) -> Iterator[Two]:
    encode, prefill = stage.start("ec_producer"), stage.start("ec_consumer")
    stage.ready(encode, prefill)
    two = Two(stage, encode, prefill)
    two.works()
    yield two
    assert prefill.alive()


@pytest.fixture
def two(engines: Two) -> Two:
    """Both live, also when the test before this one has failed."""
    if not engines.encode.alive():
        engines.comes_back()
    return engines


def test_killed_before_it_offers(two: Two) -> None:
    errand = two.granted()
    two.encode.kill()
    assert GONE in failed(errand)
    two.comes_back()


def test_killed_between_grant_and_write(two: Two) -> None:
    """Its worker has been sent the grant and the rows' request, and reads neither."""
    with stopped(worker(two.encode)):
        errand = two.errand().ask().feed()
        until(lambda: unread(worker(two.encode)) > 0)
        two.encode.kill()
    assert GONE in failed(errand)
    assert not errand.encoded()
    two.comes_back()


def test_killed_in_the_middle_of_a_write(two: Two) -> None:
    """The receiving process is stopped, so that the write has begun and cannot end."""
    errand = two.granted()
    receiver = worker(two.prefill)
    offered, sent = (counter(two.encode, name) for name in ("items_offered", "items_sent"))
    with stopped(receiver):
        errand.feed()
        until(lambda: counter(two.encode, "items_offered") > offered)
        until(lambda: being_sent_rows(receiver))
        assert counter(two.encode, "items_sent") == sent
        two.encode.kill()
    assert GONE in failed(errand)
    assert errand.encoded()
    two.comes_back()


def test_killed_after_the_item_has_landed(two: Two) -> None:
    """The scheduler is stopped, so that nobody has loaded the item. It starts on other ports."""
    errand = two.granted()
    sent = counter(two.encode, "items_sent")
    with stopped(core(two.prefill)):
        errand.feed()
        until(lambda: counter(two.encode, "items_sent") > sent)
        two.encode.kill()
    two.stage.right(errand)
    two.encode = two.stage.start("ec_producer")
    two.stage.ready(two.encode)
    two.works()


def test_its_scheduler_is_killed_and_the_rest_ends_by_itself(two: Two) -> None:
    """As the host's kernel may choose, when it has no memory left."""
    errand = two.granted()
    os.kill(core(two.encode), signal.SIGKILL)
    assert re.search(f"{GONE}|the encode engine is shutting down", failed(errand))
    until(lambda: not two.encode.alive())
    two.encode.kill()
    two.comes_back()
