# SPDX-License-Identifier: Apache-2.0
"""Which encode engine is behind an address: asked once, remembered until proven wrong.

Owns the prefill head's knowledge of encode engines, positive and negative. Does not own
what is done with it. A part of ``admission.PrefillHead``: it appends to the machine's
effects, and never makes anybody wait: ``find`` answers with what is known now.
"""

from dataclasses import dataclass

from epd_connector.core.deadlines import Deadlines
from epd_connector.core.effects import Effect, Hangup, Send
from epd_connector.core.fingerprint import same_model
from epd_connector.core.receive_senders import host_of
from epd_connector.errors import Code, Failure
from epd_connector.identity_enum import IdentityEnum
from epd_connector.protocol.frames import AnyFrame, Identify, Identity, NotReady, Rejected

ASK_AGAIN_S = 0.5
"""Seconds between questions to an engine that has not answered, or is not ready."""
NEGATIVE_S = 1.0
"""Seconds for which an address that did not answer is not asked again."""
SUSPECT_S = 1.0
"""Seconds for which an address is asked that did not answer a while ago."""
MAX_ADDRESSES = 4096
_NO_ANSWER = "no answer"


class AddressState(IdentityEnum):
    """What is known of one address."""

    ASKING = "asking"
    KNOWN = "known"
    REFUSED = "refused"
    SUSPECT = "suspect"  # did not answer a while ago: who needs it does not wait for it long


@dataclass(slots=True, eq=False)
class Address:
    """One address: its engine once ``KNOWN``, why it has none once ``REFUSED``.

    ``give_up``: until when an ``ASKING`` address is asked; ``reason``: what it said last.
    """

    state: AddressState
    give_up: float
    reason: str = _NO_ANSWER
    identity: Identity | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """What an encode engine must be: model fingerprint, dtype, and a divisor of its widths."""

    fingerprint: str
    dtype: str
    width_unit: int


