# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks, kept for all tests of this folder: their processes take longest to start."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epd_connector.rows import Layout
from tests.group.engines import Group

MakeGroup = Callable[..., Group]
KEYS: dict[Layout, dict[str, object]] = {
    Layout.WHOLE: {"shard": "never"},
    Layout.SHARDS: {"shard": "always"},
    Layout.SHARED: {},
}
"""What makes a prefill engine receive everything in a layout."""

TIMEOUT_S = 300
"""The first test pays for what all processes import, which takes a busy machine a minute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def group_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeGroup]:
    """The group of so many ranks; the same one whenever it is asked for."""
    groups: dict[tuple[int, bool], Group] = {}

    def make(ranks: int, *, shared_memory: bool = True) -> Group:
        key = ranks, shared_memory
        if key not in groups:
            rendezvous = tmp_path_factory.mktemp("group") / "rendezvous"
            groups[key] = Group(ranks, rendezvous, shared_memory=shared_memory)
        return groups[key]

    yield make
    for group in groups.values():
        group.leave()
