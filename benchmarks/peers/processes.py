"""A child in a process group of its own, and what /proc tells of all its processes."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import ROOT, last_words
from benchmarks.peers.seam import PeerError

POLL_SECONDS = 0.1


def environment_of(num_threads: int, **more: str) -> dict[str, str]:
    """This process's variables, with the threads that the engine may have and the repository's modules at hand."""
    threads = {"OMP_NUM_THREADS": str(num_threads), "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **threads, **more}


def end_on_sigterm() -> None:
    """Let SIGTERM unwind this process like Ctrl-C, so that its children, in groups of their own, are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


class Child:
    """A process that writes to `log`; `stop` ends it and whatever it has started."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str], **pipes: int) -> None:
        self.log = log
        self.started = time.perf_counter()
        with log.open("wb") as stream:
            # In the session of who measures: Linux shares the processors among sessions first.
            more: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stream, "process_group": 0, **pipes}
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stderr=stream, env=dict(environment), cwd=ROOT, **more
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_until_answers(self, port: int, path: str, timeout: float = 600.0) -> float:
        """Seconds from its start until GET `path` is 200. Raises PeerError with its last words, stopping it."""
        while not answers(port, path):
            seconds = time.perf_counter() - self.started
            if self.process.poll() is not None or seconds > timeout:
                raise self.failed(
                    "did not start" if self.process.poll() is not None else f"not ready in {seconds:.0f} s"
                )
            time.sleep(POLL_SECONDS)
        return time.perf_counter() - self.started

    def failed(self, what: str) -> PeerError:
        """Stop it; the error to raise."""
        self.stop()
        return PeerError(
            f"{what} (exit code {self.process.returncode}): {last_words(self.log.read_text(errors='replace'))}"
        )

    def stop(self, timeout: float = 20.0) -> None:
        """SIGTERM to the child, then SIGKILL to what is left of its group; return when nobody is."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        with suppress(ProcessLookupError):  # nothing is left then
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.perf_counter() + timeout
        while group_is_running(self.process.pid) and time.perf_counter() < deadline:
            time.sleep(POLL_SECONDS / 10)


def answers(port: int, path: str) -> bool:
    """Whether GET on this port of loopback gives 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def tree(pid: int) -> list[int]:
    """The process and all its descendants."""
    parents = dict(_parents())
    found = [pid]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def peak_rss(pid: int) -> int:
    """Bytes: the peaks (VmHWM) of all processes of the tree, added up; pages that two of them share count twice."""
    return 1024 * sum(_status_kib(process, "VmHWM") for process in tree(pid))


def cpu_seconds(pid: int) -> float:
    """Processor time of the tree so far."""
    fields = (_stat(process) for process in tree(pid))
    return sum(int(stat[11]) + int(stat[12]) for stat in fields if stat) / os.sysconf("SC_CLK_TCK")


def group_is_running(group: int) -> bool:
    """Whether any process of this group still runs; one that has ended and is not yet buried does not."""
    stats = (_stat(int(folder.name)) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return any(int(stat[2]) == group and stat[0] not in "ZX" for stat in stats if stat)


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        stat = _stat(int(folder.name)) if folder.name.isdigit() else []
        if stat:
            yield int(folder.name), int(stat[1])


def _stat(pid: int) -> list[str]:
    """The fields after the command's name, the state first; [] of a process that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _status_kib(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)
