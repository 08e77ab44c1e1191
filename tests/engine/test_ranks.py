# SPDX-License-Identifier: Apache-2.0
"""Engines of several ranks give the tokens of one monolithic engine, however rows are received.

Of a DeepStack model here; of a plain one, with the other transports, in ``tests/soak``.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest

from epd_connector.testing.tiny_models import ModelKind
from tests.engine.fleet import Monolithics
from tests.engine.ranks import CHOICES, STAGED, encode_engines, give_the_tokens_of_one_engine

pytestmark = pytest.mark.engine

KIND = ModelKind.QWEN3_VL


def test_tokens_are_those_of_one_engine(
    models: Mapping[ModelKind, Path], logs: Path, monolithics: Monolithics
) -> None:
    with encode_engines(KIND, models[KIND], logs, monolithics) as encoders:
        give_the_tokens_of_one_engine(encoders, [*CHOICES, STAGED], logs, monolithics)
