# SPDX-License-Identifier: Apache-2.0
"""Ranks of one engine that reach encode ranks in different ways, or not at all."""

import pytest

from epd_connector.hosts.vllm.plan import StepPlan
from epd_connector.rows import Layout
from tests.group import rank_side
from tests.group.conftest import KEYS, MakeGroup
from tests.group.engines import EncodeEngine, PrefillEngine
from tests.group.material import Rows
from tests.group.rank_side import Step


@pytest.mark.parametrize("layout", [Layout.SHARDS, Layout.SHARED], ids=str)
def test_one_rank_has_no_transport_in_common(
    group_of: MakeGroup, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    group = group_of(2)
    without, well = EncodeEngine(1, transport="shm"), EncodeEngine(2, transport="auto")
    last: dict[str, object] = {"transport": "mooncake"}
    prefill = PrefillEngine(group, extra=KEYS[layout], of_rank={1: last}).up()
    item = Rows(f"without-{layout}", 9)
    asked = prefill.ask(without, item)
    without.encoded(item)
    prefill.failed(asked)
    assert "this rank and the encode rank share no transport (here: mooncake)" in caplog.text
    assert group.all(rank_side.load, StepPlan()) == [Step({}, 0)] * 2
    assert group.all(rank_side.meet) == [[0, 1]] * 2
    # The first rank's rows come through shared memory and the last one's over TCP.
    prefill.load(well, Rows(f"with-{layout}", 33), Rows(f"deep-{layout}", 8, "video"))
    prefill.close()
    without.close()
    well.close()
