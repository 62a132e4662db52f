"""What runs on this machine below a server: children, and whether they are alive."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from lora_serve.commands.server_process import ServerProcess

PATIENCE = 120.0  # seconds for what must happen some time
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, and the same as an address of IPv6


def _status(pid: int) -> list[str]:
    """The fields behind the name: state, parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return _status(pid)[0] != "Z"
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if int(_status(int(folder.name))[1]) == pid and is_alive(int(folder.name)):
                    found.append(int(folder.name))
            except OSError:
                continue  # it has just ended
    return found


def descendants_of(pid: int) -> list[int]:
    children = children_of(pid)
    return children + [one for child in children for one in descendants_of(child)]


def eventually(is_so: Callable[[], bool], words: str) -> None:
    """Wait until it is so."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, words
        time.sleep(0.02)


def engine_of(pid: int) -> int:
    """The engine's process below a server."""
    eventually(lambda: len(children_of(pid)) == 1, "there is no engine")
    return children_of(pid)[0]


def until_replaced(process: ServerProcess, old: int) -> None:
    """A server is ready for a moment longer than its engine lives."""

    def is_so() -> bool:
        return children_of(process.pid) not in ([], [old]) and process.is_ready()

    eventually(is_so, f"no new engine:\n{process.tail()}")


def loads_torch(pid: int) -> bool:
    """Whether torch's library is mapped."""
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """The addresses, as the kernel writes them, and ports on which processes listen."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(entry.readlink().name)
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, _, port = fields[1].partition(":")
                found.add((address, int(port, 16)))
    return found
