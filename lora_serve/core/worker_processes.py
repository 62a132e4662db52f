"""Processes that do one job after another for this one: the kernel bounds what a job may take, and Python's lock is
their own.

A worker is `python -m MODULE` with a socket as its standard input, on which jobs and answers are frames. It is started
when it is needed, ended when it does not answer, and ends with the socket.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

import lora_serve

_ENVIRONMENT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
_START_SECONDS = 60.0
_READY = b"{}"
CLOSED = (EOFError, OSError)  # the other side is gone, or does not answer


class WorkerPool:
    """The workers of one module. Every method may be called from any thread, and waits."""

    def __init__(self, module: str, *arguments: str, num_processes: int = 2) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._free = threading.Semaphore(num_processes)
        self._idle: list[Worker] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _end_all, self._idle)

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        """A worker for the block alone; it is ended if the block raises. Raises CLOSED if none starts."""
        with self._free:
            worker = self._take()
            try:
                yield worker
            except BaseException:
                worker.end()
                raise
            self._give_back(worker)

    def close(self) -> None:
        """End the workers; those at work when they have answered."""
        with self._lock:
            self._is_closed = True
        self._finalizer()

    def _take(self) -> Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Worker(self._command)

    def _give_back(self, worker: Worker) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(worker)
                return
        worker.end()


class Worker:
    """One process."""

    def __init__(self, command: list[str]) -> None:
        """Raises CLOSED if it does not start."""
        self._connection, theirs = Pipe()
        own = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        own["PYTHONPATH"] = str(Path(lora_serve.__file__).resolve().parents[1])
        try:
            with theirs:
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=own)
        except OSError:
            self._connection.close()
            raise
        try:
            self._answer(_START_SECONDS, len(_READY))
        except CLOSED:
            self.end()
            raise

    def ask(self, job: bytes, seconds: float | None = None, max_bytes: int | None = None) -> bytes:
        """The answer to a job, of at most `max_bytes`. Raises CLOSED."""
        self._connection.send_bytes(job)
        return self._answer(seconds, max_bytes)

    def _answer(self, seconds: float | None, max_bytes: int | None) -> bytes:
        if not self._connection.poll(seconds):
            raise TimeoutError
        return self._connection.recv_bytes(max_bytes)

    def end(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def serve(answer: Callable[[bytes], bytes], prepare: Callable[[], None]) -> None:
    """Runs as a worker: answers jobs until the other side closes the socket. `prepare`: before the first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes the socket
    with Connection(0) as connection:
        prepare()
        connection.send_bytes(_READY)
        while True:
            try:
                job = connection.recv_bytes()
            except CLOSED:
                return
            connection.send_bytes(answer(job))


def limit_memory(num_bytes: int) -> None:
    """Lets this process take `num_bytes` beside what it has, and write no core file."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most, hard = pages * resource.getpagesize() + num_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # if the machine's memory ends, the kernel ends this process, not the server
        Path("/proc/self/oom_score_adj").write_text("1000")


def _end_all(workers: list[Worker]) -> None:
    while workers:
        workers.pop().end()
