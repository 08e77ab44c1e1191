# SPDX-License-Identifier: Apache-2.0
"""Who an engine is: what two of them must have in common, read from tiny models on disk."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from epd_connector.core.fingerprint import UNKNOWN, same_model
from epd_connector.hosts.vllm.identity import (
    dtype_itemsize,
    dtype_name,
    hidden_size,
    model_fingerprint,
)

Tensors = dict[str, torch.Tensor]


@dataclass
class HfConfig:
    """The part of a model's configuration that is read."""

    values: dict[str, object]

    def to_dict(self) -> dict[str, object]:
        return self.values


@dataclass
class ModelConfig:
    """What is read of the host's model configuration."""

    model: str
    hf_config: HfConfig = field(default_factory=lambda: HfConfig(config()))
    dtype: torch.dtype = torch.bfloat16
    width: int = 128
    revision: str | None = None

    def get_hidden_size(self) -> int:
        return self.width


def config(**changes: object) -> dict[str, object]:
    tower = {"depth": 2, "hidden_size": 64, "torch_dtype": "bfloat16"}
    return {"model_type": "tiny_vl", "vision_config": tower, "architectures": ["Tiny"], **changes}


def weights() -> Tensors:
    torch.manual_seed(0)
    return {
        "model.visual.blocks.0.weight": torch.randn(8, 8),
        "model.visual.merger.weight": torch.randn(4, 8),
        "model.language_model.layers.0.weight": torch.randn(16, 16),
    }


def saved(directory: Path, tensors: Tensors, name: str = "model.safetensors") -> str:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / name)
    return str(directory)


def of(model: str, **changes: object) -> str:
    return model_fingerprint(ModelConfig(model, HfConfig(config(**changes))))


def test_one_model_is_itself_wherever_it_lies(tmp_path: Path) -> None:
    here, there = saved(tmp_path / "a", weights()), saved(tmp_path / "b", weights())
    assert of(here) == of(here) == of(there)
    assert UNKNOWN not in of(here)


def test_files_may_be_cut_otherwise(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", weights())
    for number, (name, tensor) in enumerate(weights().items()):
        saved(tmp_path / "cut", {name: tensor}, f"model-{number}.safetensors")
    assert of(whole) == of(str(tmp_path / "cut"))


@pytest.mark.parametrize("change", ["value", "shape", "name"])
def test_another_tower_is_another_model(tmp_path: Path, change: str) -> None:
    other, name = weights(), "model.visual.merger.weight"
    if change == "value":
        other[name][0, 0] += 1
    elif change == "shape":
        other[name] = torch.cat([other[name]] * 2)
    else:
        other["model.visual.merger.mlp"] = other.pop(name)
    one, two = of(saved(tmp_path / "a", weights())), of(saved(tmp_path / "b", other))
    assert not same_model(one, two)


@pytest.mark.parametrize("change", ["value", "name", "quantized"])
def test_another_language_model_is_the_same_tower(tmp_path: Path, change: str) -> None:
    other, name = weights(), "model.language_model.layers.0.weight"
    if change == "value":
        other[name] += 1
    elif change == "name":
        other["model.language_model.layers.0.renamed"] = other.pop(name)
    else:
        other[name] = other[name].to(torch.int8)
        other["model.language_model.layers.0.scales"] = torch.ones(16)
    one, two = of(saved(tmp_path / "a", weights())), of(saved(tmp_path / "b", other))
    assert one == two


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"vision_config": {"depth": 3, "hidden_size": 64}}, False),
        ({"model_type": "other_vl"}, False),
        ({"audio_config": {"depth": 1}}, False),
        ({"vision_config": {"depth": 2, "hidden_size": 64, "torch_dtype": "float16"}}, True),
        ({"architectures": ["Other"], "quantization_config": {"bits": 4}}, True),
        ({"transformers_version": "9.9", "_name_or_path": "/elsewhere"}, True),
    ],
)
def test_what_the_configuration_says_of_towers_counts(
    tmp_path: Path, changes: dict[str, object], same: bool
) -> None:
    model = saved(tmp_path / "a", weights())
    assert same_model(of(model), of(model, **changes)) is same


def test_another_width_of_the_language_model_is_another_model(tmp_path: Path) -> None:
    model = saved(tmp_path / "a", weights())
    wide = model_fingerprint(ModelConfig(model, width=256))
    assert not same_model(of(model), wide)


def broken_files(directory: Path) -> list[Path]:
    """Directories whose tower cannot be sampled."""
    made = [
        directory / name for name in ("empty", "no tower", "garbage", "short", "no json", "list")
    ]
    for path in made:
        path.mkdir()
    save_file({"language.weight": torch.ones(2)}, made[1] / "model.safetensors")
    (made[2] / "model.safetensors").write_bytes(b"\xff" * 100)
    (made[3] / "model.safetensors").write_bytes(b"\x01")
    (made[4] / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"}}}}")
    (made[5] / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    entry = b'{"visual.weight": [1, 2]}'
    made.append(directory / "entry")
    made[-1].mkdir()
    (made[-1] / "model.safetensors").write_bytes(len(entry).to_bytes(8, "little") + entry)
    return made


def test_weights_that_cannot_be_read_match_any(tmp_path: Path) -> None:
    whole = of(saved(tmp_path / "whole", weights()))
    for path in [*broken_files(tmp_path), tmp_path / "not there"]:
        unknown = of(str(path))
        assert unknown.endswith(f"/{UNKNOWN}"), path
        assert same_model(unknown, whole)
        assert not same_model(unknown, of(str(path), model_type="other_vl"))


def test_a_directory_that_may_not_be_read_is_unknown(tmp_path: Path) -> None:
    model = saved(tmp_path / "a", weights())
    file = Path(model) / "model.safetensors"
    file.unlink()
    file.mkdir()
    assert of(model).endswith(f"/{UNKNOWN}")


def test_element_type_and_width() -> None:
    model = ModelConfig("anything", dtype=torch.float32, width=96)
    assert dtype_name(model) == "float32"
    assert dtype_itemsize(model) == 4
    assert hidden_size(model) == 96
