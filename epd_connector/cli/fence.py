# SPDX-License-Identifier: Apache-2.0
"""`epd fence`: somebody who knows tells a prefill engine that a host is dead.

Owns the options, the warning, and what is said of the outcome. Does not own what follows
(``core.receive``).
"""

from __future__ import annotations

import argparse

from epd_connector.cli import asking
from epd_connector.core.receive_senders import host_of
from epd_connector.errors import EPDError
from epd_connector.protocol.state import EngineState, SenderState

_MEANING = (
    "The prefill engine keeps memory for writers that are silent for as long as they might "
    "write again. Of a host that vanished, and at whose address nobody answers, only you can "
    "know that it never will: switched off, deleted, or cut off for good. That memory is then "
    "free again after the transport's fence. If HOST is alive after all, what it still writes "
    "lands in memory of other requests, and corrupts them."
)


class FenceError(EPDError):
    """There is nothing to fence; the message says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `epd fence`."""
    parser.description = _MEANING
    asking.add_arguments(parser)
    parser.add_argument(
        "--dead",
        required=True,
        metavar="HOST",
        help="the host as the prefill engine knows it (`epd inspect` shows encode ranks as"
        " tcp://HOST:PORT)",
    )


def run(args: argparse.Namespace) -> int:
    """Look, tell, print. Raises LinkError where nobody answers, FenceError where it would do
    nothing."""
    from epd_connector.runtime.report import declare_dead, fetch_state

    key = asking.key_of(args)
    host = args.dead.removeprefix("[").removesuffix("]")
    state = fetch_state(args.address, args.timeout, key)
    found = _writers(state, host)
    declare_dead(args.address, host, args.timeout, key)
    rooms = sum(writer.rooms for writer in found)
    print(
        f"{args.address} has told its ranks that {host} is dead: {len(found)} connection(s) to"
        f" encode ranks there, {rooms} room(s); what was kept for them is free after the fence"
        f" (see `epd inspect {args.address}`)"
    )
    return 0


def _writers(state: EngineState, host: str) -> list[SenderState]:
    """Who is known on ``host``, by all ranks that answered. FenceError where nobody can be."""
    if state.prefill is None:
        raise FenceError(
            f"{state.address} is an encode engine ({state.role}), whose memory nobody writes to: "
            "name the control address of a prefill engine"
        )
    halves = [rank.receive for rank in state.ranks if rank.receive is not None]
    writers = [writer for half in halves for writer in half.peers]
    found = [writer for writer in writers if host_of(writer.endpoint) == host]
    whole = not state.silent_ranks and all(len(h.peers) == h.peers_total for h in halves)
    if whole and not found:
        hosts = ", ".join(sorted({host_of(writer.endpoint) for writer in writers})) or "none"
        raise FenceError(
            f"{state.address} knows no encode rank on {host}, so it keeps nothing for one; "
            f"hosts of those that it knows: {hosts}"
        )
    return found
