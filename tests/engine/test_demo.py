# SPDX-License-Identifier: Apache-2.0
"""`epd demo` from the command line, with real engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("epd")), "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


def test_a_picture_goes_through_two_engines(tmp_path: Path) -> None:
    written = tmp_path / "demo.json"
    run = demo("--transport", "mooncake", "--json", str(written))
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith("demo: PASS ")
    found = json.loads(written.read_text())
    assert found["pass"] is found["tokens_equal"] is True
    assert found["transport"] == "mooncake"
    assert found["sent_bytes"] == found["embedding_bytes"] > 0
    assert len(found["encoded_to_landed_s"]) == found["items"] == 1


def test_a_picture_that_is_not_there_fails_with_its_name(tmp_path: Path) -> None:
    run = demo("--image", str(tmp_path / "none.png"))
    assert run.returncode == 1
    last = run.stdout.splitlines()[-1]
    assert last.startswith("demo: FAIL ")
    assert "none.png" in last
