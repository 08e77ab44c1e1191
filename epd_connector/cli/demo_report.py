# SPDX-License-Identifier: Apache-2.0
"""What a demo found: the verdict, the table and the JSON.

Owns judging and showing. Starts nothing, measures nothing, prints nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from epd_connector.rows import Layout


@dataclass(frozen=True)
class Answer:
    """One way's greedy answer to one picture."""

    tokens: tuple[int, ...]
    ttft_s: float | None


@dataclass(frozen=True)
class Findings:
    """Everything the demo measured. Times in seconds, sizes in bytes."""

    transport: str
    encode_tp: int = 1
    prefill_tp: int = 1
    shard: str = "auto"
    """The setting that the prefill engine ran with."""
    layout: Layout = Layout.WHOLE
    """How the prefill engine received the measured request's items."""
    items: int = 0
    """Items of the measured request."""
    published: int = 0
    """Items that the prefill engine published for it."""
    monolithic: Answer | None = None
    epd: Answer | None = None
    other_monolithic: Answer | None = None
    """The answers to another picture under the same prompt."""
    other_epd: Answer | None = None
    embedding_bytes: int = 0
    """Size of the measured request's embeddings, each counted once."""
    sent_bytes: int = 0
    """What the encode engine sent of them, every copy counted."""
    encoded_to_landed_s: tuple[float, ...] = field(default=())
    """One for each item and encode rank that sent rows of it."""

    @property
    def senders(self) -> int:
        """Encode ranks that send rows of an item: no more than there are ranks to send to."""
        return min(self.encode_tp, self.prefill_tp)


def tokens_equal(found: Findings) -> bool:
    """Whether both ways gave the same tokens for the picture, and gave some."""
    if found.monolithic is None or found.epd is None or not found.epd.tokens:
        return False
    return found.monolithic.tokens == found.epd.tokens


def sent_over_embedding(found: Findings) -> float | None:
    """How often each byte of the embeddings was sent; None without embeddings."""
    return found.sent_bytes / found.embedding_bytes if found.embedding_bytes else None


def problems(found: Findings) -> list[str]:
    """Why the demo failed, one reason each; empty if it passed."""
    if found.epd is None or found.monolithic is None:
        return ["the picture was not answered both ways"]
    reasons = []
    if not tokens_equal(found):
        reasons.append("the tokens of the two ways differ")
    if not _others_agree(found):
        reasons.append("the tokens of the two ways differ for another picture")
    if found.other_epd is not None and found.other_epd.tokens == found.epd.tokens:
        reasons.append("another picture gives the same tokens, so the picture does not matter")
    if found.published != found.items:
        reasons.append(f"{found.items} items were sent but {found.published} published")
    due, landed = found.items * found.senders, len(found.encoded_to_landed_s)
    if landed != due:
        by = f" by {found.senders} encode ranks" if found.senders > 1 else ""
        reasons.append(f"{found.items} items were sent{by} but {landed} reported landed")
    if found.sent_bytes <= 0:
        reasons.append("no bytes were moved")
    copies = 1 if found.layout.sharded else found.prefill_tp
    if found.sent_bytes != copies * found.embedding_bytes:
        whole = f"{copies} {'copy' if copies == 1 else 'copies'} of {found.embedding_bytes} bytes"
        reasons.append(f"{found.sent_bytes} bytes were sent, not {whole}")
    return reasons


def _others_agree(found: Findings) -> bool:
    if found.other_epd is None or found.other_monolithic is None:
        return False
    return found.other_epd.tokens == found.other_monolithic.tokens


def as_json(found: Findings) -> dict[str, object]:
    """The machine-readable form; its keys are part of the command's interface."""
    return {
        "pass": not problems(found),
        "tokens_equal": tokens_equal(found),
        "items": found.items,
        "transport": found.transport,
        "encode_tp": found.encode_tp,
        "prefill_tp": found.prefill_tp,
        "shard": found.shard,
        "layout": found.layout,
        "embedding_bytes": found.embedding_bytes,
        "sent_bytes": found.sent_bytes,
        "sent_over_embedding": sent_over_embedding(found),
        "encoded_to_landed_s": list(found.encoded_to_landed_s),
        "ttft_monolithic_s": found.monolithic.ttft_s if found.monolithic else None,
        "ttft_epd_s": found.epd.ttft_s if found.epd else None,
    }


def table(found: Findings) -> str:
    """Both ways side by side, aligned, one fact a line."""
    one, two = found.monolithic, found.epd
    rows: list[tuple[str, str, str]] = [
        ("", "monolithic", "encode + prefill"),
        ("first tokens", _tokens(one), _tokens(two)),
        ("time to first token", _seconds(_ttft(one)), _seconds(_ttft(two))),
        ("tokens equal", "", _equal(found)),
        ("ranks", "1", f"{found.encode_tp} + {found.prefill_tp}"),
        ("items", "", f"{found.published} of {found.items} over {found.transport}"),
        ("layout", "", f"{found.layout} (shard {found.shard})"),
        ("embedding", "", _size(found.embedding_bytes)),
        ("bytes moved", "", _size(found.sent_bytes)),
        ("sent / embedding", "", _ratio(sent_over_embedding(found))),
        ("encoded to landed", "", ", ".join(map(_seconds, found.encoded_to_landed_s)) or "-"),
    ]
    return align(rows)


NOTE = "encoded to landed includes the wait until the prefill engine asks for the rows"
"""Below the table: on a busy machine that wait is most of it."""


def align(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows of cells as lines with columns two spaces apart, no spaces at the ends."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def verdict(reasons: Sequence[str], found: Findings) -> str:
    """The demo's last line: PASS, or FAIL with every reason."""
    if reasons:
        return f"demo: FAIL {'; '.join(reasons)}"
    count = len(found.epd.tokens) if found.epd else 0
    moved = f"{found.items} item{'' if found.items == 1 else 's'}"
    return f"demo: PASS {count} tokens equal, {moved} moved over {found.transport}"


def _ttft(answer: Answer | None) -> float | None:
    return answer.ttft_s if answer else None


def _tokens(answer: Answer | None, shown: int = 8) -> str:
    if answer is None or not answer.tokens:
        return "-"
    text = " ".join(map(str, answer.tokens[:shown]))
    return f"{text} …" if len(answer.tokens) > shown else text


def _equal(found: Findings) -> str:
    if tokens_equal(found):
        return f"yes, all {len(found.epd.tokens) if found.epd else 0}"
    if found.monolithic is None or found.epd is None:
        return "no"
    pairs = zip(found.monolithic.tokens, found.epd.tokens, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
    return "no" if same is None else f"no, from token {same + 1} on"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _size(count: int) -> str:
    if count < 1024:
        return f"{count} B"
    if count < 1024 * 1024:
        return f"{count / 1024:.1f} KiB"
    return f"{count / (1024 * 1024):.1f} MiB"
