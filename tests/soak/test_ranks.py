# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks give the tokens of one monolithic engine: those that are too many for
``tests/engine``."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from epd_connector.testing.tiny_models import ModelKind
from tests.engine.fleet import Monolithics
from tests.engine.ranks import (
    CHOICES,
    OTHER_CHOICES,
    encode_engines,
    give_the_tokens_of_one_engine,
)

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", list(ModelKind))
def test_tokens_are_those_of_one_engine(
    kind: ModelKind, models: Mapping[ModelKind, Path], logs: Path, monolithics: Monolithics
) -> None:
    with encode_engines(kind, models[kind], logs, monolithics) as encoders:
        give_the_tokens_of_one_engine(encoders, OTHER_CHOICES, logs, monolithics)
        if kind is not ModelKind.QWEN3_VL:
            give_the_tokens_of_one_engine(encoders, CHOICES, logs, monolithics)
