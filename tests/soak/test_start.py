# SPDX-License-Identifier: Apache-2.0
"""Engines that cannot start say why: what only a worker finds out. The rest is in
``tests/engine``."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from epd_connector.testing.engines import EngineProcess, connector_spec
from epd_connector.testing.tiny_models import ModelKind
from tests.engine.trouble import refusal
from tests.soak.stage import KIND

pytestmark = pytest.mark.engine


def test_a_transport_that_is_not_installed_stops_the_start(
    models: Mapping[ModelKind, Path], logs: Path
) -> None:
    extra = {"transport": "carrier-pigeon"}
    spec = connector_spec("wrong-transport", models[KIND], "ec_consumer", extra)
    with EngineProcess(spec, logs) as engine:
        says = refusal(engine)
    assert re.search(r"carrier-pigeon.*not an installed transport.*shm", says), says[-2000:]
