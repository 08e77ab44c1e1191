# SPDX-License-Identifier: Apache-2.0
"""What runs in an encode engine's process: its head and all of its ranks, each with its loop.

Functions on ``EncodeSide`` are called by the test process.
"""

import torch

from epd_connector.core.encode_head import RequestOver
from epd_connector.core.send_events import Claim, Encoded
from epd_connector.errors import Code, Failure
from epd_connector.hosts.vllm.setup import RankParts, make_head, make_rank
from tests.group.gated_link import GatedLink, Kinds, use_gated_links
from tests.group.host_config import HostConfig
from tests.group.material import Rows
from tests.unit.pair_bench import until


class EncodeSide:
    """An encode engine, up."""

    def __init__(self, host: HostConfig) -> None:
        torch.set_num_threads(1)
        use_gated_links()
        self._host = host
        self.begin()

    def begin(self) -> None:
        """The engine starts; once more, where it was closed."""
        host = self._host
        config = host.read()
        ranks = host.parallel_config.tensor_parallel_size
        self.head = make_head(config, host)
        self.head.start()
        self.ranks: list[RankParts] = []
        for rank in range(ranks):
            parts = make_rank(config, host, rank, torch.device("cpu"))
            parts.runtime.start()
            self.ranks.append(parts)
        until(lambda: self.head.ranks_up() == ranks)


def address(side: EncodeSide) -> str:
    return side.head.control.removeprefix("tcp://")


def claim(side: EncodeSide, room: int, rows: Rows) -> None:
    """A request claims ``room`` on every rank, as the host's workers are told in a step."""
    for parts in side.ranks:
        assert parts.runtime.post(Claim(room, rows.hash, rows.rows))


def encoded(side: EncodeSide, rows: Rows, ranks: tuple[int, ...]) -> None:
    """The tower has run on these ranks; each has all rows."""
    for parts in (side.ranks[rank] for rank in ranks):
        assert parts.rows is not None
        token = parts.rows.hold(rows.tensor())
        event = Encoded(rows.hash, token, rows.rows, rows.width, rows.dtype, rows.nbytes)
        assert parts.runtime.post(event)


def over(side: EncodeSide, room: int) -> None:
    """The request that claimed ``room`` is over: a rank that has no rows for it gets none."""
    failure = Failure(Code.ENCODE_FAILED, "the tower broke down")
    side.head.tell_encode(RequestOver((room,), failure))


def bytes_written(side: EncodeSide) -> int:
    """By all ranks over all transports."""
    transports = [t for parts in side.ranks for t in parts.transports.values()]
    return sum(transport.bytes_written() for transport in transports)


def grants(side: EncodeSide, room: int) -> int:
    """How many prefill ranks have asked for ``room``."""
    asked = 0
    for parts in side.ranks:
        sender = parts.runtime._sender
        assert sender is not None
        held = sender._rooms.find(room)
        asked += 0 if held is None else len(held.grants)
    return asked


def _links(side: EncodeSide) -> list[GatedLink]:
    links = [parts.runtime._link for parts in side.ranks]
    assert all(isinstance(link, GatedLink) for link in links)
    return links  # type: ignore[return-value]


def hold(side: EncodeSide, kinds: Kinds) -> None:
    """What the ranks say is held back from now on."""
    for link in _links(side):
        link.gate(held=kinds)


def held_back(side: EncodeSide) -> int:
    return sum(link.held_back() for link in _links(side))


def close(side: EncodeSide) -> None:
    for parts in side.ranks:
        parts.runtime.close(3)
        parts.free()
    side.head.close(3)
