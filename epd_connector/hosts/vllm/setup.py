# SPDX-License-Identifier: Apache-2.0
"""From the host's configuration to the parts that a head or a rank is made of.

Owns where each setting comes from. Does not own what settings mean (``config``) or the
parts themselves. The only place that builds machines and runtimes for the host.
"""

import logging
from typing import TYPE_CHECKING, NamedTuple

from epd_connector.config import Config, OnFailure, Role, SlabDevice
from epd_connector.core.admission import AdmissionSettings, PrefillHead
from epd_connector.core.encode_head import EncodeHead, EncodeHeadSettings
from epd_connector.core.receive import PrefillRank, ReceiveSettings
from epd_connector.core.send import EncodeRank, SendSettings
from epd_connector.core.topology import Expected
from epd_connector.errors import ConfigError, TransportError
from epd_connector.hosts.vllm.identity import (
    dtype_itemsize,
    dtype_name,
    hidden_size,
    link_token,
    model_fingerprint,
    new_incarnation,
    socket_name,
)
from epd_connector.link.base import endpoint
from epd_connector.protocol.codec import MAX_FRAME_BYTES, Codec
from epd_connector.runtime.describing import HeadPlace
from epd_connector.runtime.head import HeadRuntime
from epd_connector.runtime.rank import RankPlace, RankRuntime
from epd_connector.transport import registry
from epd_connector.transport.base import Transport, TransportOptions

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator

    from epd_connector.memory.tensors import SlabMemory, TensorRows

logger = logging.getLogger(__name__)

AUTO = ("shm", "mooncake")
"""What transport ``auto`` uses, best first, as far as it can be used here."""
_RANK_SEND_QUEUE = 1 << 16
_RECEIVE = "receive slab"
_STEPS_AHEAD = 3


class Addresses(NamedTuple):
    """Endpoints of one engine; ``link`` is empty where ranks use the control endpoint."""

    control: str
    advertised: str
    link: str
    head_for_ranks: str
    rank_listen: str
    rank_host: str


def read_config(vllm_config: "VllmConfig") -> Config:
    """The connector's configuration out of the engine's. Raises ConfigError."""
    ec_config = vllm_config.ec_transfer_config
    role = Role(ec_config.ec_role)
    config = Config.from_extra(
        ec_config.ec_connector_extra_config,
        role=role,
        default_host=ec_config.ec_ip,
        default_port=role.default_port(ec_config.ec_port),
    )
    _check_processor_cache(role, vllm_config)
    return config


def _check_processor_cache(role: Role, vllm_config: "VllmConfig") -> None:
    """The shm processor cache hides from the scheduler whether an item brought its pixels."""
    mm_config = vllm_config.model_config.multimodal_config
    kind = getattr(mm_config, "mm_processor_cache_type", None)
    if kind == "shm":
        raise ConfigError(
            f"--mm-processor-cache-type is shm: an engine of role {role.value} must see whether a "
            "request brought pixels; start it with --mm-processor-cache-type lru"
        )


def addresses(config: Config, vllm_config: "VllmConfig", rank: int) -> Addresses:
    """Where the head and rank ``rank`` of this engine are found."""
    parallel = vllm_config.parallel_config
    ports = config.ports(parallel.data_parallel_index, parallel.tensor_parallel_size)
    control = endpoint(config.listen_host, ports.head)
    advertised = endpoint(config.control_host, ports.head)
    rank_listen = endpoint(config.listen_host, ports.ranks[rank])
    if parallel.nnodes_within_dp > 1:
        from vllm.utils.network_utils import get_ip

        host = get_ip()
        return Addresses(
            control, advertised, "", advertised, endpoint(host, ports.ranks[rank]), host
        )
    # An abstract socket leaves no file behind, however the engine ends. Its name can be read by
    # every user of the host, so it must not tell the link token.
    link = f"ipc://@{socket_name(vllm_config)}"
    return Addresses(control, advertised, link, link, rank_listen, config.control_host)


def make_head(config: Config, vllm_config: "VllmConfig") -> HeadRuntime:
    """The runtime of this engine's head, not started."""
    from epd_connector.link.zmq_link import ZmqLink

    model_config = vllm_config.model_config
    place = addresses(config, vllm_config, 0)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    fingerprint = model_fingerprint(model_config)
    encode = prefill = None
    if config.role.sends:
        settings = EncodeHeadSettings(
            ranks=ranks,
            fingerprint=fingerprint,
            dtype=dtype_name(model_config),
            itemsize=dtype_itemsize(model_config),
            widths=dict(vllm_config.ec_transfer_config.mm_encoder_output_widths),
        )
        encode = EncodeHead(settings)
    if config.role.receives:
        expected = Expected(fingerprint, dtype_name(model_config), hidden_size(model_config))
        prefill = PrefillHead(_admission_settings(config, vllm_config, expected))
    head_place = HeadPlace(
        role=config.role.value,
        fingerprint=fingerprint,
        incarnation=new_incarnation(),
        link_token=link_token(vllm_config),
        ranks=ranks,
        control=place.control,
        link=place.link,
        advertised=place.advertised,
    )
    link = ZmqLink(max_frame_bytes=MAX_FRAME_BYTES, send_queue=_RANK_SEND_QUEUE)
    return HeadRuntime(head_place, link, Codec(config.key_bytes), encode=encode, prefill=prefill)


