# SPDX-License-Identifier: Apache-2.0
"""Engines in trouble: their processes are stopped, and looked at from outside.

Owns what is done to processes and what is read of them. Judges nothing.
"""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epd_connector.runtime.report import fetch_report, fetch_state
from epd_connector.testing.engines import EngineError, EngineProcess, wait_until

ENGINE_CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker"
BOUND_S = 120.0
"""Longer than anything here lasts that is to end at all; what ends later has not ended."""

START_S = 500.0
"""Of several engines that start on two cores, beside whatever else runs there."""


def until(condition: Callable[[], bool], bound_s: float = BOUND_S) -> None:
    """Polls until ``condition`` holds. AssertionError if it does not in ``bound_s`` seconds."""
    assert wait_until(condition, bound_s), f"not in {bound_s:.0f} s"


def counter(engine: EngineProcess, name: str) -> float:
    """One of an engine's counters, now."""
    return fetch_report(engine.control_address, 30.0).counters[name]


def settled(encode: EngineProcess) -> bool:
    """Whether every room that an encode engine has heard of has concluded."""
    counters = fetch_report(encode.control_address, 30.0).counters
    return counters["rooms_opened"] == counters["rooms_concluded"]


def in_order(engine: EngineProcess) -> bool:
    """Whether nothing has gone wrong in an engine that is its own fault."""
    return counter(engine, "errors_internal") == 0


def quarantined(prefill: EngineProcess) -> int:
    """Bytes of a prefill engine's slab that belong to writers of whom nobody knows."""
    state = fetch_state(prefill.control_address, 30.0).prefill
    assert state is not None
    return state.slab.quarantined


def reasons(engine: EngineProcess) -> list[str]:
    """Why requests of this engine failed, oldest first: in its log, since clients are not told."""
    text = engine.log_path.read_text(errors="replace")
    return re.findall(r"request \S+ fails: (.*)", text)


def refusal(engine: EngineProcess) -> str:
    """What an engine that does not start says in its log."""
    with pytest.raises(EngineError):
        engine.wait_ready(START_S)
    return engine.log_path.read_text(errors="replace")


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes do not run, as those of a host that is out of memory or being debugged."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def worker(engine: EngineProcess, rank: int = 0) -> int:
    """The process of one rank."""
    return engine.processes(WORKER)[rank]


def core(engine: EngineProcess) -> int:
    """The process of the scheduler, where the connector's head is."""
    [pid] = engine.processes(ENGINE_CORE)
    return pid


def being_sent_rows(pid: int) -> bool:
    """Whether a stopped process is being sent more than the connector's frames, over TCP."""
    return unread(pid) > 2**14


def unread(pid: int) -> int:
    """Bytes that lie in TCP connections of a process, sent to it and not read by it yet."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(entry))
    total = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            # 01: established. The queues are "sent:received", in hexadecimal.
            if words[3] == "01" and f"socket:[{words[9]}]" in sockets:
                total += int(words[4].partition(":")[2], 16)
    return total
