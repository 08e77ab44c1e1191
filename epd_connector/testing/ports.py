# SPDX-License-Identifier: Apache-2.0
"""TCP ports for processes that a test starts later.

Owns the choice, and the promise that two of them do not get the same port: a port that is
picked is not bound yet, and only looks free to whoever picks next.
"""

from __future__ import annotations

import secrets
import socket
import weakref

_FIRST, _BLOCK, _BLOCKS = 20_000, 32, 375
_ATTEMPTS = 400


class Ports:
    """`count` neighbouring TCP ports of this machine's loopback, from `first`.

    Free now, and given to no other `Ports` of this machine while this object lives: it holds an
    abstract socket named after them. Below the range from which the kernel takes ports itself.
    """

    def __init__(self, count: int) -> None:
        if not 1 <= count <= _BLOCK:
            raise ValueError(f"{count} ports: from 1 to {_BLOCK} can be had")
        for _ in range(_ATTEMPTS):
            self.first = _FIRST + _BLOCK * secrets.randbelow(_BLOCKS)
            claim = socket.socket(socket.AF_UNIX)
            if _claimed(claim, self.first) and all(
                map(_is_free, range(self.first, self.first + count))
            ):
                weakref.finalize(self, claim.close)
                return
            claim.close()
        last = _FIRST + _BLOCK * _BLOCKS - 1
        raise OSError(f"no {count} neighbouring free ports between {_FIRST} and {last}")


def _claimed(claim: socket.socket, first: int) -> bool:
    try:
        claim.bind(f"\0epd-ports-{first}")
    except OSError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
