# SPDX-License-Identifier: Apache-2.0
"""Which tensor-parallel sizes `epd demo` takes, and what it starts for them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from epd_connector.cli import demo
from epd_connector.cli.demo_engines import Heads, check_ranks, engine_specs, read_heads
from epd_connector.cli.main import main
from epd_connector.errors import ConfigError
from epd_connector.testing.engines import MAX_RANKS

TINY = Heads(text=4, key_value=2, vision=2)


def config(folder: Path, content: object) -> Path:
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("heads", "ranks"),
    [(TINY, 1), (TINY, 2), (Heads(text=8, key_value=2, vision=8), 4), (Heads(), MAX_RANKS)],
)
def test_ranks_that_share_every_head_evenly(heads: Heads, ranks: int) -> None:
    check_ranks("--encode-tp", ranks, heads)


@pytest.mark.parametrize(
    ("heads", "ranks", "obstacle"),
    [
        (TINY, 4, "the 2 attention heads of its tower evenly; this model works with 1, 2"),
        (TINY, 3, "the 4 attention heads of its language model evenly"),
        (Heads(text=12, key_value=4), 6, "the 4 key-value heads of its language model evenly"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_those_that_do(
    heads: Heads, ranks: int, obstacle: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_ranks("--prefill-tp", ranks, heads)
    said = str(refused.value)
    assert said.startswith(f"--prefill-tp {ranks}: {ranks} ranks cannot share {obstacle}")


@pytest.mark.parametrize(
    ("content", "heads"),
    [
        (
            {
                "text_config": {"num_attention_heads": 4, "num_key_value_heads": 2},
                "vision_config": {"num_heads": 2},
            },
            TINY,
        ),
        (
            {
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vision_config": {"num_attention_heads": 2},
            },
            TINY,
        ),
        ({"text_config": {"num_attention_heads": "many"}}, Heads()),
        ({"vision_config": None}, Heads()),
    ],
)
def test_heads_are_read_where_models_name_them(
    content: object, heads: Heads, tmp_path: Path
) -> None:
    assert read_heads(config(tmp_path, content)) == heads


def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json holds no object"):
        read_heads(config(tmp_path, []))


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", str(MAX_RANKS + 1)])
def test_what_is_no_number_of_ranks_is_wrong_usage(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["demo", f"--prefill-tp={text}"])
    assert done.value.code == 2
    said = capsys.readouterr().err
    assert f"{text!r} is not a number of ranks: use a whole number from 1 to {MAX_RANKS}" in said


def test_an_unfit_size_ends_the_demo_before_an_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config(tmp_path, {"text_config": {"num_attention_heads": 4}})
    logs, written = tmp_path / "logs", tmp_path / "demo.json"
    arguments = ["--model", str(tmp_path), "--keep-logs", str(logs), "--json", str(written)]
    assert main(["demo", *arguments, "--encode-tp", "3"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "demo: FAIL --encode-tp 3: 3 ranks cannot share the 4 attention heads of its language "
        "model evenly; this model works with 1, 2, 4"
    )
    found = json.loads(written.read_text())
    assert (found["encode_tp"], found["prefill_tp"], found["pass"]) == (3, 1, False)
    assert not list(logs.glob("*"))


def test_only_the_connected_engines_are_spread_and_only_the_prefill_engine_shards() -> None:
    args = parsed("--model=m", "--encode-tp=2", "--prefill-tp=4", "--shard=always")
    monolithic, encode, prefill = engine_specs(Path("m"), args)
    assert monolithic.flags == ("--dtype=float32",)
    assert encode.flags == ("--dtype=float32", "--tensor-parallel-size=2")
    assert prefill.flags == ("--dtype=float32", "--tensor-parallel-size=4")
    sent, received = (spec.ec_transfer or {} for spec in (encode, prefill))
    assert "shard" not in json.dumps(sent)
    assert '"shard": "always"' in json.dumps(received)


def test_one_rank_an_engine_and_auto_are_the_defaults() -> None:
    args = parsed("--model=m")
    assert (args.encode_tp, args.prefill_tp, args.shard) == (1, 1, "auto")
    specs = engine_specs(Path("m"), args)
    assert {flag for spec in specs for flag in spec.flags} == {"--tensor-parallel-size=1"}
    assert not any(spec.env for spec in specs)


def test_the_built_model_gets_little_memory_in_every_engine() -> None:
    specs = engine_specs(Path("m"), parsed())
    assert all("--kv-cache-memory-bytes=134217728" in spec.flags for spec in specs)
    assert all("8MiB" in json.dumps(spec.ec_transfer) for spec in specs[1:])
