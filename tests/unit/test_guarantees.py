# SPDX-License-Identifier: Apache-2.0
"""The page of guarantees names tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAMED = re.findall(r"`(tests/[\w/.]+)?(?:::(\w+))?`", PAGE)


def named() -> list[tuple[str, str]]:
    """Files and tests in them; a test without a file is in the one before it."""
    found, path = [], ""
    for file, test in NAMED:
        path = file or path
        if file or test:
            found.append((path, test))
    return found


def test_the_page_names_tests() -> None:
    assert len(named()) > 20


@pytest.mark.parametrize(("path", "test"), named())
def test_what_it_names_exists(path: str, test: str) -> None:
    assert (ROOT / path).exists()
    if test:
        assert f"def {test}(" in (ROOT / path).read_text()
