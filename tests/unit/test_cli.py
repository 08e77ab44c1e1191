# SPDX-License-Identifier: Apache-2.0
"""The `epd` command line: help, version, lazy imports, exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from epd_connector import __version__
from epd_connector.cli.main import COMMANDS, main


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"epd {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["cure"], ["doctor", "--no-such-option"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(arguments)
    assert done.value.code == 2
    assert "usage: epd" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["bench", "--help"],
        ["doctor", "--help"],
        ["inspect", "--help"],
        ["fence", "--help"],
    ],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from epd_connector.cli.main import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "print('heavy:', *{'torch', 'vllm', 'zmq', 'mooncake'} & sys.modules.keys())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.splitlines()[-1].split() == ["heavy:"]


def test_code_of_the_command_is_the_code_of_the_process() -> None:
    command = "import sys; from epd_connector.cli.main import main; sys.exit(main())"
    arguments = ["doctor", "--fast", "--json", "--config", '{"sharrd": 1}']
    result = subprocess.run(
        [sys.executable, "-c", command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1, result.stderr
    assert "did you mean shard?" in result.stdout


def test_bench_says_where_the_benchmark_is_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed = tmp_path / "epd_connector" / "__init__.py"
    monkeypatch.setattr("epd_connector.__file__", str(installed))
    assert main(["bench"]) == 1
    assert f"epd bench: there is no benchmarks folder in {tmp_path}: run `make bench`" in (
        capsys.readouterr().err
    )
