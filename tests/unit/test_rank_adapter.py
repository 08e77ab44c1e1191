# SPDX-License-Identifier: Apache-2.0
"""The worker's side: what of the host's encoder cache is handed over, and what is put into it."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from epd_connector.config import Config, Role
from epd_connector.core.receive import PrefillRank, ReceiveSettings
from epd_connector.core.send import EncodeRank, SendSettings
from epd_connector.hosts.vllm.plan import ClaimSpec, LoadSpec, StepPlan
from epd_connector.hosts.vllm.rank import RankAdapter
from epd_connector.hosts.vllm.setup import RankParts
from epd_connector.memory.tensors import Publisher, SlabMemory, TensorRows
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import AnyFrame, RoomLoaded
from epd_connector.rows import Layout
from epd_connector.runtime.rank import RankPlace, RankRuntime
from epd_connector.testing.memory_link import MemoryNetwork
from epd_connector.testing.memory_transport import MemoryFabric, MemoryTransport
from tests.unit.pair_bench import until

SLAB = 1 << 20
ROWS, WIDTH = 4, 32  # 256 bytes: what the slab gives out at least
HEAD = "ipc://@head"


class Worker:
    """One rank adapter over real slabs. Its loop is turned by the test."""

    def __init__(self, role: Role) -> None:
        config = Config.from_extra({}, role=role, default_host="here", default_port=1)
        self.adapter = RankAdapter(config, None)
        self.head = MemoryNetwork()
        self.head_link = self.head.link()
        self.head_link.listen(HEAD)
        send = receive = None
        transport = MemoryTransport(MemoryFabric())
        self.slab = SlabMemory.on_host(SLAB, shared=False, pin=False, owner_tag="test slab")
        self.rows = TensorRows(self.slab)
        if role.sends:
            transport.register_source(self.slab)
            send = EncodeRank(SendSettings(1, 0, 1, SLAB, 0, 120, 30, 5, 30, 4, 64, 300))
        else:
            sessions = {"memory": transport.register_destination(self.slab)}
            receive = PrefillRank(ReceiveSettings(1, 0, 1, SLAB, sessions, {}, 1, 5, 64))
        self.sender = send
        self.runtime = RankRuntime(
            RankPlace(0, 1, 77, HEAD, "tcp://here:0", "here"),
            self.head.link(),
            Codec(),
            {"memory": transport},
            sender=send,
            receiver=receive,
            rows=self.rows,
            staging_threads=1,
        )
        self.adapter._parts = RankParts(
            self.runtime,
            {"memory": transport},
            send_slab=self.slab if role.sends else None,
            receive_slab=None if role.sends else self.slab,
            rows=self.rows,
        )
        self.adapter._publisher = Publisher(self.slab, torch.device("cpu"))

    def turn(self) -> None:
        self.runtime._loop.turn()

    def told(self) -> list[AnyFrame]:
        """Loads that the head was told of by now."""
        self.turn()
        heard = self.head_link.wait(0)
        frames = [frame for _, payload in heard for frame in Codec().decode(payload).frames()]
        return [frame for frame in frames if isinstance(frame, RoomLoaded)]

    def staged(self) -> None:
        """Comes back when the rows that were handed over are in the send slab."""
        assert self.sender is not None
        self.turn()
        assert SLAB - self.sender.balance().free == ROWS * WIDTH * 2
        until(lambda: len(self.rows) == 0)
        # The staging thread lets go of its own reference after that of the table.
        self.runtime._staging.close(30)


@pytest.fixture
def encode() -> Iterator[Worker]:
    worker = Worker(Role.PRODUCER)
    yield worker
    worker.runtime.close(0)


@pytest.fixture
def prefill() -> Iterator[Worker]:
    worker = Worker(Role.CONSUMER)
    yield worker
    worker.adapter.close()


def tower(hash: str) -> tuple[dict[str, torch.Tensor], "weakref.ref[torch.Tensor]"]:
    """What the tower made, in the host's cache."""
    made = torch.randn(ROWS, WIDTH).bfloat16()
    return {hash: made}, weakref.ref(made)


def claims(*pairs: tuple[int, str]) -> StepPlan:
    return StepPlan(claims=[ClaimSpec(room, hash, ROWS) for room, hash in pairs])


def test_claimed_rows_are_handed_over_when_the_tower_has_made_them(encode: Worker) -> None:
    cache, _ = tower("a")
    encode.adapter.start_save_caches(claims((1, "a")), {})
    assert len(encode.rows) == 0
    encode.adapter.save_caches(cache, "a")
    assert len(encode.rows) == 1
    encode.adapter.save_caches(cache, "a")
    assert len(encode.rows) == 1
    encode.staged()
    assert torch.equal(encode.slab.rows(0, ROWS, WIDTH, torch.bfloat16), cache["a"])


