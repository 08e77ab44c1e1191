# SPDX-License-Identifier: Apache-2.0
"""Encode and prefill engines as a test drives them: it is the scheduler, the workers are children.

The prefill engine's head and scheduler's side are real and live in the test process; its ranks
are the processes of a ``Group``. An encode engine is a process of its own.
"""

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import RequestStatus

from epd_connector.core.admission import PrefillHead
from epd_connector.core.admission_state import TransferState
from epd_connector.hosts.vllm.head import HeadAdapter
from epd_connector.hosts.vllm.plan import StepPlan
from epd_connector.hosts.vllm.setup import make_head
from epd_connector.memory.segment import SHARED_DIRECTORY
from epd_connector.protocol.frames import Report
from epd_connector.runtime.report import fetch_report
from tests.group import encode_side, rank_side
from tests.group.child import Child, ChildError
from tests.group.encode_side import EncodeSide
from tests.group.host_config import HostConfig, host_config
from tests.group.material import Print, Rows, print_of
from tests.group.rank_side import RankSide, Seat, Step
from tests.unit.host_bench import Media, Request
from tests.unit.host_bench import Step as SchedulerOutput
from tests.unit.pair_bench import new_id, until

P = ParamSpec("P")
T = TypeVar("T")


class Group:
    """``ranks`` processes that form one tensor-parallel group of the host.

    ``shared_memory``: whether the host may gather through shared memory.
    """

    def __init__(self, ranks: int, rendezvous: Path, *, shared_memory: bool = True) -> None:
        name = secrets.token_hex(4)
        idents = [name if shared_memory else f"{name}{rank}" for rank in range(ranks)]
        self.ranks = [
            Child(f"rank {rank} of {ranks}", RankSide, Seat(rank, ranks, str(rendezvous), ident))
            for rank, ident in enumerate(idents)
        ]
        for child in self.ranks:
            child.end()
        # All have mapped them. The host leaves them behind when its processes are killed.
        for path in SHARED_DIRECTORY.glob(f"{name}*-cpushm_*"):
            path.unlink()

    def __len__(self) -> int:
        return len(self.ranks)

    def outcomes(
        self,
        function: Callable[Concatenate[RankSide, P], T],
        arguments: Sequence[tuple[object, ...]],
    ) -> list[T | ChildError]:
        """``function`` on all ranks at once, each with its arguments; what it gave or raised."""
        for child, own in zip(self.ranks, arguments, strict=True):
            child.begin(function, *own)  # type: ignore[call-arg, arg-type]
        outcomes: list[T | ChildError] = []
        for child in self.ranks:
            try:
                outcomes.append(child.end())  # type: ignore[arg-type]
            except ChildError as error:
                outcomes.append(error)
        return outcomes

    def all(
        self, function: Callable[Concatenate[RankSide, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """``function`` on all ranks at once. ChildError if one raised."""
        assert not kwargs
        results: list[T] = []
        for outcome in self.outcomes(function, [args] * len(self.ranks)):
            if isinstance(outcome, ChildError):
                raise outcome
            results.append(outcome)
        return results

    def leave(self) -> None:
        for child in self.ranks:
            child.leave()


class EncodeEngine:
    """An encode engine of ``ranks`` ranks in a process of its own."""

    def __init__(self, ranks: int, dtype: str = "bfloat16", **extra: object) -> None:
        host = host_config("ec_producer", ranks, secrets.token_hex(8), extra, dtype)
        self.child = Child(f"encode engine of {ranks}", EncodeSide, host)
        self.child.end()
        self.ranks = ranks
        self.address = self.child.call(encode_side.address)

    def claim(self, room: int, rows: Rows) -> None:
        self.child.call(encode_side.claim, room, rows)

    def encoded(self, *items: Rows, ranks: tuple[int, ...] | None = None) -> None:
        """The tower has run, on all ranks unless some are named."""
        on = tuple(range(self.ranks)) if ranks is None else ranks
        for rows in items:
            self.child.call(encode_side.encoded, rows, on)

    def bytes_written(self) -> int:
        return self.child.call(encode_side.bytes_written)

    def report(self) -> Report:
        return fetch_report(self.address, 30)

    def close(self) -> None:
        self.child.call(encode_side.close)
        self.child.leave()


@dataclass
class Asked:
    """A request of the test, with the room of each of its items."""

    request: Request
    rooms: list[int]
    items: list[Rows]

    @property
    def prints(self) -> dict[str, Print]:
        """What every rank must publish."""
        return {rows.hash: print_of(rows.tensor()) for rows in self.items}


@dataclass
class PrefillEngine:
    """A prefill engine over the ranks of ``group``. ``extra``: keys of its configuration;
    ``of_rank``: others, of single ranks."""

    group: Group
    dtype: str = "bfloat16"
    extra: dict[str, object] = field(default_factory=dict)
    of_rank: dict[int, dict[str, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._engine = secrets.token_hex(8)
        self._names = itertools.count()
        self._failures: Counter[str] = Counter()
        host = self.host({})
        self.head = make_head(host.read(), host)
        self.head.start()
        self.adapter = HeadAdapter(host.read(), self.head, Media(), "nobody:1")  # type: ignore[arg-type]
        hosts = [self.host(self.of_rank.get(rank, {})) for rank in range(len(self.group))]
        self.started = self.group.outcomes(rank_side.start, [(host,) for host in hosts])

    def host(self, extra: dict[str, object]) -> HostConfig:
        keys = {**self.extra, **extra}
        return host_config("ec_consumer", len(self.group), self._engine, keys, self.dtype)

    def up(self) -> "PrefillEngine":
        """Comes back when all ranks have started and the head knows."""
        assert self.started == [None] * len(self.group), self.started
        until(lambda: self.head.ranks_up() == len(self.group))
        return self

    # --- a request's life -------------------------------------------------------------

    def ask(self, encode: EncodeEngine, *items: Rows, claims: bool = True) -> Asked:
        """A request for ``items`` comes to both engines."""
        rooms = [new_id() for _ in items]
        features, offset = [], 0
        for rows in items:
            place = PlaceholderRange(offset, rows.rows)
            features.append(MultiModalFeatureSpec(None, rows.modality, rows.hash, place))
            offset += rows.rows
        tickets = [{"room": f"{room:016x}", "encode": encode.address} for room in rooms]
        request = Request(f"r{next(self._names)}", features, {"epd": tickets})
        for room, rows in zip(rooms, items, strict=True):
            if claims:
                encode.claim(room, rows)
        asked = Asked(request, rooms, list(items))
        self.runnable(asked)
        return asked

    def runnable(self, asked: Asked) -> bool:
        """What the scheduler does with a waiting request in every pass; notes failures."""
        runnable = self.adapter.ensure_cache_available(asked.request, 0)
        self._failures.update(self.adapter.take_unavailable_requests())
        return runnable

    def failures(self, asked: Asked) -> int:
        """How often the host was told that the request fails."""
        return self._failures[asked.request.request_id]

    def plan(self, asked: Asked) -> StepPlan:
        """The scheduling pass and the plan of the step that loads the request's items."""
        for index, feature in enumerate(asked.request.mm_features):
            assert self.adapter.has_cache_item(feature.identifier)
            self.adapter.update_state_after_alloc(asked.request, index)
        asked.request.status = RequestStatus.RUNNING
        return self.adapter.build_connector_meta(SchedulerOutput())

    def finish(self, asked: Asked) -> None:
        self.adapter.request_finished(asked.request)

    # --- shorter ----------------------------------------------------------------------

    def ready(self, asked: Asked) -> None:
        until(lambda: self.runnable(asked) or self.failures(asked) > 0)
        assert self.failures(asked) == 0, self.report().failures

    def failed(self, asked: Asked) -> None:
        """Comes back when the request has failed, which it does once. The log says why."""
        until(lambda: self.runnable(asked) or self.failures(asked) > 0)
        for _ in range(3):
            assert not self.runnable(asked)
        self.finish(asked)
        self._failures.update(self.adapter.take_unavailable_requests())
        assert self.failures(asked) == 1

    def loaded(self, asked: Asked) -> list[Step]:
        """The request's items are there: the step that publishes them, on every rank."""
        self.ready(asked)
        steps = self.group.all(rank_side.load, self.plan(asked))
        self.finish(asked)
        return steps

    def load(self, encode: EncodeEngine, *items: Rows) -> list[Step]:
        """Items the whole way, right on every rank."""
        asked = self.ask(encode, *items)
        encode.encoded(*items)
        steps = self.loaded(asked)
        for step in steps:
            assert step.published == asked.prints
        return steps

    # --- what is known ----------------------------------------------------------------

    def landed(self, room: int) -> set[int]:
        """Ranks that have their rows of ``room``."""
        transfer = self._prefill._desk.transfers.get(room)
        return set() if transfer is None else set(transfer.landed)

    def over(self, room: int) -> bool:
        """Whether ``room`` has ended and its region is free or held by an item."""
        return self._prefill.transfers().get(room) in (None, TransferState.READY)

    def settled(self) -> bool:
        """Whether no rank is receiving and no step is loading anything."""
        balance = self._prefill.balance()
        return balance.leased == balance.landed == 0

    @property
    def _prefill(self) -> PrefillHead:
        assert self.head._prefill is not None
        return self.head._prefill

    def report(self) -> Report:
        return fetch_report(self.head.control.removeprefix("tcp://"), 30)

    def close(self) -> None:
        self.group.all(rank_side.close)
        self.head.close(1)
