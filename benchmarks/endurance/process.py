"""What a server's process has used."""

from __future__ import annotations

import os
from pathlib import Path

from lora_serve.commands.server_process import ServerProcess


def processor_seconds(process: ServerProcess) -> float:
    """User and system time so far, of all threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(process: ServerProcess) -> float:
    """The most memory that was resident, MiB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024
