# SPDX-License-Identifier: Apache-2.0
"""Heads and ranks that close while something of theirs does not end."""

import threading

import pytest

from epd_connector.hosts.vllm.setup import RankParts
from epd_connector.memory.tensors import SlabMemory
from epd_connector.transport.base import Completion
from tests.unit import head_bench
from tests.unit.pair_bench import until
from tests.unit.test_rank_runtime import SLAB, Bench


class Stuck:
    """Holds up whoever calls it, until it is let go."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.inside.set()
        self._open.wait()

    def let_go(self) -> None:
        self._open.set()


def hung_up(bench: Bench) -> bool:
    """Whether the rank's peer has seen the end of its connection."""
    bench.peer.link.wait(0)
    return bool(bench.peer.link.take_broken())


def test_a_rank_whose_write_may_go_on_does_not_hang_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that refuses is evidence that nothing of this process writes any more."""
    bench = Bench(sends=True)
    bench.introduced()
    monkeypatch.setattr(bench.transport, "quiet", lambda: False)
    bench.rank.close(0.01)
    assert not hung_up(bench)
    assert bench.peer.link.connected(bench.peer.link.connect("tcp://here:1"))


def test_a_rank_whose_writes_have_ended_hangs_up() -> None:
    bench = Bench(sends=True)
    bench.introduced()
    bench.rank.close(0.01)
    assert bench.transport.quiet()
    assert hung_up(bench)


def test_a_rank_whose_loop_does_not_end_leaves_it_what_it_works_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, stuck = Bench(sends=True), Stuck()
    bench.introduced()

    def poll() -> list[Completion]:
        stuck()
        return []

    monkeypatch.setattr(bench.transport, "poll", poll)
    monkeypatch.setattr(bench.transport, "in_flight", lambda: 1)
    bench.rank._loop.start()
    assert stuck.inside.wait(30)
    bench.rank.close(0.01)
    assert not bench.transport.quiet()
    assert not hung_up(bench)
    stuck.let_go()
    until(lambda: not bench.rank._loop._thread.is_alive())


def test_a_head_whose_loop_does_not_end_leaves_it_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, stuck = head_bench.Bench(ranks=1), Stuck()
    monkeypatch.setattr(bench.head, "on_turn", lambda now: stuck())
    bench.head._loop.start()
    assert stuck.inside.wait(30)
    bench.head.close(0.01)
    assert bench.link.connect("tcp://anybody:1")
    stuck.let_go()
    until(lambda: not bench.head._loop._thread.is_alive())


@pytest.mark.parametrize("quiet", [True, False])
def test_slabs_are_given_back_where_nothing_uses_them(
    quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(sends=True)
    slabs = [
        SlabMemory.on_host(SLAB, shared=False, pin=False, owner_tag=tag) for tag in ("send", "recv")
    ]
    parts = RankParts(bench.rank, {"memory": bench.transport}, slabs[0], slabs[1], None)
    monkeypatch.setattr(bench.transport, "quiet", lambda: quiet)
    bench.rank.close(0.01)
    parts.free()
    assert [slab.tensor.numel() for slab in slabs] == ([0, 0] if quiet else [SLAB, SLAB])
