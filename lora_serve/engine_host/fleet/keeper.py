"""The keeper of a server's Ray processes: starts them, and ends them with the server, however that ends.

`python keeper.py FOLDER COMMAND...` runs COMMAND (`ray start --block ...`), whose output becomes FOLDER/start.log. When
COMMAND has ended, FOLDER/ended is there. Standard input is a pipe of the server's: once that is closed, the keeper ends
every process that came of COMMAND and deletes FOLDER. If the keeper itself is killed the kernel ends COMMAND, and with
it Ray's processes. The standard library alone: it stays small, and starts at once.

It is started in a process group of its own, which a terminal's signals do not reach, and in the server's session: Linux
shares the processors among sessions first (sched_autogroup), and replicas that compute in a session of their own were
seen to keep the server from running for seconds.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

LOG, ENDED = "start.log", "ended"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_SECONDS = 5.0  # that Ray may take to end its processes itself
_MAX_SWEEPS = 20  # a process that was being started is found by a later one


def main(arguments: list[str]) -> int:
    """Runs until the server's end of standard input is closed."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)  # the pipe shows the server's end; unlike SIG_IGN, children have their own
    folder, command = Path(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whom their parents leave behind are waited for here
    with (folder / LOG).open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  no thread runs yet
        )
    ended = threading.Event()
    threading.Thread(target=_reap, args=(child.pid, folder, ended), daemon=True).start()
    sys.stdin.buffer.read()
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGTERM)
    ended.wait(_GRACE_SECONDS)
    end_processes(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _ignore(number: int, frame: object) -> None:
    pass


def _reap(pid: int, folder: Path, ended: threading.Event) -> None:
    """Waits for the command, and for processes that were left to this one; returns once there is none."""
    with suppress(ChildProcessError):
        while True:
            if os.wait()[0] == pid:
                with suppress(OSError):
                    (folder / ENDED).touch()
                ended.set()


def end_processes(keeper: int) -> None:
    """Kills every process of a keeper but this one, until there is none."""
    for _ in range(_MAX_SWEEPS):
        others = processes(keeper)
        if not others:
            return
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def processes(keeper: int) -> set[int]:
    """The processes of a keeper's group, and those that these have started, which have not ended yet; not this one."""
    parents, found = dict[int, int](), set[int]()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with suppress(OSError, ValueError, IndexError):
            # After the name in parentheses: state, parent, process group.
            state, parent, group = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:3]
            if state in ("Z", "X"):
                continue
            parents[int(entry.name)] = int(parent)
            if int(group) == keeper:
                found.add(int(entry.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
