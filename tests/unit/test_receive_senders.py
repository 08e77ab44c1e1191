# SPDX-License-Identifier: Apache-2.0
"""What a prefill rank takes for a sign of life of its writers, and what for their death."""

import pytest

from epd_connector.core.effects import Effect, Hangup, Probe, TellHead
from epd_connector.core.receive import FENCE_STEP_S
from epd_connector.core.receive_state import Broken, Gone, Probed, RoomState
from epd_connector.errors import Code
from epd_connector.protocol.frames import Landed, Pong, RankAddress, SenderBack, Stale, Welcome
from tests.unit.receive_bench import ENDPOINT, FENCE_S, WRITER, Bench, failure, sent, told

NEWER = WRITER + 1
NEWEST = NEWER + 1
ELSEWHERE = "tcp://10.0.0.2:9001"


def probes(effects: list[Effect]) -> list[str]:
    return [effect.endpoint for effect in effects if isinstance(effect, Probe)]


def opened(**changes: object) -> Bench:
    """A bench whose writer has spoken since room 1 was granted to it."""
    bench = Bench(**changes)
    bench.open()
    bench.now = 0.1
    bench.hear(Welcome())
    return bench


def test_a_broken_connection_is_probed_at_once_and_once_at_a_time() -> None:
    bench = opened()
    assert probes(bench.do(Broken(ENDPOINT))) == [ENDPOINT]
    assert probes(bench.do(Broken(ENDPOINT))) == []
    bench.do(Probed(ENDPOINT, gone=False))
    assert probes(bench.do(Broken(ENDPOINT))) == [ENDPOINT]


def test_a_writer_that_is_gone_fails_its_rooms_at_once_and_frees_them_after_the_fence() -> None:
    bench = opened()
    bench.do(Broken(ENDPOINT))
    effects = bench.do(Probed(ENDPOINT, gone=True))
    assert told(effects) == [("RoomFailed", 1)]
    assert failure(effects).code is Code.PEER_DEAD
    assert ENDPOINT in failure(effects).reason
    assert bench.state() is RoomState.FENCED
    assert told(bench.run(0.1 + FENCE_S - 0.01)) == []
    assert told(bench.run(0.1 + FENCE_S)) == [("RoomReleased", 1)]
    assert bench.machine.idle()
    assert bench.count("peers_lost") == 1


def test_one_that_was_replaced_before_it_was_granted_is_stale_and_one_that_spoke_is_dead() -> None:
    bench = Bench()
    bench.open()
    assert failure(bench.hear(Stale(WRITER), NEWER)).code is Code.STALE
    assert failure(opened().hear(Stale(WRITER), NEWER)).code is Code.PEER_DEAD


def test_the_connection_to_a_process_that_is_gone_is_closed() -> None:
    bench = opened()
    bench.do(Broken(ENDPOINT))
    assert Hangup(ENDPOINT) in bench.do(Probed(ENDPOINT, gone=True))
    bench = opened()
    bench.hear(Landed(1, 1))
    assert bench.do(Broken(ENDPOINT)) == [Hangup(ENDPOINT)]


def test_a_probe_that_says_nothing_changes_nothing() -> None:
    bench = opened()
    bench.do(Broken(ENDPOINT))
    assert bench.do(Probed(ENDPOINT, gone=False)) == []
    assert bench.state() is RoomState.GRANTED


def test_missed_heartbeats_are_a_reason_to_probe_long_before_the_silence_is_too_long() -> None:
    bench = opened()
    assert probes(bench.run(2.0)) == []
    assert probes(bench.run(3.0)) == [ENDPOINT]
    bench.do(Probed(ENDPOINT, gone=False))
    assert probes(bench.run(4.0)) == [ENDPOINT]


def test_a_silent_writer_is_probed_as_long_as_it_holds_regions() -> None:
    bench = opened()
    bench.run(6.0)
    assert bench.state() is RoomState.QUARANTINED
    bench.do(Probed(ENDPOINT, gone=False))
    assert probes(bench.run(20.0)) == [ENDPOINT]
    effects = bench.do(Probed(ENDPOINT, gone=True))
    assert told(effects) == []
    assert bench.state() is RoomState.FENCED
    assert told(bench.run(30.0)) == [("RoomReleased", 1)]


def test_silence_is_noticed_when_it_is_too_long_and_not_a_heartbeat_later() -> None:
    bench = Bench()
    bench.open()
    bench.now = 0.6
    bench.hear(Pong())
    assert told(bench.run(5.59)) == []
    assert told(bench.run(5.6)) == [("RoomFailed", 1)]


def test_a_process_met_after_the_probe_began_is_not_what_it_is_about() -> None:
    bench = opened()
    bench.do(Broken(ENDPOINT))
    bench.now = 0.2
    bench.open(2, NEWER)
    effects = bench.do(Probed(ENDPOINT, gone=True))
    assert told(effects) == [("RoomFailed", 1)]
    assert bench.state(2) is RoomState.GRANTED


