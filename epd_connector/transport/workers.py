# SPDX-License-Identifier: Apache-2.0
"""A small pool of daemon threads with lanes, for the blocking parts of a transport.

Owns the threads and the order of jobs: those of one lane run one after the other, those of
different lanes side by side. Does not know what a job does. The threads are daemons because a
job may hang in a library for a minute, which must not keep the process from ending.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple


class Job(NamedTuple):
    """`run` must not raise: an exception would end the process's use of its thread."""

    run: Callable[[], None]
    abandon: Callable[[], None]
    """Called instead of `run` when the pool closes first."""


class Workers:
    """Runs at most `threads` jobs at a time and keeps at most `backlog` waiting."""

    def __init__(self, name: str, *, threads: int, backlog: int) -> None:
        self._name = name
        self._limit = threads
        self._backlog = backlog
        self._condition = threading.Condition()
        self._lanes: dict[Hashable, deque[Job]] = {}
        self._ready: deque[Hashable] = deque()
        self._waiting_jobs = 0
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._closed = False

    def submit(self, lane: Hashable, job: Job) -> bool:
        """Queue `job` behind those of its lane. False, and nothing happens, when the backlog is
        full or the pool is closed."""
        with self._condition:
            if self._closed or self._waiting_jobs >= self._backlog:
                return False
            self._waiting_jobs += 1
            if lane in self._lanes:
                self._lanes[lane].append(job)
                return True
            self._lanes[lane] = deque([job])
            self._ready.append(lane)
            if self._idle < len(self._ready) and len(self._threads) < self._limit:
                self._start_thread()
            self._condition.notify()
            return True

    def close(self, timeout_s: float) -> bool:
        """Abandon what waits, and wait up to `timeout_s` for what runs. Idempotent. Returns
        whether every thread has ended."""
        with self._condition:
            self._closed = True
            abandoned = [job for jobs in self._lanes.values() for job in jobs]
            self._lanes.clear()
            self._ready.clear()
            self._waiting_jobs = 0
            self._condition.notify_all()
            threads = list(self._threads)
        for job in abandoned:
            job.abandon()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _start_thread(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(target=self._work, name=f"{self._name}-{number}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            lane, job = taken
            job.run()
            # What the job holds, such as rows of the engine, must not wait for the next one.
            del taken, job
            self._release(lane)

    def _take(self) -> tuple[Hashable, Job] | None:
        with self._condition:
            self._idle += 1
            while not self._ready and not self._closed:
                self._condition.wait()
            self._idle -= 1
            if self._closed:
                return None
            lane = self._ready.popleft()
            self._waiting_jobs -= 1
            return lane, self._lanes[lane].popleft()

    def _release(self, lane: Hashable) -> None:
        with self._condition:
            jobs = self._lanes.get(lane)
            if jobs is None:
                return
            if jobs:
                self._ready.append(lane)
                self._condition.notify()
            else:
                del self._lanes[lane]
