# SPDX-License-Identifier: Apache-2.0
"""One supervised thread that waits for frames, posts and time, and hands them to its driver.

Owns the thread, the bounded queue of posts, and the rule that no exception ends it. Does
not own sockets (its ``Link`` does) or decisions (its driver's machines do).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from epd_connector.link.base import Link, PeerId

logger = logging.getLogger(__name__)

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)

MAX_POSTS = 65536
STALL_S = 1.0
"""Seconds for which a loop must be kept from its work to be called stalled."""


class Driver(Protocol[P_contra]):
    """What a loop calls, always on its own thread."""

    def on_post(self, post: P_contra, now: float) -> None:
        """Somebody in this process said something."""

    def on_frame(self, peer: PeerId, payload: bytes, now: float) -> None:
        """A peer said something."""

    def on_turn(self, now: float) -> None:
        """End of one turn: poll what must be polled, act on what is due."""

    def next_wait(self, now: float) -> float | None:
        """Seconds until ``on_turn`` is due again, or None."""

    def on_error(self) -> None:
        """One of the calls above raised; it was logged."""

    def on_stall(self) -> None:
        """The thread was kept from running for ``STALL_S`` or longer; it was logged."""


class Loop(Generic[P]):
    """Runs ``driver`` on a thread of its own over ``link``. ``post`` from any thread."""

    def __init__(
        self,
        name: str,
        link: Link,
        driver: Driver[P],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._driver = driver
        self._clock = clock
        self._posts: deque[P] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def start(self) -> None:
        """Starts the thread. Idempotent."""
        if not self._started:
            self._started = True
            self._thread.start()

    def post(self, post: P, *, bounded: bool = True) -> bool:
        """Hands ``post`` to the driver; False when the queue is full or the loop was stopped.

        ``bounded=False`` is for what must not be lost and is bounded by other means: the end
        of work that this loop itself has started.
        """
        if (bounded and len(self._posts) >= MAX_POSTS) or self._stopping.is_set():
            return False
        self._posts.append(post)
        self._link.wake()
        return True

    def wake(self) -> None:
        """Makes a turn happen soon. Any thread."""
        self._link.wake()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread once it has handled what was posted; whether it has. Idempotent.

        A thread that has not ended goes on with its link and with what its driver works with:
        neither may be closed under it.
        """
        self._stopping.set()
        self._link.wake()
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error(
                "%s: has not ended within %g s; it keeps its sockets and memory until the process "
                "ends",
                self._thread.name,
                timeout_s,
            )
            return False
        return True

    def _run(self) -> None:
        stopping = False
        while not stopping:
            # Seen before the turn: what was posted before the stop is handled in it.
            stopping = self._stopping.is_set()
            self.turn()

    def turn(self) -> None:
        """Waits, then handles what has come. For the loop's own thread, and for tests.

        Posts come before frames: what this process said before a peer heard of it is known
        here before that peer's answer is.
        """
        frames = self._wait(self._guarded_wait())
        began = self._clock()
        for _ in range(len(self._posts)):
            self._call(self._driver.on_post, self._posts.popleft(), self._clock())
        for peer, payload in frames:
            self._call(self._driver.on_frame, peer, payload, self._clock())
        self._call(self._driver.on_turn, self._clock())
        self._note_stall("was busy", self._clock() - began)

    def _wait(self, timeout_s: float | None) -> list[tuple[PeerId, bytes]]:
        before = self._clock()
        frames = self._link.wait(timeout_s)
        if timeout_s is not None:
            self._note_stall("did not run", self._clock() - before - timeout_s)
        return frames

    def _note_stall(self, what: str, seconds: float) -> None:
        """Peers may take a process for dead whose loop does not get to run."""
        if seconds >= STALL_S:
            logger.warning("%s: %s for %.1f s", self._thread.name, what, seconds)
            self._driver.on_stall()

    def _guarded_wait(self) -> float | None:
        if self._posts or self._stopping.is_set():
            return 0.0
        try:
            wait = self._driver.next_wait(self._clock())
        except Exception:
            logger.exception("%s: the next deadline is unknown", self._thread.name)
            self._driver.on_error()
            return 1.0
        return None if wait is None else max(0.0, wait)

    def _call(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception:
            logger.exception("%s: one event was lost", self._thread.name)
            self._driver.on_error()