def test_an_answer_to_a_probe_that_was_not_asked_for_buries_nobody() -> None:
    bench = opened()
    assert bench.do(Probed(ENDPOINT, gone=True)) == []
    assert bench.state() is RoomState.GRANTED


def test_who_has_nothing_open_is_told_anew_who_we_are_after_a_broken_connection() -> None:
    bench = opened()
    bench.hear(Landed(1, 1))
    assert probes(bench.do(Broken(ENDPOINT))) == []
    assert sent(bench.open(2)) == ["Hello", "Grant"]


@pytest.mark.parametrize(
    ("endpoint", "host", "other"),
    [("tcp://10.0.0.1:9001", "10.0.0.1", "10.0.0.11"), ("tcp://[fd00::1]:9001", "fd00::1", "fd00")],
)
def test_a_host_that_is_said_to_be_dead_is_evidence(endpoint: str, host: str, other: str) -> None:
    bench = Bench()
    bench.open(senders=(RankAddress(endpoint, WRITER, {"shm": "host"}),))
    bench.open(2, senders=(RankAddress(ELSEWHERE, NEWER, {"shm": "host"}),))
    bench.run(6.0)
    bench.do(Gone(other))
    assert bench.state() is RoomState.QUARANTINED
    bench.do(Gone(host))
    assert bench.state() is RoomState.FENCED
    assert bench.state(2) is RoomState.QUARANTINED
    assert ("RoomReleased", 1) in told(bench.run(6.0 + FENCE_S))


def test_the_head_is_told_when_a_silent_writer_speaks_again() -> None:
    bench = opened()
    bench.run(6.0)
    effects = bench.hear(Pong())
    assert [e.frame for e in effects if isinstance(e, TellHead)] == [SenderBack(WRITER)]
    effects = bench.hear(Pong())
    assert [e.frame for e in effects if isinstance(e, TellHead)] == []


def test_a_late_word_of_an_old_process_buries_no_newer_one() -> None:
    bench = opened()
    bench.now = 0.2
    bench.open(2, NEWER)
    assert told(bench.hear(Pong(), WRITER)) == []
    assert bench.state(2) is RoomState.GRANTED
    assert told(bench.hear(Welcome(), NEWER)) == [("RoomFailed", 1)]


def test_stale_proves_the_death_of_the_one_it_names_whoever_was_met_last() -> None:
    bench = opened()
    bench.now = 0.2
    bench.open(2, NEWER)
    effects = bench.hear(Stale(NEWER), WRITER)
    assert told(effects) == [("RoomFailed", 2)]
    assert failure(effects).code is Code.STALE


def test_a_late_stale_proves_nothing_of_whoever_came_afterwards() -> None:
    """Two restarts in a row, and the word of the second process comes again."""
    bench = opened()
    assert told(bench.hear(Stale(WRITER), NEWER)) == [("RoomFailed", 1)]
    bench.open(2, NEWEST)
    bench.hear(Welcome(), NEWEST)
    assert told(bench.hear(Stale(WRITER), NEWER)) == []
    assert bench.state(2) is RoomState.GRANTED
    assert told(bench.hear(Landed(2, 2), NEWEST)) == [("RoomLanded", 2)]


@pytest.mark.parametrize("stopped_until", [1.0, FENCE_S + 0.9, 60.0])
def test_a_fence_counts_while_this_process_runs(stopped_until: float) -> None:
    bench = opened()
    bench.do(Broken(ENDPOINT))
    bench.do(Probed(ENDPOINT, gone=True))
    # The process was stopped: what the dead had sent is still in the host's buffers.
    assert told(bench.tick(stopped_until)) == []
    assert told(bench.run(stopped_until + FENCE_S - FENCE_STEP_S - 0.01)) == []
    assert told(bench.run(stopped_until + FENCE_S)) == [("RoomReleased", 1)]


def test_no_stop_of_many_counts_for_more_than_a_step() -> None:
    bench = opened()
    bench.do(Broken(ENDPOINT))
    bench.do(Probed(ENDPOINT, gone=True))
    most = int(FENCE_S / FENCE_STEP_S)
    effects = [told(bench.tick(bench.now + 0.9)) for _ in range(most)]
    assert effects == [[]] * (most - 1) + [[("RoomReleased", 1)]]


def test_a_busy_engine_notices_silence_too() -> None:
    bench = Bench(max_rooms=64)
    effects = bench.open(0)
    for number in range(1, 12):
        effects += bench.run(number / 2)
        effects += bench.open(number)
    assert "Ping" in sent(effects)
    assert ("RoomFailed", 0) in told(effects)
    assert bench.state(0) is RoomState.QUARANTINED


def test_silence_is_noticed_in_time_whatever_the_clock_reads() -> None:
    for tenths in range(200):
        bench = Bench()
        bench.open()
        bench.now = 13 + tenths / 10 + 0.000228
        bench.machine.handle(Probed(ENDPOINT, gone=False), bench.now)
        bench.hear(Pong())
        heard = bench.now
        assert bench.run(heard + 4.9) is not None
        assert bench.state() is RoomState.GRANTED
        bench.run(heard + 5.0)
        assert bench.state() is RoomState.QUARANTINED
