# SPDX-License-Identifier: Apache-2.0
"""`epd inspect`: what does a live engine look like, right now?

Owns how it is shown. Does not own what is in it (``protocol.state``), or asking
(``runtime.report``). Stops and changes nothing.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Mapping

import msgspec

from epd_connector.cli import asking
from epd_connector.core.send_pressure import Pressure
from epd_connector.protocol.state import (
    EngineState,
    PrefillState,
    ProcessState,
    RankState,
    ReceiveState,
    RequestState,
    SendState,
    SlabState,
    TransferState,
)

_WIDEST = 120
_ROWS = 20
"""Rows of one table on the page; JSON has all that the engine listed."""
_FAILURES = 8


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
    return "\n".join(_printable(line) for line in lines)


def _identity(state: EngineState) -> list[str]:
    up = f"{state.ranks_up} of {state.ranks_expected} ranks up"
    rows = []
    if state.encode is not None:
        widths = (f"{modality} {width}" for modality, width in sorted(state.encode.widths.items()))
        rows = [f"  gives rows   {_list(widths)} elements of {state.encode.dtype}"]
    if state.prefill is not None:
        unit, dtype = state.prefill.width_unit, state.prefill.dtype
        rows += [f"  takes rows   multiples of {unit} elements of {dtype}"]
    return [
        f"{state.role} at {state.address}, {up}, for {_span(state.uptime_s)}",
        f"  model        {state.fingerprint}",
        *rows,
        f"  version      {state.version}, protocol {state.protocol}",
        f"  incarnation  {state.incarnation}",
        f"  head         {_process(state.process)}",
    ]


def _failures(state: EngineState) -> list[str]:
    if not state.failures:
        return ["no failures"]
    lines = ["last failures, newest first"]
    for failure in reversed(state.failures[-_FAILURES:]):
        lines += _wrapped(f"  {_span(failure.age_s):>8} ago  ", failure.text)
    return lines


def _counters(counters: Mapping[str, float]) -> list[str]:
    counted = [f"{name} {count:.0f}" for name, count in counters.items() if count]
    return ["", "counted", *_wrapped("  ", ", ".join(counted) or "nothing yet")]


def _prefill(prefill: PrefillState) -> list[str]:
    transfers = [
        f"{t.room}  {t.state:<10} {_span(t.in_state_s):>8}  {_size(t.bytes):>10} {t.layout}"
        f" from {t.encode}{_landed(t)}"
        for t in prefill.transfers
    ]
    engines = [
        f"{e.address}  {e.state}{': ' if e.reason else ''}{e.reason}"
        for e in prefill.encode_engines
    ]
    return [
        "prefill head",
        f"  receive slab   {_slab(prefill.slab)}",
        f"  transfers      {_totals(prefill.transfer_totals)}",
        *_table(transfers, sum(prefill.transfer_totals.values())),
        f"  requests       {_totals(prefill.request_totals)}",
        *_table(map(_request, prefill.requests), sum(prefill.request_totals.values())),
        f"  encode engines {_totals(prefill.encode_engine_totals)},"
        f" skips not answered: {prefill.skips_unanswered}",
        *_table(engines, sum(prefill.encode_engine_totals.values())),
    ]


def _landed(transfer: TransferState) -> str:
    attempt = f", attempt {transfer.attempt + 1}" if transfer.attempt else ""
    return (f", landed on {_list(transfer.landed)}" if transfer.landed else "") + attempt


def _request(request: RequestState) -> str:
    more = request.waits - len(request.waits_for)
    waits = f"  for {_list(request.waits_for)}" if request.waits_for else ""
    others = f" and {more} more" if more else ""
    return f"{request.state:<8} {_span(request.in_state_s):>8}  {request.request}{waits}{others}"


def _rank(rank: RankState) -> list[str]:
    where = f" at {rank.endpoint}" if rank.endpoint else ""
    lines = [
        f"rank {rank.rank}{where}, transports: {_list(rank.transports)}",
        f"  incarnation    {rank.incarnation}",
        f"  process        {_process(rank.process)}",
    ]
    if rank.send is not None:
        lines += _send(rank.send)
    if rank.receive is not None:
        lines += _receive(rank.receive)
    return lines


def _send(send: SendState) -> list[str]:
    waiting = f", {_size(send.waiting_bytes)} wait for memory" if send.waiting_bytes else ""
    if send.lent_bytes:
        waiting += f", {_size(send.lent_bytes)} are lent"
    if send.pressure == Pressure.HIGH.value:
        waiting += ", requests are held back"
    rooms = [
        f"{r.room}  {r.state:<10} {_span(r.in_state_s):>8}  {r.rows} rows of {r.item or '?'}, "
        f"grants {r.grants}, answered {r.answered}, writing {r.writing}"
        for r in send.rooms
    ]
    peers = [
        f"rank {p.rank} of {p.ranks}, incarnation {p.incarnation}, heard {_span(p.heard_s)} ago, "
        f"open grants {p.open_grants}, writes {p.writing}"
        for p in send.peers
    ]
    return [
        f"  send slab      {_slab(send.slab)}",
        f"  copies         {send.copies}{waiting}",
        f"  writes         {send.writes} in flight",
        f"  rooms          {_totals(send.room_totals)}",
        *_table(rooms, sum(send.room_totals.values())),
        f"  prefill ranks  {send.peers_total}",
        *_table(peers, send.peers_total),
    ]


def _receive(receive: ReceiveState) -> list[str]:
    rooms = [
        f"{r.room}  {r.state:<11} {_span(r.in_state_s):>8}  {_size(r.bytes):>10} from {r.sender}"
        for r in receive.rooms
    ]
    peers = [
        f"{p.endpoint}  {'SILENT, ' if p.silent else ''}heard {_span(p.heard_s)} ago, "
        f"rooms {p.rooms}"
        for p in receive.peers
    ]
    return [
        f"  rooms          {_totals(receive.room_totals)}",
        *_table(rooms, sum(receive.room_totals.values())),
        f"  encode ranks   {receive.peers_total}",
        *_table(peers, receive.peers_total),
    ]


def _table(rows: Iterable[str], total: int) -> list[str]:
    """The first rows, cut to the page, and how many more there are."""
    shown = [f"    {row}"[:_WIDEST] for row in list(rows)[:_ROWS]]
    return [*shown, f"    ... {total - len(shown)} more"] if total > len(shown) else shown


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


def _wrapped(first: str, text: str) -> list[str]:
    """``text`` behind ``first``, in lines as wide as the page."""
    return textwrap.wrap(
        text, _WIDEST, initial_indent=first, subsequent_indent=" " * len(first)
    ) or [first]


def _printable(line: str) -> str:
    """Names that a client made up do not steer the terminal of whoever looks."""
    return "".join(c if c.isprintable() else "?" for c in line).rstrip()
