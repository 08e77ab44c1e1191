# SPDX-License-Identifier: Apache-2.0
"""The tiny models: reproducible, small, and with embeddings that decide what is said."""

from __future__ import annotations

import hashlib
import io
from base64 import b64decode
from pathlib import Path

import pytest

from epd_connector.cli.demo_engines import read_heads
from epd_connector.testing.pictures import random_picture
from epd_connector.testing.tiny_models import HIDDEN, ModelKind, build

PICTURE = random_picture(160, 96, 1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[ModelKind, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: build(kind, folder / kind) for kind in ModelKind}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", ModelKind)
def test_a_seed_gives_the_same_files_and_another_seed_other_weights(
    kind: ModelKind, models: dict[ModelKind, Path], tmp_path: Path
) -> None:
    first = digests(models[kind])
    assert digests(build(kind, tmp_path / "again", seed=0)) == first
    other = digests(build(kind, tmp_path / "other", seed=1))
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


@pytest.mark.parametrize("kind", ModelKind)
def test_a_model_is_about_two_megabytes(kind: ModelKind, models: dict[ModelKind, Path]) -> None:
    assert sum(path.stat().st_size for path in models[kind].iterdir()) < 3_000_000


@pytest.mark.parametrize("kind", ModelKind)
def test_a_model_can_be_spread_over_up_to_four_ranks(
    kind: ModelKind, models: dict[ModelKind, Path]
) -> None:
    heads = read_heads(models[kind])
    assert [ranks for ranks in range(1, 9) if heads.obstacle(ranks) is None] == [1, 2, 4]


@pytest.mark.parametrize("kind", ModelKind)
def test_every_character_survives_the_tokenizer(
    kind: ModelKind, models: dict[ModelKind, Path]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models[kind])
    text = "Grüße, 世界! 🙂 <|image_pad|>\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer) == 264


@pytest.mark.parametrize("kind", ModelKind)
def test_the_tower_gives_the_declared_rows_and_width(
    kind: ModelKind, models: dict[ModelKind, Path]
) -> None:
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    picture = Image.open(io.BytesIO(b64decode(PICTURE.partition(",")[2])))
    processor = AutoProcessor.from_pretrained(models[kind])
    inputs = processor(text="<|image_pad|>", images=[picture], return_tensors="pt")
    rows = int((inputs["input_ids"] == processor.image_token_id).sum())
    model = AutoModelForImageTextToText.from_pretrained(models[kind])
    found = model.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    per_image = [found.pooler_output, *(found.get("deepstack_features") or [])]
    levels = [images[0] for images in per_image]
    assert [tuple(level.shape) for level in levels] == [(rows, HIDDEN)] * len(levels)
    assert len(levels) * HIDDEN == kind.width
    assert all(float(level.detach().std()) > 0 for level in levels)
