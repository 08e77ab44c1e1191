# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the soak tests, which are those of the engine tests, and one stage per module."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from epd_connector.testing.tiny_models import ModelKind
from tests.engine.conftest import logs, models, monolithics, no_segments_left, pairs
from tests.engine.fleet import Monolithics
from tests.soak.stage import KIND, Stage

__all__ = ["logs", "models", "monolithics", "no_segments_left", "pairs", "stage"]

TIMEOUT_S = 900
"""Of one test: some start several engines, one after the other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="module")
def stage(
    models: Mapping[ModelKind, Path], logs: Path, monolithics: Monolithics
) -> Iterator[Stage]:
    with Stage(models[KIND], logs, monolithics) as stage:
        yield stage
