# SPDX-License-Identifier: Apache-2.0
"""One request as the scheduler of a prefill engine knows it, from its arrival to its one end."""

import enum
import re
from dataclasses import dataclass, field

from epd_connector.core.admission import PAUSE_S
from epd_connector.core.admission_state import ItemSpec
from epd_connector.errors import Failure
from tests.sim.heads import RECEIVE_TIMEOUT_S
from tests.sim.invariants import DeadlinesAreKept, RequestsEndOnce
from tests.sim.timeline import TIMER_LATE_S

_NAMES_SOMETHING = re.compile(r"\d|engine")


class End(enum.Enum):
    """How a request ended."""

    LOADED = "loaded"
    FAILED = "failed"
    ABORTED = "aborted"
    KILLED = "killed"  # with its engine


@dataclass(slots=True, eq=False)
class Job:
    """One request.

    ``pending``: hashes whose tokens are not computed yet; ``refers``: to these cache entries;
    ``loads``: loads under way, by hash; ``turn``: of the life that it has after a preemption.
    ``ticketed``, ``needed``, ``unspared``: as in ``hosts.vllm.requests.Entry``. ``waited``:
    seconds that its deadline has counted.
    """

    request: str
    items: tuple[ItemSpec, ...]
    joined: bool = False
    turn: int = 0
    computed_all: bool = False
    loads: dict[str, int] = field(default_factory=dict)
    refers: set[str] = field(default_factory=set)
    local: set[str] = field(default_factory=set)
    ticketed: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)
    spared: set[str] = field(default_factory=set)
    unspared: set[str] = field(default_factory=set)
    waited: float = 0.0
    asked: tuple[float, float] | None = None
    failure: Failure | None = None
    end: End | None = None
    pending: dict[str, None] = field(init=False)
    specs: dict[str, ItemSpec] = field(init=False)

    def __post_init__(self) -> None:
        self.specs = {spec.hash: spec for spec in self.items}
        self.pending = dict.fromkeys(self.specs)
        self.unspared = set(self.specs)
        self.ticketed = {spec.hash for spec in self.items if spec.room is not None}

    def ends(self, end: End) -> None:
        RequestsEndOnce.hold(self.end is None, lambda: f"{self.request} was {self.end}, now {end}")
        RequestsEndOnce.hold(
            end is not End.LOADED or not self.pending, lambda: f"{self.request} lacks items"
        )
        self.end = end

    def fails(self, failure: Failure) -> None:
        RequestsEndOnce.hold(self.failure is None, lambda: f"{self.request} failed twice")
        RequestsEndOnce.hold(
            _NAMES_SOMETHING.search(failure.reason),
            lambda: f"{self.request} failed and nobody knows why: {failure}",
        )
        self.failure = failure

    def waits(self, now: float, clock: float) -> None:
        """It was asked for at ``now``, of which its process could run until ``clock``."""
        if self.asked is not None and now - self.asked[0] <= PAUSE_S:
            self.waited += clock - self.asked[1]
        self.asked = (now, clock)
        DeadlinesAreKept.hold(
            self.waited <= RECEIVE_TIMEOUT_S + TIMER_LATE_S,
            lambda: f"{self.request} has waited for {self.waited} s",
        )

    def waits_no_more(self) -> None:
        self.waited, self.asked = 0.0, None

    def starts_over(self) -> None:
        """Preempted: whatever was computed is lost, but for what the prefix cache has for good."""
        self.turn += 1
        self.computed_all = False
        self.refers.clear()
        self.pending = {hash: None for hash in self.specs if hash not in self.spared}
