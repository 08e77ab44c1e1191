# SPDX-License-Identifier: Apache-2.0
"""Import hooks of the development environment; never part of the shipped package.

Owns three repairs that let the host engine run on a machine without a GPU, and with few
cores, each applied right after the module concerned was executed:

- `torchvision.extension`: a CUDA build of torchvision beside CPU torch cannot load its
  operators, and its next import statement then needs the schemas of `torchvision::nms`
  and `torchvision::qnms`. They are declared, without an implementation.
- `triton.backends`: with TRITON_INTERPRET=1 and VLLM_USE_V2_MODEL_RUNNER=1 a `cpu` entry is
  added, so that the host keeps Triton and runs its kernels in the interpreter.
- `vllm.distributed.utils`: the host's workers poll for work by yielding in a loop, for a second
  after each step, and an engine whose requests wait keeps stepping. On Linux 6.18 with as many
  such loops as cores, nothing else was seen to run for up to a minute: the engine that was to
  encode, this machine's shell, kernel workers. They sleep for a moment instead.

A `.pth` file imports this module at every interpreter start: it must stay cheap, and may
import nothing but what the interpreter has loaded anyway.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    Repair = Callable[[ModuleType], None]

_SCHEMAS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def _declare_torchvision_operators(extension: "ModuleType") -> None:
    """Declare the missing schemas. A torchvision whose operators did load is left alone."""
    if extension._has_ops():
        return
    import torch

    for name, schema in _SCHEMAS.items():
        torch.library.define(name, schema)


def _add_cpu_triton_backend(backends: "ModuleType") -> None:
    """Add a `cpu` entry unless this Triton has one of its own."""
    if "cpu" in backends.backends:
        return
    from triton.backends.compiler import GPUTarget

    class CPUDriver:
        """The calls that the host and the interpreter make of an active driver."""

        @staticmethod
        def is_active() -> bool:
            return True

        def get_current_target(self) -> object:
            return GPUTarget("cpu", 0, 1)

        def get_current_device(self) -> str:
            return "cpu"

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=CPUDriver)


def _sleep_between_polls(utils: "ModuleType") -> None:
    """Make a poll give its core away for 0.1 ms."""
    import time
    from functools import partial

    utils.sched_yield = partial(time.sleep, 0.0001)  # type: ignore[attr-defined]


def _wants_interpreted_triton() -> bool:
    wanted = ("TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER")
    return all(os.environ.get(name) == "1" for name in wanted)


class _RepairingLoader(SourceFileLoader):
    """Executes a module as usual, then repairs it before its importer goes on."""

    def __init__(self, fullname: str, path: str, repair: "Repair") -> None:
        super().__init__(fullname, path)
        self._repair = repair

    def exec_module(self, module: "ModuleType") -> None:
        super().exec_module(module)
        self._repair(module)


class _RepairingFinder:
    """Finds the modules to repair; says nothing about any other."""

    def __init__(self, repairs: "dict[str, Repair]") -> None:
        self._repairs = repairs

    def find_spec(
        self,
        fullname: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> ModuleSpec | None:
        repair = self._repairs.get(fullname)
        if repair is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _RepairingLoader(spec.loader.name, spec.loader.path, repair)
        return spec


def install() -> None:
    """Put the finder in front of the others. Called once per interpreter, by the import."""
    repairs: dict[str, Repair] = {
        "torchvision.extension": _declare_torchvision_operators,
        "vllm.distributed.utils": _sleep_between_polls,
    }
    if _wants_interpreted_triton():
        repairs["triton.backends"] = _add_cpu_triton_backend
    sys.meta_path.insert(0, _RepairingFinder(repairs))


install()
