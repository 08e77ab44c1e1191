# SPDX-License-Identifier: Apache-2.0
"""Which engines a demo starts, and over how many ranks its model can be spread.

Owns the engines' settings, and the check of the ranks against the head counts in the model's
`config.json`; a model that says nothing of its heads is left to the host to judge. Starts nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from epd_connector.errors import ConfigError
from epd_connector.testing.chat import JSONValue
from epd_connector.testing.engines import MAX_RANKS, ONE_THREAD, EngineSpec, connector_spec

# The built model's embeddings fit, and four ranks' slabs fit in a container's 64 MB of /dev/shm.
TINY_SLABS: Mapping[str, JSONValue] = {"send_slab_bytes": "8MiB", "receive_slab_bytes": "8MiB"}
# Every worker touches all of its KV cache.
TINY_KV = (f"--kv-cache-memory-bytes={128 << 20}",)
# Engines of several ranks. Sums over ranks are rounded in another order than sums in one, which
# in bfloat16 changes the greedy tokens after a dozen.
EXACT = ("--dtype=float32",)
PATIENCE: Mapping[str, JSONValue] = {"peer_timeout_s": 30, "resolve_timeout_s": 30}


def engine_specs(model: Path, args: argparse.Namespace) -> list[EngineSpec]:
    """The monolithic, the encode and the prefill engine, in this order.

    The first has one rank, whatever the others have: what they answer is compared with it.
    """
    extra: dict[str, JSONValue] = {"transport": args.transport}
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    if args.model is None:
        extra.update(TINY_SLABS)
        flags += TINY_KV
    if args.encode_tp > 1 or args.prefill_tp > 1:
        extra.update(PATIENCE)
        flags += EXACT
        env = ONE_THREAD
    encode, prefill = ((*flags, _spread(ranks)) for ranks in (args.encode_tp, args.prefill_tp))
    received = {**extra, "shard": str(args.shard)}
    return [
        EngineSpec("monolithic", model, flags=flags, env=env),
        connector_spec("encode", model, "ec_producer", extra, flags=encode, env=env),
        connector_spec("prefill", model, "ec_consumer", received, flags=prefill, env=env),
    ]


def _spread(ranks: int) -> str:
    return f"--tensor-parallel-size={ranks}"


@dataclass(frozen=True)
class Heads:
    """Attention heads of a model; None where its configuration does not say."""

    text: int | None = None
    key_value: int | None = None
    vision: int | None = None

    def obstacle(self, ranks: int) -> str | None:
        """What keeps the model from being spread over `ranks` ranks; None if nothing is known to.

        Each rank takes as many heads as every other. Key-value heads that are fewer than the
        ranks are repeated, a whole number of times.
        """
        if self.text is not None and self.text % ranks:
            return f"the {self.text} attention heads of its language model"
        kv = self.key_value
        if kv is not None and kv % ranks and ranks % kv:
            return f"the {kv} key-value heads of its language model"
        if self.vision is not None and self.vision % ranks:
            return f"the {self.vision} attention heads of its tower"
        return None


def read_heads(model: Path) -> Heads:
    """The head counts in `model`/config.json. Raises OSError, and ValueError for a broken file."""
    config = json.loads((model / "config.json").read_text())
    if not isinstance(config, Mapping):
        raise ValueError(f"{model / 'config.json'} holds no object")
    text, vision = config.get("text_config", config), config.get("vision_config")
    return Heads(
        text=_count(text, "num_attention_heads"),
        key_value=_count(text, "num_key_value_heads"),
        vision=_count(vision, "num_heads") or _count(vision, "num_attention_heads"),
    )


def check_ranks(option: str, ranks: int, heads: Heads) -> None:
    """Raise ConfigError, naming `option`, if a model with `heads` cannot have so many ranks."""
    obstacle = heads.obstacle(ranks)
    if obstacle is None:
        return
    works = [n for n in range(1, MAX_RANKS + 1) if heads.obstacle(n) is None]
    raise ConfigError(
        f"{option} {ranks}: {ranks} ranks cannot share {obstacle} evenly; "
        f"this model works with {', '.join(map(str, works))}"
    )


def _count(section: object, key: str) -> int | None:
    value = section.get(key) if isinstance(section, Mapping) else None
    return value if isinstance(value, int) and value > 0 else None
