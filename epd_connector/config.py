# SPDX-License-Identifier: Apache-2.0
"""The configuration of one engine's side of the connector: frozen and validated.

Owns: the table of keys (each declared once, with default, parser, unit and
meaning), the checks between keys, the port plan, and reading the key file.
Does not own: where the values come from (the host adapter passes the engine's
``ec_connector_extra_config``), or what the components do with them.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, NamedTuple

from epd_connector import config_values as values
from epd_connector.errors import ConfigError

DEFAULT_EC_PORT = 14579
CONSUMER_PORT_OFFSET = 100
DEFAULT_SHARD_MIN_BYTES = 8 * values.MIB
MIN_AUTH_KEY_CHARS = 16
MAX_AUTH_KEY_FILE_BYTES = 4096
DOC_PAGE = "docs/configuration.md"

_DAY = 86400.0
_LONG = values.seconds(0.1, _DAY)
_SLAB = values.size(values.MIB, values.TIB)
_ITEM = values.size(0, values.TIB)


class Role(enum.StrEnum):
    """What this engine does, in the host's own words."""

    PRODUCER = "ec_producer"
    CONSUMER = "ec_consumer"
    BOTH = "ec_both"

    @property
    def sends(self) -> bool:
        return self is not Role.CONSUMER

    @property
    def receives(self) -> bool:
        return self is not Role.PRODUCER

    def default_port(self, ec_port: int = DEFAULT_EC_PORT) -> int:
        """Default of ``control_port``: consumers sit above producers of the same host."""
        return ec_port if self.sends else ec_port + CONSUMER_PORT_OFFSET


class MooncakeProtocol(enum.StrEnum):
    TCP = "tcp"
    RDMA = "rdma"


