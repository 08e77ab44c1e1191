# SPDX-License-Identifier: Apache-2.0
"""The built wheel in a fresh environment that has the host: the connector is found by name.

The fresh environment borrows the installed packages of this one, but not this one's editable
install: the checkout is reachable from none of its processes.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("epd_connector", "entry_points", "pyproject.toml", "README.md", "LICENSE")

pytestmark = pytest.mark.engine


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command and return what it printed; a failure shows all that it said."""
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a stale `build` folder of the checkout has no part in it."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=copy)
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and the host. The environment's folder."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    python = folder / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--quiet", "--no-index", "--no-deps", wheel),
        cwd=folder,
    )
    # A path that a .pth file names is searched, but its own .pth files are not read: so the
    # editable install does not come along, while the development hooks have to be named.
    site = folder / sysconfig.get_path("purelib", vars={"base": "."})
    (site / "host.pth").write_text(f"{sysconfig.get_path('purelib')}\nimport _epd_devhooks\n")
    return folder


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    expected = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "epd_connector").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    expected |= {
        f"epd_connector/{path.relative_to(ROOT)}" for path in ROOT.glob("entry_points/*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    held = {name for name in names if ".dist-info/" not in name}
    assert held == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


FIND_CONNECTOR = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()

import epd_connector
import epd_connector.entry_points.vllm_plugin as door
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

config = ECTransferConfig(ec_connector="EPDConnector", ec_role="ec_producer")
found = ECConnectorFactory.get_connector_class(config)
print(json.dumps({
    "files": [epd_connector.__file__, door.__file__],
    "connector": [found.__module__, found.__name__],
    "is_connector": issubclass(found, ECConnectorBase),
}))
"""


def test_the_host_finds_the_connector_by_name(fresh: Path) -> None:
    said = run(fresh / "bin" / "python", "-c", FIND_CONNECTOR, cwd=fresh)
    found = json.loads(said.splitlines()[-1])
    assert [Path(file).is_relative_to(fresh) for file in found["files"]] == [True, True]
    assert found["connector"] == ["epd_connector.hosts.vllm.connector", "EPDConnector"]
    assert found["is_connector"]


LIST_TRANSPORTS = """
from importlib.metadata import entry_points
for entry in sorted(entry_points(group="epd_connector.transports"), key=lambda e: e.name):
    print(entry.name, entry.load()().__name__)
"""


def test_the_transports_are_found_by_name(fresh: Path) -> None:
    said = run(fresh / "bin" / "python", "-c", LIST_TRANSPORTS, cwd=fresh)
    assert said.splitlines() == ["mooncake MooncakeTransport", "shm ShmTransport"]


def test_the_command_is_installed(fresh: Path) -> None:
    assert "doctor" in run(fresh / "bin" / "epd", "--help", cwd=fresh)
