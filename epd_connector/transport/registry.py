# SPDX-License-Identifier: Apache-2.0
"""Finding transports by name, through the entry points of installed packages.

Owns the entry-point group and the errors of looking a name up. Does not choose between
transports: that is the caller's policy.
"""

from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint, entry_points

from epd_connector.errors import TransportError
from epd_connector.transport.base import Transport, TransportClass, TransportOptions

GROUP = "epd_connector.transports"

Loader = Callable[[], TransportClass]


def available() -> dict[str, Loader]:
    """Every installed transport by name; nothing is imported until a loader is called. A loader
    raises TransportError where the transport's module cannot be imported."""
    return {point.name: partial(_load, point) for point in entry_points(group=GROUP)}


def create(name: str, options: TransportOptions) -> Transport:
    """Start the transport `name`. Raises TransportError where it is unknown or cannot be used
    in this process, with the remedy.

    There is no `probe` beforehand: the class prepares what its libraries read as they load.
    """
    loaders = available()
    if name not in loaders:
        known = ", ".join(sorted(loaders)) or "none: is the package epd-connector installed?"
        raise TransportError(f"transport: {name!r} is not an installed transport ({known})")
    transport_class = loaders[name]()
    try:
        return transport_class(options)
    except TransportError as error:
        raise TransportError(f"transport {name!r} cannot be used here: {error}") from error


def _load(point: EntryPoint) -> TransportClass:
    try:
        door: Loader = point.load()
        return door()
    except (ImportError, AttributeError) as error:
        raise TransportError(
            f"transport {point.name!r}: {point.value} cannot be loaded ({error}); reinstall or "
            "remove the package that declares it"
        ) from error
