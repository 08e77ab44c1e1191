# SPDX-License-Identifier: Apache-2.0
"""What one engine step carries from the head to the ranks, through the host's metadata.

Only what belongs to a step travels here: which items the step's requests claim and which
received items it loads. Everything else goes over the head-rank link. Pickled by the host.
"""

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from epd_connector.rows import Layout


@dataclass(frozen=True, slots=True)
class ClaimSpec:
    """Encode side: a scheduled request claims ``room`` for item ``hash`` of ``rows`` rows."""

    room: int
    hash: str
    rows: int


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Prefill side: put item ``hash``, ``[rows, width]`` of ``dtype``, into the encoder cache.

    Its region is at ``offset`` of every rank's receive slab; ``layout`` says what is in it.
    """

    room: int
    hash: str
    offset: int
    rows: int
    width: int
    dtype: str
    layout: Layout


@dataclass(slots=True)
class StepPlan(ECConnectorMetadata):
    """The step's claims, hashes that nobody claims any more, and loads in their order."""

    claims: list[ClaimSpec] = field(default_factory=list)
    unclaimed: list[str] = field(default_factory=list)
    loads: list[LoadSpec] = field(default_factory=list)
