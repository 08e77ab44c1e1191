# SPDX-License-Identifier: Apache-2.0
"""`epd inspect`: what does a live engine look like, right now?

Owns how it is shown. Does not own what is in it (``protocol.state``), or asking
(``runtime.report``). Stops and changes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping

import msgspec

from epd_connector.cli import asking
from epd_connector.protocol.state import (
    EngineState,
    PrefillState,
    ProcessState,
    RankState,
    ReceiveState,
    SendState,
    SlabState,
)

_WIDEST = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `epd inspect`."""
    asking.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Ask, print. Raises LinkError or ProtocolError where there is no answer."""
    from epd_connector.runtime.report import fetch_state

    state = fetch_state(args.address, args.timeout, asking.key_of(args))
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(state)).decode())
    else:
        print(as_text(state))
    return 0


def as_text(state: EngineState) -> str:
    """A page for a terminal."""
    lines = [*_identity(state), "", *_failures(state), *_counters(state.counters)]
    if state.prefill is not None:
        lines += ["", *_prefill(state.prefill)]
    for rank in state.ranks:
        lines += ["", *_rank(rank)]
    if state.silent_ranks:
        lines += ["", f"ranks that did not answer: {_list(state.silent_ranks)}"]
    return "\n".join(line[:_WIDEST].rstrip() for line in lines)


def _identity(state: EngineState) -> list[str]:
    up = f"{state.ranks_up} of {state.ranks_expected} ranks up"
    return [
        f"{state.role} at {state.address}, {up}, for {_span(state.uptime_s)}",
        f"  model        {state.fingerprint}",
        f"  version      {state.version}, protocol {state.protocol}",
        f"  incarnation  {state.incarnation}",
        f"  head         {_process(state.process)}",
    ]


def _failures(state: EngineState) -> list[str]:
    if not state.failures:
        return ["no failures"]
    lines = ["last failures, newest first"]
    lines += [f"  {_span(f.age_s):>8} ago  {f.text}" for f in reversed(state.failures[-8:])]
    return lines


def _counters(counters: Mapping[str, float]) -> list[str]:
    counted = [f"{name} {count:.0f}" for name, count in counters.items() if count]
    return ["", "counted", *_wrapped(counted or ["nothing yet"])]


def _prefill(prefill: PrefillState) -> list[str]:
    lines = [
        "prefill head",
        f"  receive slab  {_slab(prefill.slab)}",
        f"  transfers     {_totals(prefill.transfer_totals)}",
    ]
    for t in prefill.transfers:
        landed = f", landed on {_list(t.landed)}" if t.landed else ""
        lines.append(
            f"    {t.room}  {t.state:<10} {_span(t.in_state_s):>8}  {_size(t.bytes):>10} {t.layout}"
            f" from {t.encode}{landed}"
        )
    lines.append(f"  requests      {_totals(prefill.request_totals)}")
    for r in prefill.requests:
        waits = f" for {_list(r.waits_for)}" if r.waits_for else ""
        lines.append(f"    {r.request}  {r.state}{waits}")
    lines.append(f"  encode engines, skips not answered: {prefill.skips_unanswered}")
    lines += [f"    {a.address}  {a.state}" for a in prefill.encode_engines]
    return lines


def _rank(rank: RankState) -> list[str]:
    where = f" at {rank.endpoint}" if rank.endpoint else ""
    lines = [
        f"rank {rank.rank}{where}, transports: {_list(rank.transports)}",
        f"  incarnation   {rank.incarnation}",
        f"  process       {_process(rank.process)}",
    ]
    if rank.send is not None:
        lines += _send(rank.send)
    if rank.receive is not None:
        lines += _receive(rank.receive)
    return lines


def _send(send: SendState) -> list[str]:
    waiting = f", {_size(send.waiting_bytes)} wait for memory" if send.waiting_bytes else ""
    lines = [
        f"  send slab     {_slab(send.slab)}",
        f"  copies        {send.copies}{waiting}",
        f"  rooms         {_totals(send.room_totals)}",
    ]
    lines += [
        f"    {r.room}  {r.state:<10} {_span(r.age_s):>8}  {r.rows} rows of {r.item or '?'}, "
        f"grants: {r.grants}, answered {r.answered}, being written {r.writing}"
        for r in send.rooms
    ]
    lines.append(f"  prefill ranks {send.peers_total}")
    lines += [
        f"    rank {p.rank} of {p.ranks}  heard {_span(p.heard_s)} ago, "
        f"open grants {p.open_grants}, writes {p.writing}"
        for p in send.peers
    ]
    return lines


def _receive(receive: ReceiveState) -> list[str]:
    lines = [f"  rooms         {_totals(receive.room_totals)}"]
    lines += [
        f"    {r.room}  {r.state:<10} {_span(r.age_s):>8}  {_size(r.bytes):>10} from {r.sender}"
        for r in receive.rooms
    ]
    lines.append(f"  encode ranks  {receive.peers_total}")
    lines += [
        f"    {p.endpoint}  {'SILENT, ' if p.silent else ''}heard {_span(p.heard_s)} ago, "
        f"rooms {p.rooms}"
        for p in receive.peers
    ]
    return lines


def _slab(slab: SlabState) -> str:
    used = {
        "free": slab.free,
        "leased": slab.leased,
        "landed": slab.landed,
        "resident": slab.resident,
        "QUARANTINED": slab.quarantined,
    }
    parts = [f"{_size(nbytes)} {what}" for what, nbytes in used.items() if nbytes]
    return f"{_size(slab.capacity)}: {', '.join(parts)}"


def _process(process: ProcessState) -> str:
    memory = _size(process.resident_bytes)
    return (
        f"pid {process.pid}, {process.threads} threads, {process.descriptors} descriptors, {memory}"
    )


def _totals(totals: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(totals.items())) or "none"


def _list(values: Iterable[object]) -> str:
    return ", ".join(str(value) for value in values) or "none"


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, bigger
    return f"{size:.0f} {unit}" if size == int(size) else f"{size:.1f} {unit}"


def _span(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}" if hours else f"{minutes} min {seconds:02} s"


def _wrapped(words: list[str]) -> list[str]:
    lines, line = [], " "
    for word in words:
        if len(line) + len(word) + 2 > _WIDEST and line.strip():
            lines.append(line)
            line = " "
        line += f" {word},"
    return [*lines, line.rstrip(",")]
