# SPDX-License-Identifier: Apache-2.0
"""A scheduler's hands on a head adapter: short words for what a host does and is told."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.v1.request import RequestStatus

from epd_connector.config import Config, Role
from epd_connector.core import admission_state as admission
from epd_connector.core.admission_state import AdmissionEvent, RequestState
from epd_connector.errors import Code, Failure
from epd_connector.hosts.vllm.head import HeadAdapter
from epd_connector.hosts.vllm.plan import StepPlan
from epd_connector.protocol.frames import (
    Identify,
    Open,
    RoomFailed,
    RoomLanded,
    RoomLoaded,
    RoomsSkipped,
    SkipRooms,
)
from epd_connector.runtime.head import HeadRuntime
from tests.unit.head_bench import ENCODE, IDENTITY, Bench, rooms

ME = "here:1"
ROWS = 4
WAITING, RUNNING = RequestStatus.WAITING, RequestStatus.RUNNING


class CountingRuntime(HeadRuntime):
    """Counts what the scheduler's thread asks and says."""

    calls = 0

    def tell(self, event: AdmissionEvent) -> None:
        self.calls += 1
        super().tell(event)

    def ask(self, request: str) -> RequestState:
        self.calls += 1
        return super().ask(request)

    def holds(self, hash: str) -> bool:
        self.calls += 1
        return super().holds(hash)

    def encodes_locally(self, request: str, hash: str) -> bool:
        self.calls += 1
        return super().encodes_locally(request, hash)


class Media:
    """Items with data have pixels."""

    def encodable(self, feature: MultiModalFeatureSpec) -> bool:
        return feature.data is not None

    def describe(self, features: Sequence[MultiModalFeatureSpec]) -> dict[str, object]:
        return {feature.identifier: feature.modality for feature in features}


@dataclass
class Request:
    """What the adapter reads of the host's request."""

    request_id: str
    mm_features: list[MultiModalFeatureSpec]
    ec_transfer_params: object
    status: RequestStatus = WAITING


@dataclass
class Step:
    """What the adapter reads of the scheduler's output."""

    total_num_scheduled_tokens: int = 1
    free_encoder_mm_hashes: list[str] = field(default_factory=list)
    preempted_req_ids: set[str] | None = None


def feature(hash: str, index: int, *, pixels: bool = False) -> MultiModalFeatureSpec:
    data = MultiModalKwargsItem.dummy() if pixels else None
    return MultiModalFeatureSpec(data, "image", hash, PlaceholderRange(index * 10, ROWS))


def tickets(*numbers: int | None, encode: str = ENCODE) -> dict[str, object]:
    entries = [n and {"room": f"{n:016x}", "encode": encode} for n in numbers]
    return {"epd": entries}


def request(name: str, hashes: str, params: object = None, *, pixels: bool = False) -> Request:
    """One letter of ``hashes`` is one item, at positions 0..3, 10..13, 20..23 and so on."""
    features = [feature(hash, index, pixels=pixels) for index, hash in enumerate(hashes)]
    return Request(name, features, params)


class Host:
    """A scheduler's hands: one adapter over a head whose loop the test turns."""

    def __init__(self, role: Role = Role.CONSUMER, *, encode_locally: bool = False) -> None:
        self.bench = Bench(
            ranks=1,
            encode=role.sends,
            prefill=role.receives,
            encode_locally=encode_locally,
            runtime=CountingRuntime,
        )
        self.runtime = self.bench.head
        assert isinstance(self.runtime, CountingRuntime)
        config = Config.from_extra({}, role=role, default_host="here", default_port=1)
        self.adapter = HeadAdapter(config, self.runtime, Media(), ME)  # type: ignore[arg-type]
        self.bench.ranks_up()

    def available(self, request: Request, computed: int = 0) -> bool:
        return self.adapter.ensure_cache_available(request, computed)

    def allocate(self, request: Request, index: int) -> None:
        self.adapter.update_state_after_alloc(request, index)

    def free(self, request: Request, index: int) -> None:
        self.adapter.update_state_after_free(request, index)

    def finish(self, request: Request) -> dict[str, object] | None:
        return self.adapter.request_finished(request)

    def step(self, **step: object) -> StepPlan:
        made = Step(**step)  # type: ignore[arg-type]
        return self.adapter.build_connector_meta(made)

    def runs(self, request: Request, *indices: int) -> StepPlan:
        """The request is scheduled: its items are loaded or encoded, and a step is built."""
        for index in indices:
            self.adapter.has_cache_item(request.mm_features[index].identifier)
            self.allocate(request, index)
        request.status = RUNNING
        plan = self.step()
        for load in plan.loads:
            self.runtime.tell(admission.FromRank(0, RoomLoaded(load.room)))
        return plan

    def land(self, *numbers: int) -> None:
        """The encode engine is known and these rooms land."""
        self.runtime.tell(admission.FromEncodeHead(ENCODE, IDENTITY))
        self.bench.turn()
        for number in numbers:
            self.runtime.tell(admission.FromRank(0, RoomLanded(number, 1)))

    def lose(self, room: int) -> None:
        failure = Failure(Code.ENCODE_FAILED, "the tower is broken")
        self.runtime.tell(admission.FromRank(0, RoomFailed(room, failure)))

    def opened(self) -> list[int]:
        self.bench.turn()
        return rooms(self.bench.ranks[0].hears(), Open)

    def skipped(self) -> list[int]:
        """Rooms that the encode engine is told to skip, which it answers."""
        self.bench.turn()
        said = [frame for frame in self.bench.encode.hears() if not isinstance(frame, Identify)]
        skipped = [room for frame in said if isinstance(frame, SkipRooms) for room in frame.rooms]
        self.runtime.tell(admission.FromEncodeHead(ENCODE, RoomsSkipped(tuple(skipped))))
        return skipped

    def calls(self) -> int:
        assert isinstance(self.runtime, CountingRuntime)
        return self.runtime.calls