class SlabDevice(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Shard(enum.StrEnum):
    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class OnFailure(enum.StrEnum):
    FAIL = "fail"
    ENCODE_LOCALLY = "encode_locally"


class Ports(NamedTuple):
    """TCP ports of one engine: its head's, and one per rank."""

    head: int
    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Key:
    """What is known about one key, besides its default."""

    parse: Callable[[object], object]
    unit: str
    doc: str
    secret: bool = False


def _meta(
    parse: Callable[[object], object], unit: str, doc: str, *, secret: bool = False
) -> dict[str, Key]:
    return {"key": Key(parse, unit, doc, secret)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All choices of one engine. Immutable; safe to share between threads.

    Every construction validates, and raises ConfigError. Operators' values come
    through ``from_extra``. Direct construction may use ``control_port=0`` (any
    free port), which an operator may not: nobody could name such an engine.
    """

    role: Role

    transport: str = field(default="auto", metadata=_meta(values.name, "", "how bytes travel"))
    mooncake_protocol: MooncakeProtocol = field(
        default=MooncakeProtocol.TCP,
        metadata=_meta(values.choice(MooncakeProtocol), "", "Mooncake's wire protocol"),
    )
    mooncake_device: str = field(
        default="", metadata=_meta(values.text, "", "RDMA devices, comma separated")
    )

    send_slab_bytes: int = field(
        default=values.GIB, metadata=_meta(_SLAB, "bytes", "staging memory per sending rank")
    )
    receive_slab_bytes: int = field(
        default=values.GIB, metadata=_meta(_SLAB, "bytes", "landing memory per receiving rank")
    )
    slab_device: SlabDevice = field(
        default=SlabDevice.AUTO,
        metadata=_meta(values.choice(SlabDevice), "", "which memory the slabs are in"),
    )
    shard: Shard = field(
        default=Shard.AUTO,
        metadata=_meta(values.choice(Shard), "", "whether receiving ranks divide an item's rows"),
    )
    shard_min_bytes: int = field(
        default=DEFAULT_SHARD_MIN_BYTES,
        metadata=_meta(_ITEM, "bytes", "from which size on auto shards an item"),
    )
    share_slab: bool = field(
        default=True,
        metadata=_meta(values.boolean, "", "whether the ranks of one host have one receive slab"),
    )
    write_parallelism: int = field(
        default=4,
        metadata=_meta(values.integer(1, 64), "writes", "concurrent writes per peer, copy threads"),
    )

    offer_timeout_s: float = field(
        default=120.0, metadata=_meta(_LONG, "seconds", "how long an offer waits for its grants")
    )
    receive_timeout_s: float = field(
        default=60.0, metadata=_meta(_LONG, "seconds", "how long a request waits for an item")
    )
    resolve_timeout_s: float = field(
        default=5.0,
        metadata=_meta(values.seconds(0.1, 600), "seconds", "time to find an encode engine"),
    )
    peer_timeout_s: float = field(
        default=5.0,
        metadata=_meta(values.seconds(0.1, 600), "seconds", "silence after which a peer is dead"),
    )
    heartbeat_s: float = field(
        default=1.0,
        metadata=_meta(values.seconds(0.01, 300), "seconds", "time between two heartbeats"),
    )
    write_timeout_s: float = field(
        default=30.0, metadata=_meta(_LONG, "seconds", "how long one write may take")
    )
    failed_peer_s: float = field(
        default=30.0,
        metadata=_meta(values.seconds(0, _DAY), "seconds", "how long a failed peer is refused"),
    )
    shutdown_timeout_s: float = field(
        default=3.0,
        metadata=_meta(values.seconds(0.1, 60), "seconds", "how long stopping waits for writes"),
    )
    tombstone_s: float = field(
        default=300.0,
        metadata=_meta(values.seconds(1, _DAY), "seconds", "how long an ended room still answers"),
    )
    max_rooms: int = field(
        default=65536,
        metadata=_meta(values.integer(16, 1 << 20), "rooms", "bound of the table of rooms"),
    )

    on_failure: OnFailure = field(
        default=OnFailure.FAIL,
        metadata=_meta(values.choice(OnFailure), "", "what a failed item does to its request"),
    )

    control_host: str = field(
        metadata=_meta(values.public_host, "", "address at which peers reach this engine")
    )
    control_port: int = field(metadata=_meta(values.port, "port", "first port of this engine"))
    bind_host: str = field(default="", metadata=_meta(values.bind_host, "", "address to listen on"))
    auth_key: str = field(
        default="",
        repr=False,
        metadata=_meta(
            values.secret(MIN_AUTH_KEY_CHARS), "", "secret that all engines share", secret=True
        ),
    )
    auth_key_file: str = field(
        default="", metadata=_meta(values.text, "", "file that holds the secret")
    )

    _key_bytes: bytes | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        # object.__setattr__ is the way to normalise a frozen dataclass while it is made.
        for name, key in keys().items():
            object.__setattr__(self, name, _parse(name, key, getattr(self, name)))
        _check_together(self)
        object.__setattr__(self, "_key_bytes", _read_auth_key(self))

    @classmethod
    def from_extra(
        cls,
        extra: Mapping[str, object],
        *,
        role: Role,
        default_host: str,
        default_port: int,
    ) -> Config:
        """Read what an operator wrote; ConfigError names key, value, range and remedy.

        ``default_host`` and ``default_port`` stand in for ``control_host`` and
        ``control_port`` where they are not given; see ``Role.default_port``.
        """
        for name in extra:
            _refuse_unknown(name)
        # Any: what an operator wrote has no types until __post_init__ has parsed it.
        given: dict[str, Any] = {
            "control_host": default_host,
            "control_port": default_port,
            **extra,
        }
        config = cls(role=role, **given)
        if config.control_port == 0:
            raise ConfigError(
                f"control_port is 0: must be from 1 to {values.MAX_PORT}, since peers and"
                f" routers have to know it; the default for this role is {role.default_port()}"
            )
        return config

    @property
    def key_bytes(self) -> bytes | None:
        """The authentication key, or None where peers are trusted as they come."""
        return self._key_bytes

    @property
    def listen_host(self) -> str:
        """Address to bind: ``bind_host``, or ``control_host`` where that is empty."""
        return self.bind_host or self.control_host

    @property
    def shard_from(self) -> int | None:
        """Bytes from which an item is sharded over ranks with slabs of their own; None: never."""
        by_choice = {Shard.ALWAYS: 0, Shard.NEVER: None, Shard.AUTO: self.shard_min_bytes}
        return by_choice[self.shard]

    def shares_slab(self, ranks: int, hosts: int) -> bool:
        """Whether ``ranks`` receiving ranks on ``hosts`` hosts map one receive slab together."""
        possible = ranks > 1 and hosts == 1 and self.slab_device is not SlabDevice.CUDA
        return possible and self.share_slab and self.shard is Shard.AUTO and self.role.receives

    def ports(self, dp_rank: int, tp_size: int) -> Ports:
        """The ports of one data-parallel engine; ConfigError if they do not fit.

        Data-parallel engines of one host take consecutive blocks of 1 + tp_size
        ports. With ``control_port`` 0 every port is 0.
        """
        if self.control_port == 0:
            return Ports(0, (0,) * tp_size)
        head = self.control_port + dp_rank * (1 + tp_size)
        last = head + tp_size
        if last > values.MAX_PORT:
            raise ConfigError(
                f"control_port is {self.control_port}: data-parallel rank {dp_rank} with"
                f" tensor-parallel size {tp_size} needs ports {head} to {last}, and the highest"
                f" port is {values.MAX_PORT}; lower control_port by at least"
                f" {last - values.MAX_PORT}"
            )
        return Ports(head, tuple(range(head + 1, last + 1)))


def keys() -> dict[str, Key]:
    """Every key an operator may set, in the order of the document."""
    return {
        declared.name: declared.metadata["key"]
        for declared in dataclasses.fields(Config)
        if "key" in declared.metadata
    }


def defaults() -> dict[str, object]:
    """Defaults of the keys that have a fixed one (control_host, control_port do not)."""
    return {
        declared.name: declared.default
        for declared in dataclasses.fields(Config)
        if "key" in declared.metadata and declared.default is not dataclasses.MISSING
    }


def _parse(name: str, key: Key, value: object) -> object:
    try:
        return key.parse(value)
    except ValueError as error:
        shown = "(hidden)" if key.secret else repr(value)
        default = defaults().get(name)
        hint = "" if key.secret or default is None else f"; the default is {default}"
        raise ConfigError(f"{name} is {shown}: {error}{hint}. See {name} in {DOC_PAGE}") from None


def _refuse_unknown(name: str) -> None:
    known = keys()
    if name in known:
        return
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"unknown key {name!r} in ec_connector_extra_config: {hint}"
        f"The keys are {', '.join(known)}. See {DOC_PAGE}"
    )


def _check_together(config: Config) -> None:
    if config.heartbeat_s >= config.peer_timeout_s / 2:
        raise ConfigError(
            f"heartbeat_s is {config.heartbeat_s:g} and peer_timeout_s {config.peer_timeout_s:g}:"
            " heartbeat_s must be less than half of peer_timeout_s, or one lost heartbeat kills"
            " a peer that lives; lower heartbeat_s or raise peer_timeout_s"
        )
    if config.auth_key and config.auth_key_file:
        raise ConfigError("auth_key and auth_key_file are both set: set one of them")
    if config.on_failure is OnFailure.ENCODE_LOCALLY and not config.role.receives:
        raise ConfigError(
            f"on_failure is encode_locally and the role {config.role}: only an engine that"
            " receives items can fall back; remove on_failure here and set it on the consumer"
        )
    if config.transport == "shm" and config.slab_device is SlabDevice.CUDA:
        raise ConfigError(
            "transport is shm and slab_device cuda: shared memory is host memory; set slab_device"
            " to auto or cpu, or transport to mooncake"
        )
    _check_timeouts(config)


def _check_timeouts(config: Config) -> None:
    # A role that does not use a key is not held to it: its value means nothing there.
    if config.role is Role.BOTH and config.receive_timeout_s > config.offer_timeout_s:
        raise ConfigError(
            f"receive_timeout_s is {config.receive_timeout_s:g} and offer_timeout_s"
            f" {config.offer_timeout_s:g}: an offer would be withdrawn while its receiver still"
            " waits; raise offer_timeout_s or lower receive_timeout_s"
        )
    if config.role.receives and config.resolve_timeout_s > config.receive_timeout_s:
        raise ConfigError(
            f"resolve_timeout_s is {config.resolve_timeout_s:g} and receive_timeout_s"
            f" {config.receive_timeout_s:g}: finding the encode engine is part of the receive;"
            " lower resolve_timeout_s or raise receive_timeout_s"
        )


def _read_auth_key(config: Config) -> bytes | None:
    if not config.auth_key_file:
        return config.auth_key.encode() or None
    return read_key_file("auth_key_file", config.auth_key_file)


def read_key_file(option: str, path: str) -> bytes:
    """The key in the file at ``path``, which ``option`` names. Raises ConfigError."""
    try:
        with Path(path).open("rb") as file:
            key = file.read(MAX_AUTH_KEY_FILE_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"{option} is {path!r}: cannot be read ({error.strerror}); name a file that this user"
            " may read"
        ) from error
    if not MIN_AUTH_KEY_CHARS <= len(key) <= MAX_AUTH_KEY_FILE_BYTES:
        raise ConfigError(
            f"{option} is {path!r}: the key in it has {len(key)} bytes, but"
            f" must have from {MIN_AUTH_KEY_CHARS} to {MAX_AUTH_KEY_FILE_BYTES}"
        )
    return key
