# SPDX-License-Identifier: Apache-2.0
"""Vision-language models of about 2 MB with random weights, made on the spot and offline.

Owns their shapes, weights, tokenizer, chat template and preprocessor settings. Their text means
nothing, but greedy decoding of them is exact, which is what comparing two deployments needs.
Does not start engines.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

WEIGHT_STD = 0.05
HIDDEN = 128
"""Width of one level of an embedding row, in elements."""

_TEXT_GAINS: Mapping[str, float] = {
    "q_norm.weight": 3.0,
    "k_norm.weight": 3.0,
    "q_proj.weight": 6.0,
    "k_proj.weight": 6.0,
    "o_proj.weight": 3.0,
}

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
BYTE_TOKENS = 256
VOCAB_SIZE = BYTE_TOKENS + len(SPECIAL_TOKENS)

MIN_ROWS = 1
MAX_ROWS = 1536
"""Fewest and most embedding rows of one image; larger images are scaled down by the host."""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image_url' in part -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'video' or 'video_url' in part -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- elif 'text' in part -%}
{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


class ModelKind(enum.StrEnum):
    """The models that can be built."""

    QWEN2_5_VL = "qwen2_5_vl"
    """Plain embeddings: one level of HIDDEN elements a row."""
    QWEN3_VL = "qwen3_vl"
    """DeepStack embeddings: three levels of HIDDEN elements, packed in one row."""

    @property
    def width(self) -> int:
        """Elements of one embedding row, all levels together."""
        return HIDDEN if self is ModelKind.QWEN2_5_VL else 3 * HIDDEN

    @property
    def row_pixels(self) -> int:
        """Side, in pixels, of the square of an image that becomes one embedding row."""
        return 28 if self is ModelKind.QWEN2_5_VL else 32


def build(kind: ModelKind, directory: Path, seed: int = 0) -> Path:
    """Write the model of `kind` into `directory` (made if missing) and return it.

    The same kind and seed give the same files. Imports torch and transformers, needs no network.
    """
    builders = {
        ModelKind.QWEN2_5_VL: build_qwen2_5_vl,
        ModelKind.QWEN3_VL: build_qwen3_vl,
    }
    return builders[kind](directory, seed)


def build_qwen2_5_vl(directory: Path, seed: int = 0) -> Path:
    """Write a Qwen2.5-VL of two text and two vision layers, bfloat16; returns `directory`."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            **_text_config(layers=2),
            "use_sliding_window": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [4, 6, 6],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": HIDDEN,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        **_special_ids(),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    _write(model, directory, seed)
    _write_processors(
        directory, "Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", patch=14, mean=0.48
    )
    return directory


def build_qwen3_vl(directory: Path, seed: int = 0) -> Path:
    """Write a Qwen3-VL of three text and three vision layers with DeepStack; returns `directory`.

    Its embeddings have two extra levels, taken after vision layers 0 and 1.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config={
            **_text_config(layers=3),
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1_000_000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": HIDDEN,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        **_special_ids(),
    )
    model = Qwen3VLForConditionalGeneration(config)
    _write(model, directory, seed)
    _write_processors(directory, "Qwen3VLProcessor", "Qwen3VLVideoProcessor", patch=16, mean=0.5)
    return directory


def _text_config(layers: int) -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": _token_id("<|endoftext|>"),
        "eos_token_id": _token_id("<|im_end|>"),
    }


def _special_ids() -> dict[str, int]:
    return {
        "image_token_id": _token_id("<|image_pad|>"),
        "video_token_id": _token_id("<|video_pad|>"),
        "vision_start_token_id": _token_id("<|vision_start|>"),
        "vision_end_token_id": _token_id("<|vision_end|>"),
    }


def _token_id(token: str) -> int:
    return BYTE_TOKENS + SPECIAL_TOKENS.index(token)


def _write(model: PreTrainedModel, directory: Path, seed: int) -> None:
    """Fill and save `model`, then put tokenizer and chat template beside it."""
    import torch

    directory.mkdir(parents=True, exist_ok=True)
    _fill(model, torch.Generator().manual_seed(seed))
    with _no_progress_bars():
        model.to(torch.bfloat16).save_pretrained(directory)
    _write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _fill(model: nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter from `generator`, in name order; norms scale by one.

    The text model then gets sharper attention, without which what it says depends on its last
    token more than on the image, and different images often lead to the same tokens.
    """
    import torch

    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, WEIGHT_STD, generator=generator)
            for ending, gain in _TEXT_GAINS.items():
                if ".language_model." in name and name.endswith(ending):
                    parameter.mul_(gain)


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=8192,
    ).save_pretrained(directory)


def _write_processors(
    directory: Path, processor: str, video_processor: str, *, patch: int, mean: float
) -> None:
    row_pixels = (2 * patch) ** 2
    image = {
        "processor_class": processor,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [mean] * 3,
        "image_std": [0.25] * 3,
        "size": {"shortest_edge": MIN_ROWS * row_pixels, "longest_edge": MAX_ROWS * row_pixels},
    }
    video = {
        **{key: value for key, value in image.items() if key != "image_processor_type"},
        "video_processor_type": video_processor,
        "fps": 2,
        "min_frames": 4,
        "max_frames": 8,
    }
    _write_json(directory / "preprocessor_config.json", image)
    _write_json(directory / "video_preprocessor_config.json", video)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