def shares_slab(config: Config, vllm_config: "VllmConfig") -> bool:
    """Whether all receiving ranks of this engine have one receive slab."""
    parallel = vllm_config.parallel_config
    return config.shares_slab(parallel.tensor_parallel_size, parallel.nnodes_within_dp)


def gathers(config: Config, vllm_config: "VllmConfig") -> bool:
    """Whether this engine's ranks may have to put sharded items together."""
    several = vllm_config.parallel_config.tensor_parallel_size > 1
    shards = config.shard_from is not None and not shares_slab(config, vllm_config)
    return several and shards and config.role.receives


def _admission_settings(
    config: Config, vllm_config: "VllmConfig", expected: Expected
) -> AdmissionSettings:
    return AdmissionSettings(
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        slab_nbytes=config.receive_slab_bytes,
        shares_slab=shares_slab(config, vllm_config),
        shard_min_bytes=config.shard_from,
        receive_timeout_s=config.receive_timeout_s,
        resolve_timeout_s=config.resolve_timeout_s,
        failed_peer_s=config.failed_peer_s,
        encode_locally=config.on_failure is OnFailure.ENCODE_LOCALLY,
        max_rooms=config.max_rooms,
        expected=expected,
    )


class RankParts(NamedTuple):
    """What a rank's adapter works with. Slabs are None where the role has no use for them."""

    runtime: RankRuntime
    transports: dict[str, Transport]
    send_slab: "SlabMemory | None"
    receive_slab: "SlabMemory | None"
    rows: "TensorRows | None"

    def free(self) -> None:
        """Gives the slabs back, once the runtime has been closed.

        Where a transport has not come to an end, it still reads the send slab, and may still
        serve peers that write into the receive slab: then both stay mapped.
        """
        if not all(transport.quiet() for transport in self.transports.values()):
            return
        for slab in (self.send_slab, self.receive_slab):
            if slab is not None:
                slab.close()


def share_receive_slab(config: Config, group: "GroupCoordinator") -> "SlabMemory":
    """The one receive slab of all ranks of ``group``: its first makes it, the others map it.

    Every rank must call it; what keeps the first from making it is told to all.

    Raises:
        TransportError: the memory cannot be had here, or was not made; with the remedy.

    """
    from epd_connector.memory.tensors import SlabMemory

    slab, path, failure, cause = None, None, "", None
    if group.rank_in_group == 0:
        try:
            slab = _receive_slab(config, group.device, shared=True)
            path = slab.path
        except Exception as error:  # Whatever it was, the others must hear of it.
            failure, cause = str(error) or repr(error), error
    path, failure = group.broadcast_object((path, failure))
    if path is None:
        reason = f"{failure} (share_slab: the first rank makes the slab of all)"
        raise TransportError(reason) from cause
    pin = group.device.type == "cuda"
    return slab or SlabMemory.attached(path, config.receive_slab_bytes, pin=pin, owner_tag=_RECEIVE)


def make_rank(
    config: Config,
    vllm_config: "VllmConfig",
    rank: int,
    device: "torch.device",
    shared_slab: "SlabMemory | None" = None,
) -> RankParts:
    """The runtime of one rank with its slabs registered, not started.

    ``shared_slab``: the receive slab of all ranks, where they have one.

    Raises:
        ConfigError: the configuration does not fit the device.
        TransportError: memory or a transport cannot be had; with the remedy.

    """
    from epd_connector.link.zmq_link import ZmqLink
    from epd_connector.memory.segment import sweep_stale_segments
    from epd_connector.memory.tensors import TensorRows

    _check_device(config, device)
    for path in sweep_stale_segments():
        logger.info("removed %s, which an engine that died had left", path)
    ranks = vllm_config.parallel_config.tensor_parallel_size
    place = addresses(config, vllm_config, rank)
    transports = _start_transports(config, place.rank_host)
    incarnation = new_incarnation()
    sender = receiver = send_slab = receive_slab = rows = None
    if config.role.sends:
        send_slab = _send_slab(config, transports, device)
        lends = all(transport.reads_anywhere for transport in transports.values())
        rows = TensorRows(send_slab, lends=lends)
        ahead = _ahead_rows(vllm_config)
        sender = EncodeRank(_send_settings(config, rank, ranks, incarnation, ahead))
    if config.role.receives:
        receive_slab = shared_slab or _receive_slab(config, device, shared="shm" in transports)
        sessions = {name: t.register_destination(receive_slab) for name, t in transports.items()}
        settings = _receive_settings(config, rank, ranks, incarnation, sessions, transports)
        receiver = PrefillRank(settings)
    runtime = RankRuntime(
        _rank_place(place, vllm_config, rank, incarnation),
        ZmqLink(max_frame_bytes=MAX_FRAME_BYTES),
        Codec(config.key_bytes),
        transports,
        sender=sender,
        receiver=receiver,
        rows=rows,
        staging_threads=config.write_parallelism,
    )
    return RankParts(runtime, transports, send_slab, receive_slab, rows)


