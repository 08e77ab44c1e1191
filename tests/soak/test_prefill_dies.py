# SPDX-License-Identifier: Apache-2.0
"""Prefill engines, and one rank of one, that are killed, however far an item of theirs has come.

One encode engine lives through all of it. A prefill engine that was killed is started again
after each test, and nothing is done on the encode side.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from epd_connector.testing.engines import ONE_THREAD, EngineProcess
from tests.engine.trouble import (
    being_sent_rows,
    core,
    counter,
    in_order,
    settled,
    stopped,
    unread,
    until,
    worker,
)
from tests.soak.stage import LARGE, Errand, Stage

pytestmark = pytest.mark.engine

RANKS = 2
OFFER_S = 20.0
"""An offer that nobody takes is given up after so long."""


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

    def killed(self) -> None:
        """The prefill engine is killed; rooms end on the encode engine, which goes on living."""
        self.prefill.kill()
        until(lambda: settled(self.encode))

    def comes_back(self) -> None:
        """The prefill engine is started again on the same ports, and the next request works."""
        self.prefill = self.stage.again(self.prefill)
        self.works()

    def works(self) -> None:
        self.stage.works(self.encode, self.prefill)
        until(lambda: settled(self.encode))
        assert in_order(self.encode)
        assert in_order(self.prefill)


@pytest.fixture(scope="module")
def encode(stage: Stage) -> Iterator[EngineProcess]:
    encode = stage.start("ec_producer", {"offer_timeout_s": OFFER_S})
    yield encode
    assert encode.alive()
    assert in_order(encode)


@pytest.fixture(scope="module")
def engines(stage: Stage, encode: EngineProcess) -> Two:
    prefill = stage.start("ec_consumer")
    stage.ready(encode, prefill)
    two = Two(stage, encode, prefill)
    two.works()
    return two


@pytest.fixture
def two(engines: Two) -> Two:
    """Both live, also when the test before this one has failed."""
    if not engines.prefill.alive():
        engines.comes_back()
    return engines


def test_killed_before_it_is_offered_anything(two: Two) -> None:
    errand = two.granted()
    two.killed()
    assert errand.broken_off()
    two.comes_back()


def test_killed_between_grant_and_write(two: Two) -> None:
    """The encode worker has been sent the grant, and reads it when there is nobody any more."""
    with stopped(worker(two.encode)):
        errand = two.errand().ask().feed()
        until(lambda: unread(worker(two.encode)) > 0)
        two.prefill.kill()
    assert errand.broken_off()
    assert errand.encoded()
    until(lambda: settled(two.encode))
    two.comes_back()


def test_killed_in_the_middle_of_a_write(two: Two) -> None:
    errand = two.granted()
    offered, sent = (counter(two.encode, name) for name in ("items_offered", "items_sent"))
    receiver = worker(two.prefill)
    with stopped(receiver):
        errand.feed()
        until(lambda: counter(two.encode, "items_offered") > offered)
        until(lambda: being_sent_rows(receiver))
        assert counter(two.encode, "items_sent") == sent
        two.killed()
    assert errand.broken_off()
    assert errand.encoded()
    two.comes_back()


def test_killed_after_the_item_has_landed(two: Two) -> None:
    """Its scheduler is stopped, so that nobody has loaded the item."""
    errand = two.granted()
    sent = counter(two.encode, "items_sent")
    with stopped(core(two.prefill)):
        errand.feed()
        until(lambda: counter(two.encode, "items_sent") > sent)
        two.killed()
    assert errand.broken_off()
    two.comes_back()


def test_one_rank_of_two_is_killed_in_the_middle_of_a_write(stage: Stage, two: Two) -> None:
    """The host then ends the whole engine. The other rank has its rows by then."""
    flags = (f"--tensor-parallel-size={RANKS}",)
    prefill = stage.start("ec_consumer", flags=flags, env=ONE_THREAD)
    stage.ready(prefill)
    pair = Two(stage, two.encode, prefill)
    pair.works()
    errand = pair.granted()
    dying = worker(prefill, rank=1)
    with stopped(dying):
        errand.feed()
        until(lambda: being_sent_rows(dying))
        os.kill(dying, signal.SIGKILL)
    assert errand.broken_off()
    until(lambda: not prefill.alive())
    pair.killed()
    two.works()
