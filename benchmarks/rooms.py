# SPDX-License-Identifier: Apache-2.0
"""What a room costs the control plane, by how many are in flight and between how many peers.

    .venv/bin/python -m benchmarks.rooms

One encode engine and some prefill engines of one rank each, in two processes, which do
everything but stage and write. So many rooms are opened at once that wait for their rows,
then all rows come. Rooms are opened in rounds, so that every figure is of as many rooms.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bare import (
    AwaitGrants,
    AwaitReady,
    EncodeSide,
    Leave,
    Need,
    Offer,
    PrefillSide,
    TimeOne,
    Usage,
)
from benchmarks.figures import median, percentile
from benchmarks.processes import Peer, Processes, Up
from benchmarks.results import Goal, Measured, Series

IN_FLIGHT = (100, 1_000, 10_000)
PEERS = (1, 8, 64)
ROOMS = 10_000
PROBES = 200
FLAT, ROOM_US = 1.2, 100.0
"""Goals: the cost with many rooms over that with few, and microseconds of CPU per room."""


@dataclass(frozen=True, slots=True)
class RoomCost:
    """Per room: microseconds of CPU and bytes of memory on each side; milliseconds from the need
    of one more room, whose rows are there, until its request is ready."""

    in_flight: int
    peers: int
    encode_us: float
    prefill_us: float
    encode_nbytes: float
    prefill_nbytes: float
    answer_median_ms: float
    answer_p99_ms: float


class Pair:
    """Both processes, up."""

    def __init__(self, processes: Processes, peers: int) -> None:
        self.encode = processes.start(f"encode {peers}", EncodeSide)
        self.prefill = processes.start(f"prefill {peers}", PrefillSide, peers)
        self.address = self.encode.receive(Up).address
        self.prefill.receive(Up)
        self._next_room = 1

    def rooms(self, count: int) -> range:
        """Rooms that were never used."""
        begun, self._next_room = self._next_room, self._next_room + count
        return range(begun, self._next_room)

    def usage(self) -> tuple[Usage, Usage]:
        """Of the encode and of the prefill process."""
        return _used(self.encode), _used(self.prefill)

    def open(self, rooms: range) -> None:
        """``rooms`` are granted and wait for their rows."""
        self.prefill.ask(Need(rooms, self.address), type(None))
        self.encode.ask(AwaitGrants(len(rooms)), type(None))

    def finish(self, rooms: range) -> None:
        """Their rows come, all land, and their requests end."""
        self.encode.ask(Offer(rooms), type(None))
        self.prefill.ask(AwaitReady(), type(None))
        self.prefill.ask(Leave(), type(None))

    def probe(self) -> float:
        """Milliseconds that one more room takes."""
        (room,) = rooms = self.rooms(1)
        self.encode.ask(Offer(rooms), type(None))
        return 1e3 * self.prefill.ask(TimeOne(room, self.address), float)


def _used(peer: Peer) -> Usage:
    return peer.ask("usage", Usage)


def measure_rooms(pair: Pair, in_flight: int, peers: int) -> RoomCost:
    """The costs with ``in_flight`` rooms in flight at once."""
    pair.open(warm := pair.rooms(in_flight))
    pair.finish(warm)
    rounds = max(1, math.ceil(ROOMS / in_flight))
    before = pair.usage()
    for _ in range(rounds):
        pair.open(rooms := pair.rooms(in_flight))
        pair.finish(rooms)
    after = pair.usage()
    count = rounds * in_flight
    cpu_us = [1e6 * (b.cpu_s - a.cpu_s) / count for a, b in zip(before, after, strict=True)]
    before = pair.usage()
    pair.open(rooms := pair.rooms(in_flight))
    held = pair.usage()
    answers = [pair.probe() for _ in range(PROBES)]
    pair.finish(rooms)
    nbytes = [
        (b.resident_nbytes - a.resident_nbytes) / in_flight
        for a, b in zip(before, held, strict=True)
    ]
    return RoomCost(
        in_flight,
        peers,
        encode_us=cpu_us[0],
        prefill_us=cpu_us[1],
        encode_nbytes=nbytes[0],
        prefill_nbytes=nbytes[1],
        answer_median_ms=median(answers),
        answer_p99_ms=percentile(answers, 0.99),
    )


def table(costs: Sequence[RoomCost]) -> str:
    """For people: one line per cost."""
    lines = [
        f"{'in flight':>9}{'peers':>6}{'encode us':>11}{'prefill us':>12}"
        f"{'encode B':>10}{'prefill B':>11}{'answer ms':>11}{'p99 ms':>8}"
    ]
    lines += [
        f"{c.in_flight:>9}{c.peers:>6}{c.encode_us:>11.1f}{c.prefill_us:>12.1f}"
        f"{c.encode_nbytes:>10.0f}{c.prefill_nbytes:>11.0f}"
        f"{c.answer_median_ms:>11.2f}{c.answer_p99_ms:>8.2f}"
        for c in costs
    ]
    return "\n".join(lines)


def run(in_flight: Sequence[int], peers: Sequence[int]) -> list[RoomCost]:
    """The costs with each of ``in_flight`` rooms between two engines, and with ``peers``."""
    costs = []
    processes = Processes()
    try:
        for count in peers:
            pair = Pair(processes, count)
            for rooms in in_flight if count == 1 else [max(1_000, count)]:
                costs.append(measure_rooms(pair, rooms, count))
                print(f"{rooms} rooms, {count} peers", file=sys.stderr, flush=True)
    finally:
        processes.close()
    return costs


def measure(quick: bool) -> Measured:
    """Section `rooms`. See ``results``."""
    costs = run((100, 1_000) if quick else IN_FLIGHT, (1, 8) if quick else PEERS)
    return compare(costs)


def compare(costs: Sequence[RoomCost]) -> Measured:
    """Series of all ``costs``, and the goals: cheap, and as cheap with many as with few."""
    found = Measured()
    for cost in costs:
        name = f"{cost.in_flight} rooms, {cost.peers} peers"
        for what, unit, value in (
            ("CPU per room, encode", "us", cost.encode_us),
            ("CPU per room, prefill", "us", cost.prefill_us),
            ("memory per room, encode", "B", cost.encode_nbytes),
            ("memory per room, prefill", "B", cost.prefill_nbytes),
            ("answer, p99", "ms", cost.answer_p99_ms),
        ):
            found.series.append(Series("rooms", f"{name}: {what}", unit, (value,)))
    alone = sorted((c for c in costs if c.peers == 1), key=lambda cost: cost.in_flight)
    few, many = alone[0], alone[-1]
    for side in ("encode", "prefill"):
        least, most = (getattr(cost, f"{side}_us") for cost in (few, many))
        worst = max(getattr(cost, f"{side}_us") for cost in alone)
        name = f"{side} CPU per room, {many.in_flight} rooms over {few.in_flight}"
        found.goals.append(Goal(name, "x", FLAT, most / least))
        found.goals.append(Goal(f"{side} CPU per room, at most", "us", ROOM_US, worst))
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs the command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--in-flight", type=int, nargs="+", default=IN_FLIGHT, metavar="N")
    parser.add_argument("--peers", type=int, nargs="+", default=PEERS, metavar="N")
    options = parser.parse_args(arguments)
    print(table(run(options.in_flight, options.peers)))
    print(f"{os.cpu_count()} CPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