def _check_device(config: Config, device: "torch.device") -> None:
    if config.slab_device is SlabDevice.CUDA and device.type != "cuda":
        raise ConfigError(
            f"slab_device is cuda and the engine runs on {device.type}: set slab_device to auto"
        )


def _rank_place(
    place: Addresses, vllm_config: "VllmConfig", rank: int, incarnation: int
) -> RankPlace:
    return RankPlace(
        rank=rank,
        incarnation=incarnation,
        link_token=link_token(vllm_config),
        head=place.head_for_ranks,
        listen=place.rank_listen,
        advertised_host=place.rank_host,
    )


def _send_settings(
    config: Config, rank: int, ranks: int, incarnation: int, ahead_rows: int
) -> SendSettings:
    return SendSettings(
        incarnation=incarnation,
        rank=rank,
        ranks=ranks,
        slab_nbytes=config.send_slab_bytes,
        ahead_rows=ahead_rows,
        offer_timeout_s=config.offer_timeout_s,
        write_timeout_s=config.write_timeout_s,
        peer_timeout_s=config.peer_timeout_s,
        failed_peer_s=config.failed_peer_s,
        write_parallelism=config.write_parallelism,
        max_rooms=config.max_rooms,
        tombstone_s=config.tombstone_s,
    )


def _ahead_rows(vllm_config: "VllmConfig") -> int:
    """Rows that the host's tower may still make when the rank has said that its slab is full: of
    the steps that are under way, and of the one that is being scheduled."""
    return _STEPS_AHEAD * int(vllm_config.scheduler_config.max_num_encoder_input_tokens)


def _receive_settings(
    config: Config,
    rank: int,
    ranks: int,
    incarnation: int,
    sessions: dict[str, str],
    transports: dict[str, Transport],
) -> ReceiveSettings:
    return ReceiveSettings(
        incarnation=incarnation,
        rank=rank,
        ranks=ranks,
        slab_nbytes=config.receive_slab_bytes,
        sessions=sessions,
        fences={name: transport.fence_s() for name, transport in transports.items()},
        heartbeat_s=config.heartbeat_s,
        peer_timeout_s=config.peer_timeout_s,
        max_rooms=config.max_rooms,
    )


def _start_transports(config: Config, host: str) -> dict[str, Transport]:
    """The configured transport, or all that ``auto`` can use here, in order of preference."""
    options = TransportOptions(
        host=host,
        protocol=config.mooncake_protocol.value,
        device_name=config.mooncake_device,
        write_threads=config.write_parallelism,
    )
    if config.transport != "auto":
        return {config.transport: registry.create(config.transport, options)}
    transports: dict[str, Transport] = {}
    reasons = []
    for name in AUTO:
        if name == "shm" and config.slab_device is SlabDevice.CUDA:
            continue
        try:
            transports[name] = registry.create(name, options)
        except TransportError as error:
            reasons.append(str(error))
            logger.info("transport auto goes without %s: %s", name, error)
    if not transports:
        raise TransportError(f"transport auto: none can be used here: {'; '.join(reasons)}")
    return transports


def _send_slab(
    config: Config, transports: dict[str, Transport], device: "torch.device"
) -> "SlabMemory":
    slab = _make_slab(config, config.send_slab_bytes, "send slab", device, shared=False)
    for transport in transports.values():
        transport.register_source(slab)
    return slab


def _receive_slab(config: Config, device: "torch.device", *, shared: bool) -> "SlabMemory":
    return _make_slab(config, config.receive_slab_bytes, _RECEIVE, device, shared=shared)


def _make_slab(
    config: Config, nbytes: int, tag: str, device: "torch.device", *, shared: bool
) -> "SlabMemory":
    from epd_connector.memory.tensors import SlabMemory

    if device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"the engine runs on {device.type}: embeddings are moved for cpu and cuda devices only"
        )
    if config.slab_device is SlabDevice.CUDA:
        return SlabMemory.on_device(nbytes, device)
    return SlabMemory.on_host(nbytes, shared=shared, pin=device.type == "cuda", owner_tag=tag)
