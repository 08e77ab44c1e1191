# SPDX-License-Identifier: Apache-2.0
"""Engines of one test, ended with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.engines import Engines, made

TIMEOUT_S = 300
"""The first test pays for what all processes import, which takes a busy machine a minute."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture
def engines() -> Iterator[Engines]:
    yield from made()
