# SPDX-License-Identifier: Apache-2.0
"""`epd demo`: a picture through two engines of this machine, compared with one engine alone.

Owns the options, the order of events and the end of the engines. What the findings mean is
`cli/demo_report.py`'s; how an engine is started is `testing/engines.py`'s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from epd_connector.cli.demo_engines import check_ranks, engine_specs, read_heads
from epd_connector.cli.demo_report import (
    NOTE,
    Answer,
    Findings,
    as_json,
    problems,
    table,
    verdict,
)
from epd_connector.config import Shard
from epd_connector.core.transfer_words import COUNTED
from epd_connector.errors import EPDError
from epd_connector.memory.segment import sweep_stale_segments
from epd_connector.protocol.frames import Report
from epd_connector.rows import Layout
from epd_connector.runtime.report import fetch_report
from epd_connector.testing import pictures
from epd_connector.testing.chat import ChatResult, item_parts, user_message
from epd_connector.testing.engines import (
    MAX_RANKS,
    EngineError,
    EngineProcess,
    run_pair,
    running,
    wait_until,
)

PROMPT = "What is in this picture?"
TOKENS = 32
START_TIMEOUT_S = 600.0
REQUEST_TIMEOUT_S = 300.0
REPORT_TIMEOUT_S = 5.0
SETTLE_S = 10.0
EXIT_INTERRUPTED = 130


class DemoError(EPDError):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True)
class Engines:
    """The running engines of one demo."""

    monolithic: EngineProcess
    encode: EngineProcess
    prefill: EngineProcess


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `epd demo`."""
    parser.add_argument(
        "--image",
        type=Path,
        metavar="FILE",
        help="the picture to send; default: one that comes with an installed package, or drawn",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="a vision-language model; default: a tiny one with random weights, made on the spot",
    )
    parser.add_argument(
        "--transport", choices=("shm", "mooncake"), default="shm", help="default: %(default)s"
    )
    for engine in ("encode", "prefill"):
        parser.add_argument(
            f"--{engine}-tp",
            type=_ranks,
            default=1,
            metavar="N",
            help=f"tensor-parallel ranks of the {engine} engine; default: %(default)s",
        )
    parser.add_argument(
        "--shard",
        choices=tuple(Shard),
        default=Shard.AUTO,
        help="whether the prefill engine's ranks each receive their own rows of an item (always), "
        "all rows (never), or what suits the machine (auto); default: %(default)s",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings here")
    parser.add_argument(
        "--keep-logs", type=Path, metavar="DIR", help="write the engines' logs here and keep them"
    )


def _ranks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_RANKS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of ranks: use a whole number from 1 to {MAX_RANKS}"
        )
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Run the demo, print its table and verdict; 0 if it passed, 1 if not, 130 if interrupted."""
    found = _nothing_yet(args)
    try:
        with _terminated_as_interrupted():
            found = demonstrate(args, _say)
    except KeyboardInterrupt:
        _say("demo: FAIL interrupted")
        return EXIT_INTERRUPTED
    except (EPDError, EngineError, OSError, ValueError) as error:
        reason, _, detail = str(error).partition("\n")
        if detail:
            _say(detail)
        return _finish(args, found, [reason or repr(error)])
    _say("")
    _say(table(found))
    _say(NOTE)
    return _finish(args, found, problems(found))


def _nothing_yet(args: argparse.Namespace) -> Findings:
    return Findings(
        transport=args.transport,
        encode_tp=args.encode_tp,
        prefill_tp=args.prefill_tp,
        shard=args.shard,
    )


def _finish(args: argparse.Namespace, found: Findings, reasons: list[str]) -> int:
    if args.json is not None:
        try:
            args.json.write_text(json.dumps(as_json(found), indent=2) + "\n")
        except OSError as error:
            reasons = [*reasons, f"cannot write {args.json}: {error.strerror}"]
    _say(verdict(reasons, found))
    return 1 if reasons else 0


def demonstrate(args: argparse.Namespace, say: Callable[[str], None]) -> Findings:
    """Start the engines, send the pictures both ways, stop the engines, return what was found.

    Raises DemoError, EngineError, OSError or ValueError; the engines are stopped then too.
    """
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epd-demo-")))
        source, picture, other = _pictures(args.image)
        say(f"picture: {source}")
        model = _model(args.model, scratch, say)
        heads = read_heads(model)
        check_ranks("--encode-tp", args.encode_tp, heads)
        check_ranks("--prefill-tp", args.prefill_tp, heads)
        logs = args.keep_logs or scratch / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        specs = engine_specs(model, args)
        # The host's server kills its workers, which then cannot remove their shared memory.
        stack.callback(sweep_stale_segments)
        started = running(specs, logs, timeout_s=START_TIMEOUT_S, progress=Progress(say))
        engines = Engines(*stack.enter_context(started))
        say("sending pictures both ways")
        return compare(engines, picture, other, _nothing_yet(args))


def compare(engines: Engines, picture: str, other: str, found: Findings) -> Findings:
    """The other picture first, which warms the engines up, then the picture; both in both ways."""
    found = replace(
        found, other_monolithic=_alone(engines, other), other_epd=_disaggregated(engines, other)
    )
    encode_before, prefill_before = _settled(engines, 1, found.senders)
    alone, apart = _alone(engines, picture), _disaggregated(engines, picture)
    encode, prefill = _settled(engines, 2, found.senders)
    return replace(
        found,
        monolithic=alone,
        epd=apart,
        items=len(item_parts(user_message(PROMPT, [picture]))),
        published=_grown(prefill_before, prefill, "items_published"),
        layout=_layout(prefill_before, prefill),
        embedding_bytes=_grown(prefill_before, prefill, "embedding_bytes"),
        sent_bytes=_grown(encode_before, encode, "bytes_sent"),
        encoded_to_landed_s=encode.encoded_to_landed_s[len(encode_before.encoded_to_landed_s) :],
    )


def _alone(engines: Engines, picture: str) -> Answer:
    engine = engines.monolithic
    result = engine.chat(
        user_message(PROMPT, [picture]),
        stream=True,
        timeout_s=REQUEST_TIMEOUT_S,
        max_tokens=TOKENS,
    )
    return _answer(engine, result)


def _disaggregated(engines: Engines, picture: str) -> Answer:
    result = run_pair(
        engines.encode,
        engines.prefill,
        user_message(PROMPT, [picture]),
        stream=True,
        fields={"max_tokens": TOKENS},
    )
    for encoded in result.encodes:
        _answer(engines.encode, encoded)
    return _answer(engines.prefill, result.prefill)


def _answer(engine: EngineProcess, result: ChatResult) -> Answer:
    """What the engine answered; DemoError with the tail of its log if it refused or failed."""
    if result.ok:
        return Answer(result.token_ids, result.ttft_s)
    reason = result.error or f"finish reason {result.finish_reason!r}"
    first = reason.splitlines()[0]
    raise DemoError(f"engine {engine.name} answered {result.status}: {first}\n{engine.log_tail()}")


def _settled(engines: Engines, items: int, senders: int) -> tuple[Report, Report]:
    """The reports of the encode and the prefill engine once both count `items` items.

    Each of the `senders` encode ranks counts an item that it sent rows of. Counts reach an
    engine's head a moment after its answer. Bounded: reports that stay behind are returned as
    they are, and judged.
    """
    encode = prefill = None

    def complete() -> bool:
        nonlocal encode, prefill
        encode = fetch_report(engines.encode.control_address, REPORT_TIMEOUT_S)
        prefill = fetch_report(engines.prefill.control_address, REPORT_TIMEOUT_S)
        published = prefill.counters.get("items_published", 0)
        return len(encode.encoded_to_landed_s) >= items * senders and published >= items

    wait_until(complete, SETTLE_S)
    assert encode is not None
    assert prefill is not None
    return encode, prefill


def _grown(before: Report, after: Report, counter: str) -> int:
    return int(after.counters.get(counter, 0) - before.counters.get(counter, 0))


def _layout(before: Report, after: Report) -> Layout:
    used = (layout for layout, counter in COUNTED.items() if _grown(before, after, counter))
    return next(used, Layout.WHOLE)


def _pictures(image: Path | None) -> tuple[str, str, str]:
    """Where the picture comes from, the picture, and another one; both as data URLs."""
    if image is None:
        source, picture = pictures.default_picture()
        return source, picture, pictures.noise_like(picture, seed=0)
    try:
        picture = pictures.file_url(image)
        return str(image), picture, pictures.noise_like(picture, seed=0)
    except FileNotFoundError as error:
        raise DemoError(f"--image {image}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise DemoError(
            f"--image {image}: not a picture that Pillow can read; use a .jpg or .png file"
        ) from error


def _model(model: Path | None, scratch: Path, say: Callable[[str], None]) -> Path:
    if model is not None:
        if not (model / "config.json").is_file():
            raise DemoError(f"{model} holds no model: config.json is missing")
        return model
    say("making a tiny DeepStack model with random weights")
    # Set before transformers is first imported: nothing here needs a network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from epd_connector.testing.tiny_models import ModelKind, build

    return build(ModelKind.QWEN3_VL, scratch / "model")


class Progress:
    """Says which engines are up: at each change, and every five seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: dict[str, bool] = {}
        self._next_s = 0.0

    def __call__(self, up: Mapping[str, bool], elapsed_s: float) -> None:
        if up == self._said and elapsed_s < self._next_s:
            return
        self._said, self._next_s = dict(up), elapsed_s + 5.0
        states = ", ".join(f"{name} {'up' if ready else 'starting'}" for name, ready in up.items())
        self._say(f"{elapsed_s:4.0f} s  {states}")


def _say(line: str) -> None:
    # Flushed: a pipe would otherwise hold the progress back until the end.
    print(line, flush=True)


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Within, SIGTERM ends the demo as Ctrl-C does: the engines are stopped first."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
