# SPDX-License-Identifier: Apache-2.0
"""The loop: order of what it hands over, bounded posts, errors that do not end it."""

import threading

import pytest

from epd_connector.link.base import PeerId
from epd_connector.runtime import loop as loop_module
from epd_connector.runtime.loop import Loop
from epd_connector.testing.clock import ManualClock
from epd_connector.testing.memory_link import MemoryLink, MemoryNetwork


class Recorder:
    """A driver that notes what it is handed; told to, it raises."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.errors = 0
        self.stalls = 0
        self.wait: float | None = None
        self.turned = threading.Event()

    def on_post(self, post: str, now: float) -> None:
        if post == "raise":
            raise RuntimeError(post)
        self.seen.append(post)

    def on_frame(self, peer: PeerId, payload: bytes, now: float) -> None:
        self.seen.append(payload)

    def on_turn(self, now: float) -> None:
        self.turned.set()

    def next_wait(self, now: float) -> float | None:
        return self.wait

    def on_error(self) -> None:
        self.errors += 1

    def on_stall(self) -> None:
        self.stalls += 1


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


def make(network: MemoryNetwork) -> tuple[Loop[str], Recorder, MemoryLink]:
    driver, link = Recorder(), network.link("here")
    link.listen("tcp://here:1")
    return Loop("test", link, driver), driver, link


def test_a_post_is_handled_before_the_frame_that_it_caused(network: MemoryNetwork) -> None:
    loop, driver, _ = make(network)
    peer = network.link("there")
    loop.post("said first")
    peer.send(peer.connect("tcp://here:1"), b"answered later")
    loop.turn()
    assert driver.seen == ["said first", b"answered later"]


def test_an_error_loses_one_event_only(network: MemoryNetwork) -> None:
    loop, driver, _ = make(network)
    for post in ("one", "raise", "two"):
        loop.post(post)
    loop.turn()
    assert driver.seen == ["one", "two"]
    assert driver.errors == 1


def test_posts_are_bounded_except_ends_of_own_work(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_module, "MAX_POSTS", 2)
    loop, driver, _ = make(network)
    assert [loop.post(str(n)) for n in range(3)] == [True, True, False]
    assert loop.post("end", bounded=False)
    loop.turn()
    assert driver.seen == ["0", "1", "end"]


def test_start_and_stop_are_idempotent_and_end_the_thread(network: MemoryNetwork) -> None:
    from epd_connector.link.zmq_link import ZmqLink

    driver, link = Recorder(), ZmqLink()
    loop: Loop[str] = Loop("test", link, driver)
    loop.start()
    loop.start()
    loop.post("heard")
    assert driver.turned.wait(10)
    assert loop.stop(10)
    assert loop.stop(10)
    assert not loop.post("too late")
    assert driver.seen == ["heard"]
    link.close()


def test_what_was_posted_before_the_stop_is_handled() -> None:
    from epd_connector.link.zmq_link import ZmqLink

    class Stopper(Recorder):
        def on_post(self, post: str, now: float) -> None:
            super().on_post(post, now)
            if post == "first":
                loop.post("last")
                loop.stop(0)
                stopped.set()

    stopped = threading.Event()
    driver, link = Stopper(), ZmqLink()
    loop: Loop[str] = Loop("test", link, driver)
    loop.post("first")
    loop.start()
    assert stopped.wait(30)
    assert loop.stop(30)
    assert driver.seen == ["first", "last"]
    link.close()


class LateLink(MemoryLink):
    """Its waits take longer than they were asked to."""

    def __init__(self, clock: ManualClock, late_s: float) -> None:
        super().__init__(MemoryNetwork(), "late", 1 << 20, 4096, 4096)
        self._clock, self._late_s = clock, late_s

    def wait(self, timeout_s: float | None) -> list[tuple[PeerId, bytes]]:
        assert timeout_s is not None
        self._clock.advance(timeout_s + self._late_s)
        return super().wait(0)


@pytest.mark.parametrize(("late_s", "stalls"), [(0.5, 0), (loop_module.STALL_S, 1)])
def test_a_thread_that_was_kept_from_running_says_so(late_s: float, stalls: int) -> None:
    clock, driver = ManualClock(), Recorder()
    driver.wait = 1.0
    loop: Loop[str] = Loop("test", LateLink(clock, late_s), driver, clock.now)
    loop.turn()
    assert driver.stalls == stalls
