# SPDX-License-Identifier: Apache-2.0
"""The encode rank's peers: whom it distrusts and for how long, and when it forgets them."""

import pytest

from epd_connector.core import send_peers
from epd_connector.core.effects import ForgetSession, Write
from epd_connector.core.send_peers import IDLE_PEER_S
from epd_connector.errors import Code
from epd_connector.protocol.frames import Hello, Ping, Welcome
from tests.unit.send_bench import BROKEN, Bench, answers, full_grant, of, reason, replies

FORGOTTEN = [ForgetSession("shm", "slab-0")]


def distrusting(**changes: float) -> Bench:
    """A bench whose write to prefill rank 0 failed at time 0."""
    bench = Bench(ranks=2, **changes)
    bench.asked(1, 1)
    bench.wrote(bench.offer(1, "a"), BROKEN)
    return bench


# --- distrust ------------------------------------------------------------------------


def test_a_peer_that_says_hello_again_is_not_forgiven() -> None:
    bench = distrusting()
    assert replies(bench.hello()) == [Welcome()]
    bench.offer(2, "b")
    effects = bench.grant(2, 2)
    assert answers(effects) == [(0, "Refused", 2, 2)]
    assert reason(effects).code is Code.WRITE_FAILED
    assert "failed_peer_s" in reason(effects).reason


def test_a_peer_that_moves_its_slab_is_not_forgiven() -> None:
    bench = distrusting()
    assert replies(bench.hello(slab_nbytes=1 << 21)) == [Welcome()]
    bench.offer(2, "b")
    assert answers(bench.grant(2, 2)) == [(0, "Refused", 2, 2)]


def test_a_peer_that_was_lost_and_returns_is_not_forgiven() -> None:
    bench = distrusting()
    bench.asked(2, 2)
    bench.tick(5.0)
    bench.offer(3, "c")
    assert answers(bench.asked(3, 3)) == [(0, "Refused", 3, 3)]


def test_distrust_ends_in_time() -> None:
    bench = distrusting()
    bench.now = 29.0
    bench.hello()
    bench.now = 30.0
    bench.offer(2, "b")
    assert len(of(Write, bench.grant(2, 2))) == 1


def test_a_process_started_anew_is_trusted() -> None:
    bench = distrusting()
    bench.offer(2, "b")
    assert len(of(Write, bench.asked(2, 2, rank=1))) == 1


def test_without_a_time_for_distrust_nobody_is_refused() -> None:
    bench = distrusting(failed_peer_s=0.0)
    bench.offer(2, "b")
    assert len(of(Write, bench.grant(2, 2))) == 1


# --- forgetting ----------------------------------------------------------------------


def test_an_idle_peer_is_forgotten() -> None:
    bench = Bench()
    bench.hello()
    assert bench.machine.next_deadline() == IDLE_PEER_S
    assert of(ForgetSession, bench.tick(IDLE_PEER_S)) == FORGOTTEN
    assert bench.machine.next_deadline() is None
    bench.grant()
    assert bench.machine.rooms() == {}, "its slab is not known any more"
    bench.asked()
    assert bench.state() is not None


def test_a_peer_that_was_heard_of_is_forgotten_later() -> None:
    bench = Bench()
    bench.hello()
    bench.now = 100.0
    bench.hear(Ping())
    assert of(ForgetSession, bench.tick(IDLE_PEER_S)) == []
    assert bench.machine.next_deadline() == 100.0 + IDLE_PEER_S
    assert of(ForgetSession, bench.tick(100.0 + IDLE_PEER_S)) == FORGOTTEN


def test_a_peer_with_an_open_grant_is_not_forgotten() -> None:
    bench = Bench(peer_timeout_s=1000.0, offer_timeout_s=2000.0)
    bench.asked()
    assert of(ForgetSession, bench.tick(IDLE_PEER_S)) == []
    assert bench.machine.next_deadline() == 2 * IDLE_PEER_S
    bench.cancel()
    assert of(ForgetSession, bench.tick(3 * IDLE_PEER_S)) == FORGOTTEN


def test_a_peer_that_is_written_to_is_not_forgotten() -> None:
    bench = Bench(peer_timeout_s=1000.0, write_timeout_s=2000.0)
    bench.asked()
    effects = bench.offer()
    assert of(ForgetSession, bench.tick(IDLE_PEER_S)) == []
    bench.wrote(effects)
    assert of(ForgetSession, bench.tick(2 * IDLE_PEER_S)) == FORGOTTEN


def test_a_lost_peer_is_forgotten_once() -> None:
    bench = Bench()
    bench.asked()
    assert of(ForgetSession, bench.tick(5.0)) == FORGOTTEN
    assert bench.machine.next_deadline() is None
    assert of(ForgetSession, bench.tick(10 * IDLE_PEER_S)) == []


def test_a_session_that_was_replaced_is_forgotten() -> None:
    bench = Bench()
    bench.hello()
    effects = bench.hear(Hello(0, 1, 1 << 20, {"shm": "another"}))
    assert of(ForgetSession, effects) == FORGOTTEN
    assert of(ForgetSession, bench.hear(Hello(0, 1, 1 << 20, {"shm": "another"}))) == []


def test_a_full_table_forgets_the_peer_that_was_idle_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(send_peers, "MAX_PEERS", 2)
    bench = Bench(ranks=3)
    bench.hello(0)
    bench.now = 1.0
    bench.hello(1)
    bench.now = 2.0
    assert of(ForgetSession, bench.hello(2)) == FORGOTTEN
    assert bench.machine.next_deadline() == 1.0 + IDLE_PEER_S
    bench.hear(full_grant(1, 1), 0)
    assert bench.machine.rooms() == {}


def test_a_full_table_of_busy_peers_takes_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_peers, "MAX_PEERS", 1)
    bench = Bench(ranks=2)
    bench.asked(rank=0)
    assert bench.hello(1) == []
    assert bench.count("frames_dropped") == 1
    assert bench.state() is not None
