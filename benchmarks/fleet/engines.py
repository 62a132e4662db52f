"""Processes of engines below a server, a cluster or both, and what can be done to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from benchmarks.peers.processes import tree

OF_RAY = "ray::ServeReplica:"  # the title that Ray gives to the process of a replica
OF_SERVER = "lora_serve.engine_host"  # in the command line of `--engine process`


def engines_below(roots: Iterable[int]) -> list[int]:
    """Pids, the longest-lived first. Only what descends from `roots` counts: other servers of this machine do not."""
    found = {pid for root in roots for pid in tree(root) if _is_engine(pid)}
    return sorted(found, key=_start_time)


def _is_engine(pid: int) -> bool:
    command = command_of(pid)
    return command.startswith(OF_RAY) or OF_SERVER in command


def command_of(pid: int) -> str:
    """ "" for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _start_time(pid: int) -> int:
    """Clock ticks since the machine's start; those that are gone come last."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 2**63


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def signal_to(pid: int, number: signal.Signals) -> bool:
    """False if it is gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
