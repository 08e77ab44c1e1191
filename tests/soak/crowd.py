# SPDX-License-Identifier: Apache-2.0
"""Very many clients at once, some of which go away, and what engines hold that must not grow.

Owns the clients, and what is counted from outside. Judges nothing.
"""

import random
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from epd_connector.protocol.state import EngineState
from epd_connector.runtime.report import fetch_state
from epd_connector.testing.chat import ChatResult, Message, user_message
from epd_connector.testing.engines import EngineProcess, epd_params, mint_room
from epd_connector.testing.pictures import random_picture
from epd_connector.testing.processes import group_members
from tests.engine.trouble import BOUND_S

MAX_TOKENS = 4
SPARE_BYTES = 64 << 20
LATER_S = 10.0


@dataclass(frozen=True)
class Client:
    """One request through two engines. A client that goes away closes its connections so many
    seconds after it has sent its requests; None: it waits for the answer."""

    number: int
    messages: Sequence[Message]
    leaves_encode_s: float | None = None
    leaves_prefill_s: float | None = None

    @property
    def stays(self) -> bool:
        return self.leaves_encode_s is None and self.leaves_prefill_s is None


def clients(numbers: Iterable[int], size: tuple[int, int]) -> list[Client]:
    """Clients with a picture of their own each, of whom none goes away."""
    return [
        Client(number, user_message(f"Number {number}.", [random_picture(*size, seed=number)]))
        for number in numbers
    ]


def fickle(crowd: Sequence[Client], seed: int, longest_s: float) -> list[Client]:
    """The same clients; a third of them goes away, by ``seed``, within ``longest_s`` seconds.

    From both engines at once, from the prefill engine later, or from that alone.
    """
    dice = random.Random(seed)
    leaving = set(dice.sample(range(len(crowd)), len(crowd) // 3))
    found = []
    for place, client in enumerate(crowd):
        if place not in leaving:
            found.append(client)
            continue
        moment = dice.uniform(0.001, longest_s)
        from_encode, from_prefill = dice.choice(
            [(moment, moment), (moment, moment + LATER_S), (None, moment)]
        )
        found.append(Client(client.number, client.messages, from_encode, from_prefill))
    return found


class Router:
    """Sends the requests of many clients to two engines, each by itself."""

    def __init__(self, encode: EngineProcess, prefill: EngineProcess, at_once: int) -> None:
        self._encode = encode
        self._prefill = prefill
        self._at_once = at_once

    def send(self, crowd: Sequence[Client]) -> dict[int, ChatResult | None]:
        """Every client's prefill answer by number, None for one that has gone away."""
        with ThreadPoolExecutor(self._at_once) as pool, ThreadPoolExecutor(self._at_once) as other:
            answers = pool.map(partial(self._attempt, other), crowd)
            return {client.number: found for client, found in zip(crowd, answers, strict=True)}

    def _attempt(self, other: ThreadPoolExecutor, client: Client) -> ChatResult | None:
        params = epd_params([(mint_room(), self._encode.control_address)])

        def to(engine: EngineProcess, tokens: int, leaves_s: float | None) -> ChatResult | None:
            try:
                return engine.chat(
                    client.messages,
                    max_tokens=tokens,
                    timeout_s=leaves_s or 5 * BOUND_S,
                    ec_transfer_params=params,
                )
            except OSError:
                if leaves_s is None:
                    raise
                return None

        encoded = other.submit(to, self._encode, 1, client.leaves_encode_s)
        answer = to(self._prefill, MAX_TOKENS, client.leaves_prefill_s)
        encoded.result()
        return answer


@dataclass(frozen=True)
class Holdings:
    """What the processes of some engines have, by name of the process."""

    descriptors: dict[str, int]
    threads: dict[str, int]
    resident: dict[str, int]
    shared_memory: frozenset[str]

    @classmethod
    def of(cls, engines: Sequence[EngineProcess]) -> "Holdings":
        found: dict[str, Path] = {}
        for engine in engines:
            for pid in sorted(group_members(engine.pid)):
                found[f"{engine.name} {pid}"] = Path(f"/proc/{pid}")
        return cls(
            {name: len(list((at / "fd").iterdir())) for name, at in found.items()},
            {name: len(list((at / "task").iterdir())) for name, at in found.items()},
            {name: _resident_bytes(at) for name, at in found.items()},
            frozenset(entry.name for entry in Path("/dev/shm").iterdir()),
        )

    def beyond(self, before: "Holdings") -> dict[str, object]:
        """What is more than it was, by whose it is; empty if nothing is.

        Memory may be a little more: allocators keep what they once had.
        """
        found: dict[str, object] = {
            f"{what} of {name}": (had.get(name, 0), number)
            for what, had, now, spare in (
                ("descriptors", before.descriptors, self.descriptors, 0),
                ("threads", before.threads, self.threads, 0),
                ("memory", before.resident, self.resident, SPARE_BYTES),
            )
            for name, number in now.items()
            if number > had.get(name, 0) + spare
        }
        segments = self.shared_memory - before.shared_memory
        return {**found, "shared memory": segments} if segments else found


def _resident_bytes(process: Path) -> int:
    for line in (process / "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def left_over(engine: EngineProcess) -> dict[str, object]:
    """What an engine without requests must not have: by what it is, empty if all is well."""
    state = fetch_state(engine.control_address, 30.0)
    found = {**_of_the_head(state), **_of_the_ranks(state)}
    return {name: value for name, value in found.items() if value}


def requests(prefill: EngineProcess) -> dict[str, int]:
    """Requests that a prefill engine's head knows, by state."""
    state = fetch_state(prefill.control_address, 30.0).prefill
    assert state is not None
    return {name: number for name, number in state.request_totals.items() if number}


def _of_the_head(state: EngineState) -> dict[str, object]:
    found: dict[str, object] = {
        "errors": state.counters["errors_internal"],
        "silent ranks": state.silent_ranks,
        "ranks down": state.ranks_expected - state.ranks_up,
    }
    if state.prefill is not None:
        found["requests"] = {n: c for n, c in state.prefill.request_totals.items() if c}
        found["skips"] = state.prefill.skips_unanswered
        found["transfers"] = {
            name: number
            for name, number in state.prefill.transfer_totals.items()
            if name != "ready" and number
        }
        slab = state.prefill.slab
        found["bytes"] = slab.capacity - slab.free - slab.resident
    return found


def _of_the_ranks(state: EngineState) -> dict[str, object]:
    found: dict[str, object] = {}
    for rank in state.ranks:
        if rank.send is not None:
            send = rank.send
            found["rooms to send"] = {n: c for n, c in send.room_totals.items() if c}
            found["copies"] = send.copies
            found["rows that wait"] = send.waiting_bytes
            found["rows that are lent"] = send.lent_bytes
            found["bytes to send"] = send.slab.capacity - send.slab.free
        if rank.receive is not None:
            found["rooms to receive"] = {n: c for n, c in rank.receive.room_totals.items() if c}
    return found
