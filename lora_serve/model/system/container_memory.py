"""The memory that a container's limit leaves: /proc/meminfo tells of the whole machine, whatever the limit."""

from __future__ import annotations

from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
_VERSIONS = (  # of cgroups: files of the limit, of what is in use, of what that is
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
_RECLAIMABLE = ("active_file", "inactive_file")  # copies of files, which the kernel lets go when memory is short


def free_in_container(groups: Path = GROUPS) -> int | None:
    """Bytes left below the limit of the control group in which this process sees itself; None: there is no limit."""
    for limit, used, stat in _VERSIONS:
        try:
            most = int((groups / limit).read_text())
            taken = int((groups / used).read_text())
            words = [line.split() for line in (groups / stat).read_text().splitlines()]
        except (OSError, ValueError):  # "max" is no limit
            continue
        cached = sum(int(number) for name, number in words if name in _RECLAIMABLE)
        return max(0, most - taken + cached)
    return None