class Topology:
    """Addresses of encode engines and what is known of each.

    An address that did not answer within ``resolve_timeout_s`` is a suspect for
    ``failed_peer_s``: then it is given ``SUSPECT_S`` to answer, each time it is needed.
    """

    def __init__(
        self, expected: Expected, resolve_timeout_s: float, failed_peer_s: float = 0.0
    ) -> None:
        self.effects: list[Effect] = []
        self._expected = expected
        self._resolve_timeout_s = resolve_timeout_s
        self._failed_peer_s = failed_peer_s
        self._addresses: dict[str, Address] = {}
        self._timers: Deadlines[str] = Deadlines()

    def find(self, address: str, now: float) -> Identity | Failure | None:
        """The engine at ``address``, why there is none, or None while it is being asked."""
        entry = self._addresses.get(address)
        if entry is None:
            if not self._make_room():
                reason = f"{MAX_ADDRESSES} encode addresses are being asked already"
                return Failure(Code.OVERLOADED, reason)
            entry = Address(AddressState.ASKING, now + self._resolve_timeout_s)
            self._addresses[address] = entry
            self._ask(address, now)
        elif entry.state is AddressState.SUSPECT:
            entry.state, entry.reason = AddressState.ASKING, _NO_ANSWER
            entry.give_up = now + min(SUSPECT_S, self._resolve_timeout_s)
            self._ask(address, now)
        return entry.identity or entry.failure

    def addresses(self) -> dict[str, Address]:
        """Everything that is known, to be read only."""
        return self._addresses

    def on_host(self, host: str) -> list[str]:
        """Addresses whose engine is known and has its head or a rank on ``host``."""
        entries = self._addresses.items()
        return [address for address, entry in entries if _is_on(entry, address, host)]

    def silent(self, address: str) -> bool:
        """Whether ``address`` was given up a while ago: the connection was hung up, and nobody
        is likely to be there."""
        entry = self._addresses.get(address)
        if entry is None:
            return False
        refused = entry.failure is not None and entry.failure.code is Code.UNREACHABLE
        return refused or entry.state is AddressState.SUSPECT

    def tell(self, address: str, frame: AnyFrame) -> None:
        """Tells the engine at ``address``; it may be lost. Nobody is told who is ``silent``."""
        if not self.silent(address):
            self.effects.append(Send(f"tcp://{address}", 0, frame))

    def forget(self, address: str) -> None:
        """What was known of ``address`` has proved wrong: it is asked again when needed."""
        entry = self._addresses.get(address)
        if entry is not None and entry.state is AddressState.KNOWN:
            del self._addresses[address]
            self._timers.clear(address)

    def leave(self, address: str) -> None:
        """Hangs up where nobody answers, unless somebody is known or being asked there."""
        entry = self._addresses.get(address)
        if entry is None or entry.state not in (AddressState.ASKING, AddressState.KNOWN):
            self.effects.append(Hangup(f"tcp://{address}"))

    def hear(self, address: str, frame: AnyFrame, now: float) -> bool:
        """Takes an answer from ``address``; whether more is known than before."""
        entry = self._addresses.get(address)
        if entry is None or entry.state is not AddressState.ASKING:
            return False
        match frame:
            case Identity():
                failure = self._mismatch(address, frame)
                if failure is not None:
                    self._refuse(address, entry, failure, now)
                    return True
                entry.state, entry.identity = AddressState.KNOWN, frame
                self._timers.clear(address)
                return True
            case Rejected(failure=failure):
                reason = f"encode engine at {address}: {failure.reason}"
                self._refuse(address, entry, Failure(failure.code, reason), now)
                return True
            case NotReady(reason=reason):
                entry.reason = f"not ready: {reason}"
        return False

    def tick(self, now: float) -> bool:
        """Asks again, gives up, forgets refusals; whether some address was given up."""
        changed = False
        for address in self._timers.expired(now):
            entry = self._addresses[address]
            if entry.state in (AddressState.REFUSED, AddressState.SUSPECT):
                self._pardon(address, entry, now)
            elif now >= entry.give_up:
                self._give_up(address, entry, now)
                changed = True
            else:
                self._ask(address, now)
        return changed

    def next_deadline(self) -> float | None:
        """When ``tick`` has something to do, or None."""
        return self._timers.next()

    def _ask(self, address: str, now: float) -> None:
        self.effects.append(Send(f"tcp://{address}", 0, Identify(self._expected.fingerprint)))
        entry = self._addresses[address]
        self._timers.set(address, min(now + ASK_AGAIN_S, entry.give_up))

    def _give_up(self, address: str, entry: Address, now: float) -> None:
        reason = (
            f"encode engine at {address}: {entry.reason} within "
            f"{self._resolve_timeout_s} s (resolve_timeout_s): is it up, is this its "
            "control address, and do both engines have the same auth_key?"
        )
        self.effects.append(Hangup(f"tcp://{address}"))
        self._refuse(address, entry, Failure(Code.UNREACHABLE, reason), now)

    def _pardon(self, address: str, entry: Address, now: float) -> None:
        """A refusal has lasted long enough. Who did not answer at all stays a suspect."""
        unreachable = entry.failure is not None and entry.failure.code is Code.UNREACHABLE
        if unreachable and entry.reason == _NO_ANSWER and self._failed_peer_s > 0:
            entry.state, entry.failure = AddressState.SUSPECT, None
            self._timers.set(address, now + self._failed_peer_s)
        else:
            del self._addresses[address]

    def _refuse(self, address: str, entry: Address, failure: Failure, now: float) -> None:
        entry.state, entry.failure = AddressState.REFUSED, failure
        self._timers.set(address, now + NEGATIVE_S)

    def _mismatch(self, address: str, identity: Identity) -> Failure | None:
        expected = self._expected
        where = f"encode engine at {address}"
        if not same_model(identity.fingerprint, expected.fingerprint):
            reason = f"{where} serves model {identity.fingerprint}, this engine"
            return Failure(
                Code.MISMATCH, f"{reason} {expected.fingerprint}: serve one model on both"
            )
        if identity.dtype != expected.dtype:
            reason = f"{where} computes in {identity.dtype}, this engine in {expected.dtype}"
            return Failure(Code.MISMATCH, f"{reason}: start both with the same --dtype")
        for modality, width in identity.widths.items():
            if width <= 0 or width % expected.width_unit:
                reason = f"{where} gives {modality} rows of {width} elements, no multiple of the"
                return Failure(
                    Code.MISMATCH, f"{reason} hidden size {expected.width_unit} of this engine"
                )
        return None

    def _make_room(self) -> bool:
        """Keeps the table bounded: an address that is only remembered is forgotten."""
        if len(self._addresses) < MAX_ADDRESSES:
            return True
        for address, entry in self._addresses.items():
            if entry.state is not AddressState.ASKING:
                del self._addresses[address]
                self._timers.clear(address)
                self.effects.append(Hangup(f"tcp://{address}"))
                return True
        return False


def _is_on(entry: Address, address: str, host: str) -> bool:
    if entry.identity is None:
        return False
    endpoints = [address, *(rank.endpoint for rank in entry.identity.ranks)]
    return any(host_of(endpoint) == host for endpoint in endpoints)
