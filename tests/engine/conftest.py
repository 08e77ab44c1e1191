# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the engine tests: models and engines of the session.

A module of tests starts its pair once, in a fixture of its own:

    @pytest.fixture(scope="module")
    def pair(pairs: Pairs) -> Iterator[Pair]:
        with pairs.start(PairOptions(transport="shm")) as started:
            yield started
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from epd_connector.memory.segment import sweep_stale_segments
from epd_connector.testing.tiny_models import ModelKind, build
from tests.engine.fleet import Monolithics, Pairs


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[ModelKind, Path]:
    """Folders of the tiny models, by kind."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: build(kind, folder / kind) for kind in ModelKind}


@pytest.fixture(scope="session", autouse=True)
def no_segments_left() -> Iterator[None]:
    """Removes the shared memory of workers that the host killed when their engine was stopped."""
    yield
    sweep_stale_segments()


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every engine of the session writes its log."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def monolithics(models: Mapping[ModelKind, Path], logs: Path) -> Iterator[Monolithics]:
    """Reference engines, which know nothing of the connector."""
    engines = Monolithics(models, logs)
    yield engines
    engines.stop()


@pytest.fixture(scope="session")
def pairs(models: Mapping[ModelKind, Path], logs: Path, monolithics: Monolithics) -> Pairs:
    """Starts encode and prefill engines that belong together."""
    return Pairs(models, logs, monolithics)
