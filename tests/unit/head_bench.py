# SPDX-License-Identifier: Apache-2.0
"""A head's runtime on a bench: ranks, an encode engine and a tool over links in memory."""

from collections.abc import Iterable

from epd_connector.core import admission_state as admission
from epd_connector.core.admission import AdmissionSettings, PrefillHead
from epd_connector.core.admission_state import ItemSpec
from epd_connector.core.effects import RequestFailed
from epd_connector.core.encode_head import EncodeHead, EncodeHeadSettings
from epd_connector.core.topology import Expected
from epd_connector.errors import Failure
from epd_connector.link.base import PeerId
from epd_connector.protocol.codec import Codec
from epd_connector.protocol.frames import (
    AnyFrame,
    Envelope,
    HeadUp,
    Identify,
    Identity,
    Inspect,
    RankAddress,
    RankUp,
    Report,
    RoomsSkipped,
    SkipRooms,
)
from epd_connector.runtime.describing import HeadPlace
from epd_connector.runtime.head import HeadRuntime
from epd_connector.testing.memory_link import MemoryLink, MemoryNetwork

TOKEN = 77
HEAD = 5
LINK = "ipc://@head"
CONTROL = "tcp://here:1"
ENCODE = "encode:1"
CODEC = Codec()
IDENTITY = Identity(
    "model/a", "bfloat16", 2, {"image": 64}, (RankAddress("tcp://encode:2", 9, {"shm": "x"}),)
)


class Party:
    """Somebody on the network: a rank, an encode head or a tool."""

    def __init__(self, network: MemoryNetwork, incarnation: int, endpoint: str = "") -> None:
        self.link: MemoryLink = network.link()
        self.incarnation = incarnation
        self.peers: list[PeerId] = []
        if endpoint:
            self.link.listen(endpoint)

    def say(self, endpoint: str, addressee: int, frame: AnyFrame) -> None:
        payload = CODEC.encode(Envelope(self.incarnation, addressee, frame))
        assert self.link.send(self.link.connect(endpoint), payload)

    def answer(self, addressee: int, frame: AnyFrame) -> None:
        """To whoever spoke last."""
        assert self.link.send(
            self.peers[-1], CODEC.encode(Envelope(self.incarnation, addressee, frame))
        )

    def hears(self) -> list[AnyFrame]:
        heard = self.link.wait(0)
        self.peers += [peer for peer, _ in heard]
        return [f for _, payload in heard for f in CODEC.decode(payload).frames()]


class Bench:
    """A head with its parties. Nothing here starts a thread: ``turn`` is the loop's."""

    def __init__(
        self,
        *,
        ranks: int = 2,
        send_queue: int = 4096,
        encode: bool = False,
        prefill: bool = True,
        encode_locally: bool = False,
        runtime: type[HeadRuntime] = HeadRuntime,
    ) -> None:
        self.network = MemoryNetwork()
        self.link = self.network.link(send_queue=send_queue)
        for endpoint in (CONTROL, LINK):
            self.link.listen(endpoint)
        head = EncodeHead(EncodeHeadSettings(ranks, "model/a", "bfloat16", 2, {"image": 64}))
        expected = Expected("model/a", "bfloat16", 64)
        settings = AdmissionSettings(
            ranks=ranks,
            slab_nbytes=1 << 20,
            shares_slab=False,
            shard_min_bytes=None,
            receive_timeout_s=60.0,
            resolve_timeout_s=5.0,
            failed_peer_s=30.0,
            encode_locally=encode_locally,
            max_rooms=64,
            expected=expected,
        )
        self.prefill = PrefillHead(settings)
        self.head = runtime(
            HeadPlace("ec_both", "model/a", HEAD, TOKEN, ranks, CONTROL, LINK),
            self.link,
            CODEC,
            encode=head if encode else None,
            prefill=self.prefill if prefill else None,
        )
        self.ranks = [Party(self.network, 100 + rank) for rank in range(ranks)]
        self.encode = Party(self.network, 50, f"tcp://{ENCODE}")
        self.tool = Party(self.network, 60)
        self._failed: dict[str, Failure] = {}

    def turn(self) -> None:
        self.head._loop.turn()

    def ranks_up(self, ranks: Iterable[int] | None = None) -> None:
        for rank in range(len(self.ranks)) if ranks is None else ranks:
            self.rank_says(rank, RankUp(rank, f"tcp://here:{rank + 2}", {"shm": "x"}, 1 << 20))
            assert self.ranks[rank].hears() == [HeadUp()]

    def rank_says(self, rank: int, frame: AnyFrame) -> None:
        self.ranks[rank].say(LINK, TOKEN, frame)
        self.turn()

    def identified(self) -> None:
        """The encode engine is found, through an item that is not wanted any more."""
        self.needs("probe", room=1)
        self.turn()
        assert self.encode.hears() == [Identify("model/a")]
        self.encode.answer(HEAD, IDENTITY)
        self.head.tell(admission.Left("probe"))
        self.turn()
        assert self.encode.hears() == [SkipRooms((1,))]
        self.encode.answer(HEAD, RoomsSkipped((1,)))
        self.turn()

    def needs(self, request: str, room: int) -> None:
        item = ItemSpec(f"item-{room}", 4, "image", room, ENCODE)
        self.head.tell(admission.Joined(request, (item,)))
        self.head.tell(admission.Needed(request, (item.hash,)))

    def asked_again(self, request: str, room: int) -> None:
        """``request`` needs an item, and the encode engine says once more who it is."""
        self.needs(request, room)
        self.turn()
        self.encode.hears()
        self.encode.answer(HEAD, IDENTITY)
        self.turn()

    def failures(self) -> dict[str, Failure]:
        """Requests that have failed since the last call."""
        outcomes = self.head.outcomes()
        found = self._failed | {
            o.request: o.failure for o in outcomes if isinstance(o, RequestFailed)
        }
        self._failed = {}
        return found

    def failures_after_a_turn(self) -> dict[str, Failure]:
        """The same, and ``failures`` has them, too."""
        self.turn()
        self._failed = self.failures()
        return self._failed

    def report(self) -> Report:
        self.tool.say(CONTROL, 0, Inspect())
        self.turn()
        (report,) = self.tool.hears()
        assert isinstance(report, Report)
        return report


def rooms(frames: list[AnyFrame], kind: type[AnyFrame]) -> list[int]:
    return [frame.room for frame in frames if isinstance(frame, kind) and hasattr(frame, "room")]
