# SPDX-License-Identifier: Apache-2.0
"""Imports point one way: read from the source of every module, those inside functions included."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "epd_connector"

# These use the standard library, msgspec and each other. The two `base` modules are contracts.
PURE = (
    "config", "config_values", "core", "errors", "identity_enum", "link.base", "memory.slab",
    "protocol", "rows", "stats", "transport.base",
)  # fmt: skip
# A layer may import the pure modules, itself, and what is listed.
LAYERS = {
    "memory": (),
    "link": (),
    "transport": ("memory",),
    "runtime": ("memory", "link", "transport"),
    "hosts": ("memory", "link", "transport", "runtime"),
    "testing": ("memory", "link", "transport", "runtime"),
}
# Who may name a library at all: modules or packages.
OWNERS = {
    "zmq": ("epd_connector.link",),
    "vllm": ("epd_connector.hosts.vllm", "epd_connector.entry_points.vllm_plugin"),
    "mooncake": ("epd_connector.transport.mooncake",),
}
# A machine has no clock, socket, lock, thread or logger, and knows no link.
OUTSIDE_WORLD = (
    "asyncio", "concurrent", "logging", "multiprocessing", "os", "select", "signal", "socket",
    "subprocess", "threading", "time", "epd_connector.link",
)  # fmt: skip


def module_name(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts if relative.parts[0] == PACKAGE else (PACKAGE, *relative.parts)
    return ".".join(parts).removesuffix(".__init__")


SOURCES = {
    module_name(path): path
    for folder in (PACKAGE, "entry_points")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def within_any(module: str, packages: tuple[str, ...]) -> bool:
    return any(within(module, package) for package in packages)


def owned(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{PACKAGE}.{name}" for name in names)


def source_of_relative(module: str, node: ast.ImportFrom) -> str:
    is_package = SOURCES[module].name == "__init__.py"
    parents = module.split(".")
    kept = len(parents) - node.level + (1 if is_package else 0)
    return ".".join([*parents[:kept], *([node.module] if node.module else [])])


def imports(module: str) -> Iterator[str]:
    """Full names that `module` imports; `from a import b` is `a.b` where that is a module."""
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = source_of_relative(module, node) if node.level else str(node.module)
            names = (f"{origin}.{alias.name}" for alias in node.names)
            yield from (name if name in SOURCES else origin for name in names)


def pure_modules() -> list[str]:
    return [module for module in SOURCES if within_any(module, owned(PURE))]


def test_the_modules_are_seen() -> None:
    assert {f"{PACKAGE}.errors", f"{PACKAGE}.entry_points.vllm_plugin"} <= SOURCES.keys()
    assert "vllm.distributed.ec_transfer.ec_connector.factory" in set(
        imports(f"{PACKAGE}.entry_points.vllm_plugin")
    )


@pytest.mark.parametrize("module", pure_modules())
def test_pure_modules_use_the_standard_library_and_msgspec(module: str) -> None:
    foreign = [
        name
        for name in imports(module)
        if not within_any(name, owned(PURE))
        and name.split(".")[0] not in {*sys.stdlib_module_names, "msgspec"}
    ]
    assert foreign == []


@pytest.mark.parametrize("module", [m for m in SOURCES if within(m, f"{PACKAGE}.core")])
def test_machines_do_not_reach_outside(module: str) -> None:
    assert [name for name in imports(module) if within_any(name, OUTSIDE_WORLD)] == []


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_point_one_way(layer: str) -> None:
    below = (*owned(PURE), *owned((layer, *LAYERS[layer])))
    wrong = [
        (module, name)
        for module in SOURCES
        if within(module, f"{PACKAGE}.{layer}")
        for name in imports(module)
        if within(name, PACKAGE) and name != PACKAGE and not within_any(name, below)
    ]
    assert wrong == []


@pytest.mark.parametrize("library", OWNERS)
def test_a_library_is_named_by_its_owner_alone(library: str) -> None:
    wrong = [
        module
        for module in SOURCES
        if not within_any(module, OWNERS[library])
        if any(within(name, library) for name in imports(module))
    ]
    assert wrong == []
