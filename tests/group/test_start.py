# SPDX-License-Identifier: Apache-2.0
"""A rank that cannot start says why, and no other rank is left waiting for it."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_connector.rows import Layout
from tests.group import rank_side
from tests.group.child import ChildError
from tests.group.conftest import KEYS, MakeGroup
from tests.group.engines import EncodeEngine, Group, PrefillEngine
from tests.group.host_config import host_config
from tests.group.material import Rows

TOO_MUCH = "1023GiB"


def works_afterwards(group: Group, layout: Layout) -> None:
    """No rank is in a collective, and an engine of the same processes can be started."""
    everybody = list(range(len(group)))
    assert group.all(rank_side.meet) == [everybody] * len(group)
    encode = EncodeEngine(1, transport="shm")
    prefill = PrefillEngine(group, extra={**KEYS[layout], "transport": "shm"}).up()
    prefill.load(encode, Rows("after", 11), Rows("after all", 1))
    prefill.close()
    encode.close()


@pytest.mark.parametrize("layout", Layout, ids=str)
@pytest.mark.parametrize(("ranks", "broken"), [(2, 0), (2, 1), (4, 2)])
def test_a_rank_that_gets_no_memory(
    group_of: MakeGroup, layout: Layout, ranks: int, broken: int
) -> None:
    group = group_of(ranks)
    extra = {**KEYS[layout], "transport": "shm"}
    prefill = PrefillEngine(group, extra=extra, of_rank={broken: {"receive_slab_bytes": TOO_MUCH}})
    for rank, outcome in enumerate(prefill.started):
        # Where the first rank makes the slab of all, all of them can say why there is none.
        if rank == broken or (layout is Layout.SHARED and broken == 0):
            assert isinstance(outcome, ChildError)
            assert "TransportError" in str(outcome)
            assert "receive_slab_bytes" in str(outcome) or rank != 0
        else:
            assert outcome is None
    prefill.close()
    works_afterwards(group, layout)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port that is taken; the one below it was free a moment ago."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            taken = stack.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port: int = taken.getsockname()[1]
            with socket.socket() as below, contextlib.suppress(OSError):
                below.bind(("127.0.0.1", port - 1))
                break
        else:
            raise AssertionError("no two free ports lie side by side")
        yield port


@pytest.mark.parametrize("layout", Layout, ids=str)
def test_a_rank_whose_port_is_taken(group_of: MakeGroup, layout: Layout, taken_port: int) -> None:
    group = group_of(2)
    extra = {**KEYS[layout], "transport": "shm", "control_port": taken_port - 2}
    host = host_config("ec_both", 2, f"taken-{layout}", extra)
    first, last = group.outcomes(rank_side.start, [(host,), (host,)])
    assert first is None
    assert isinstance(last, ChildError)
    assert "LinkError" in str(last)
    assert f"127.0.0.1:{taken_port}" in str(last)
    group.all(rank_side.close)
    works_afterwards(group, layout)


@pytest.mark.parametrize("layout", Layout, ids=str)
def test_ranks_have_one_slab_or_each_its_own_and_take_it_along(
    group_of: MakeGroup, layout: Layout
) -> None:
    group = group_of(4)
    prefill = PrefillEngine(group, extra={**KEYS[layout], "transport": "shm"}).up()
    paths = {Path(str(path)) for path in group.all(rank_side.slab_path)}
    assert len(paths) == (1 if layout is Layout.SHARED else 4)
    assert all(path.exists() for path in paths)
    prefill.close()
    assert not any(path.exists() for path in paths)