def test_rows_that_nobody_claims_are_not_touched(encode: Worker) -> None:
    cache, alive = tower("a")
    encode.adapter.start_save_caches(StepPlan(), cache)
    encode.adapter.save_caches(cache, "a")
    assert len(encode.rows) == 0
    cache.clear()
    gc.collect()
    assert alive() is None


def test_rows_that_are_in_the_cache_already_are_handed_over_at_once(encode: Worker) -> None:
    cache, _ = tower("a")
    encode.adapter.start_save_caches(claims((1, "a"), (2, "b")), cache)
    assert len(encode.rows) == 1
    encode.staged()


def test_a_hash_that_nobody_claims_any_more_is_not_awaited(encode: Worker) -> None:
    cache, alive = tower("a")
    encode.adapter.start_save_caches(claims((1, "a")), {})
    encode.adapter.start_save_caches(StepPlan(unclaimed=["a"]), {})
    encode.adapter.save_caches(cache, "a")
    assert len(encode.rows) == 0
    cache.clear()
    gc.collect()
    assert alive() is None


def test_a_hash_claimed_anew_in_the_step_that_gives_it_up_is_awaited(encode: Worker) -> None:
    cache, _ = tower("a")
    encode.adapter.start_save_caches(claims((1, "a")), {})
    plan = claims((2, "a"))
    plan.unclaimed.append("a")
    encode.adapter.start_save_caches(plan, {})
    encode.adapter.save_caches(cache, "a")
    assert len(encode.rows) == 1


def test_rows_for_which_the_loop_finds_no_room_are_let_go(encode: Worker) -> None:
    cache, alive = tower("a")
    encode.adapter.start_save_caches(StepPlan(claims=[ClaimSpec(1, "a", ROWS + 1)]), {})
    encode.adapter.save_caches(cache, "a")
    encode.turn()
    cache.clear()
    gc.collect()
    assert alive() is None
    assert len(encode.rows) == 0


def test_staged_rows_do_not_keep_the_tensor_alive(encode: Worker) -> None:
    cache, alive = tower("a")
    encode.adapter.start_save_caches(claims((1, "a")), {})
    encode.adapter.save_caches(cache, "a")
    encode.staged()
    cache.clear()
    gc.collect()
    assert alive() is None


def test_loads_of_a_step_are_put_into_the_cache_and_told(prefill: Worker) -> None:
    made = torch.randn(ROWS, WIDTH).bfloat16()
    prefill.slab.rows(512, ROWS, WIDTH, torch.bfloat16).copy_(made)
    loads = [
        LoadSpec(5, "a", 512, ROWS, WIDTH, "bfloat16", Layout.WHOLE),
        LoadSpec(6, "none", 0, 0, WIDTH, "bfloat16", Layout.WHOLE),
    ]
    cache: dict[str, torch.Tensor] = {}
    prefill.adapter.start_load_caches(StepPlan(loads=loads), cache)
    assert torch.equal(cache["a"], made)
    assert cache["none"].shape == (0, WIDTH)
    told: list[AnyFrame] = []

    def both() -> bool:
        told.extend(prefill.told())
        return len(told) == 2

    until(both)
    assert told == [RoomLoaded(5), RoomLoaded(6)]


def test_a_load_is_told_when_it_was_read_and_not_before(prefill: Worker) -> None:
    read = threading.Event()

    def wait() -> None:
        assert read.wait(30)

    prefill.adapter._report_read(5, wait)
    assert prefill.told() == []
    read.set()
    told: list[AnyFrame] = []

    def one() -> bool:
        told.extend(prefill.told())
        return bool(told)

    until(one)
    assert told == [RoomLoaded(5)]


def test_a_read_whose_end_is_unknown_is_not_told_and_the_next_one_is(prefill: Worker) -> None:
    def broken() -> None:
        raise RuntimeError("the device is lost")

    prefill.adapter._report_read(5, broken)
    prefill.adapter._report_read(6, lambda: None)
    told: list[AnyFrame] = []

    def one() -> bool:
        told.extend(prefill.told())
        return bool(told)

    until(one)
    assert told == [RoomLoaded(6)]


def test_a_rank_that_has_no_part_in_transfers_does_nothing() -> None:
    config = Config.from_extra({}, role=Role.PRODUCER, default_host="here", default_port=1)
    idle = RankAdapter(config, None)
    cache, alive = tower("a")
    idle.start_save_caches(claims((1, "a")), cache)
    idle.save_caches(cache, "a")
    idle.start_load_caches(StepPlan(), cache)
    cache.clear()
    gc.collect()
    assert alive() is None
    idle.close()
    idle.close()


def test_closing_frees_the_slab_once(prefill: Worker) -> None:
    prefill.adapter.close()
    prefill.adapter.close()
    assert prefill.slab.tensor.numel() == 0
