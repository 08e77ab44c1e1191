# SPDX-License-Identifier: Apache-2.0
"""Who this engine is: its model's fingerprint, its element type, its row widths, and the
numbers by which its processes know each other.

Owns what is read from the host's configuration and the model's files for that. What two
fingerprints mean to each other is ``core.fingerprint``'s.
"""

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd_connector.core.fingerprint import UNKNOWN, fingerprint

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

_TOWER = re.compile(r"visual|vision|audio|multi_modal_projector|mm_projector")
_NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "quantization_config"}
)
_TOWER_CONFIGS = ("vision_config", "audio_config", "vision_tower", "audio_tower")
_SAMPLED_TENSORS = 64
_SAMPLED_BYTES = 1024
_MAX_HEADER_BYTES = 100_000_000


def model_fingerprint(model_config: "ModelConfig") -> str:
    """What two engines must have in common to exchange embeddings.

    Language weights may differ (a quantized one on the prefill side is of use); towers may
    not. So it covers the model's type, its towers' configuration, the width of its
    embeddings, and a sample of its towers' weights as they lie on disk.
    """
    config = model_config.hf_config.to_dict()
    facts = {name: config[name] for name in _TOWER_CONFIGS if name in config}
    facts["model_type"] = config.get("model_type")
    facts["hidden_size"] = hidden_size(model_config)
    text = json.dumps(_stable(facts), sort_keys=True, default=str)
    return fingerprint(
        _digest(text.encode()), _tower_digest(model_config.model, model_config.revision)
    )


def hidden_size(model_config: "ModelConfig") -> int:
    """Elements per token of the language model; row widths are multiples of it."""
    return int(model_config.get_hidden_size())


def dtype_name(model_config: "ModelConfig") -> str:
    """torch's name of the element type of embeddings, such as ``bfloat16``."""
    return str(model_config.dtype).removeprefix("torch.")


def dtype_itemsize(model_config: "ModelConfig") -> int:
    """Bytes per element of embeddings."""
    return int(model_config.dtype.itemsize)


def _stable(value: Any) -> Any:
    """``value`` without what depends on where and how the model is loaded."""
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if k not in _NOT_OF_THE_MODEL}
    if isinstance(value, list | tuple):
        return [_stable(v) for v in value]
    return value


def _tower_digest(model: str, revision: str | None) -> str:
    directory = _model_directory(model, revision)
    if directory is None:
        return UNKNOWN
    try:
        samples = sorted(_tower_tensors(directory))
        if not samples:
            return UNKNOWN
        step = max(1, len(samples) // _SAMPLED_TENSORS)
        digest = hashlib.blake2b(digest_size=6)
        for name, file, start, end in samples[::step]:
            digest.update(f"{name}:{end - start}".encode())
            with file.open("rb") as stream:
                stream.seek(start)
                digest.update(stream.read(min(end - start, _SAMPLED_BYTES)))
        return digest.hexdigest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("the tower weights of %s cannot be sampled (%s)", model, error)
        return UNKNOWN


def _model_directory(model: str, revision: str | None) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _tower_tensors(directory: Path) -> Iterator[tuple[str, Path, int, int]]:
    """Name, file and byte range of every tower tensor."""
    for file in sorted(directory.glob("*.safetensors")):
        header, base = _header(file)
        for name, entry in header.items():
            if _TOWER.search(name):
                start, end = entry["data_offsets"]
                yield name, file, base + start, base + end


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its tensors begin: after 8 bytes with the
    header's size, and the header in JSON. ValueError for a file that is none."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} has a header of {size} bytes: it is no safetensors file")
        header = json.loads(stream.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"the header of {file} is no JSON object")
    return header, 8 + size


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


def new_incarnation() -> int:
    """63 random bits, never 0: one start of one head or rank."""
    return secrets.randbits(63) or 1


def link_token(vllm_config: "VllmConfig") -> int:
    """What head and ranks of one engine, and nobody else, can derive: marks their frames."""
    return _derived(vllm_config, b"epd-link")


def socket_name(vllm_config: "VllmConfig") -> str:
    """What every process of this engine calls the socket of its head."""
    return f"epd-{_derived(vllm_config, b'epd-socket'):016x}"


def _derived(vllm_config: "VllmConfig", purpose: bytes) -> int:
    """63 bits that every process of this engine derives alike, other ones per purpose."""
    index = vllm_config.parallel_config.data_parallel_index
    engine = f"{vllm_config.ec_transfer_config.engine_id}-{index}"
    digest = hashlib.blake2b(engine.encode(), digest_size=8, person=purpose)
    return int.from_bytes(digest.digest(), "big") >> 1 or 1
