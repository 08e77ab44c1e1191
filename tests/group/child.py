# SPDX-License-Identifier: Apache-2.0
"""Child processes that keep one object and call functions on it.

Owns their start, the calls and their bounds, and their end. Knows nothing of what they do.
"""

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Concatenate, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")

PATIENCE_S = 120.0
"""Seconds for an answer, the first of which waits for what all children import."""
PRELOAD = "tests.group.preload"


class ChildError(Exception):
    """A function raised in a child; the message is its traceback."""


@dataclass(frozen=True, slots=True)
class _Raised:
    text: str


def _serve(pipe: Connection, make: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """A child's main thread, until its parent hangs up."""
    kept: object = None
    function: Callable[..., object] = lambda _, *rest: make(*rest)  # noqa: E731
    while True:
        try:
            answer: object = function(kept, *arguments)
        except Exception:
            answer = _Raised(traceback.format_exc())
        if kept is None:
            kept, answer = answer, answer if isinstance(answer, _Raised) else None
        pipe.send(answer)
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return


class Child(Generic[S]):
    """A process that keeps what ``make`` returned. Used by one thread.

    ``end`` must be called once before anything else: it comes back when that is made.
    """

    def __init__(self, name: str, make: Callable[P, S], *args: P.args, **kwargs: P.kwargs) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOAD])
        self.name = name
        self._pipe, theirs = context.Pipe()
        assert not kwargs
        self._process = context.Process(
            target=_serve, args=(theirs, make, args), name=name, daemon=True
        )
        self._process.start()
        theirs.close()

    def begin(
        self, function: Callable[Concatenate[S, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Starts ``function(kept, *args)`` in the child; ``end`` has its result."""
        assert not kwargs
        self._pipe.send((function, args))

    def end(self) -> object:
        """What the child answers. ChildError if it raised."""
        assert self._pipe.poll(PATIENCE_S), f"{self.name} does not come back"
        answer = self._pipe.recv()
        if isinstance(answer, _Raised):
            raise ChildError(f"{self.name}: {answer.text}")
        return answer

    def call(
        self, function: Callable[Concatenate[S, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """``function(kept, *args)`` in the child."""
        self.begin(function, *args, **kwargs)
        return self.end()  # type: ignore[return-value]

    def stop(self) -> None:
        """No thread of the child runs until ``go_on``."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the child at once. Idempotent."""
        self._process.kill()
        self._process.join(PATIENCE_S)
        self._pipe.close()

    def leave(self) -> None:
        """Lets the child end by itself; kills it if it does not."""
        with contextlib.suppress(OSError):
            self.go_on()
        self._pipe.close()
        self._process.join(10)
        self.kill()

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
