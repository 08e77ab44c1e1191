# SPDX-License-Identifier: Apache-2.0
"""Processes of this machine, as Linux shows them.

Owns looking at them. Starts, signals and ends none.
"""

from __future__ import annotations

from pathlib import Path


def group_members(group: int) -> list[int]:
    """Ids of the processes of a process group that are not zombies (Linux)."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue
        # The command name in parentheses may hold spaces; the fields after it do not.
        state, _parent, pgrp = stat.rpartition(")")[2].split()[:3]
        if int(pgrp) == group and state != "Z":
            members.append(int(entry.name))
    return members


def title_of(pid: int) -> str:
    """What a process calls itself, or its command line; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""
