"""`lora-serve serve` as a child process: started, awaited until ready, read from, stopped.

The demo, the bench and tests over real sockets use it.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from lora_serve.core.process import without_settings

HOST = "127.0.0.1"
POLL_SECONDS = 0.05


class ServerFailedError(Exception):
    """The child ended, or was not ready in time; the message carries the tail of its log."""


class ServerProcess:
    """A server child, on loopback unless told otherwise. `with` starts it and always ends it.

    It stands in a process group of its own, so a Ctrl-C at the terminal reaches only its parent, which decides; not in
    a session of its own, as Linux shares the processors among sessions first.
    Settings of this process's environment (LORA_SERVE_X) do not reach it: it does what `arguments` say.
    LORA_SERVE_KERNELS, which is none, does.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, port: int = 0, *, host: str = HOST, inside: Sequence[str] = ()
    ) -> None:
        """`inside`: what comes before the command, for one on a network of its own; `host`: its address there."""
        self.port = port or free_port()
        self.url = f"http://{host}:{self.port}"
        self.log = log
        self._host = host
        self._arguments = [*inside, sys.executable, "-m", "lora_serve", "serve", "--host", host]
        self._arguments += ["--port", str(self.port), *arguments]
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=without_settings(os.environ),
                process_group=0,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._child is not None, "not started"
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """The child's exit code; None while it runs."""
        return self._child.poll() if self._child else None

    def wait_until_ready(self, timeout: float) -> None:
        """Return when /ready answers 200; raise ServerFailedError if the child ends first or `timeout` seconds pass."""
        deadline = time.monotonic() + timeout
        while not self.is_ready():
            if self.exit_code is not None:
                raise ServerFailedError(f"the server ended with code {self.exit_code}; its last words:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServerFailedError(f"the server was not ready after {timeout:.0f} s:\n{self.tail()}")
            time.sleep(POLL_SECONDS)

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self._host, self.port, timeout=2)
        try:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait(self) -> int:
        """Return the exit code once it has ended."""
        assert self._child is not None, "not started"
        return self._child.wait()

    def tail(self, lines: int = 20) -> str:
        """The log's last lines."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, timeout: float = 40.0) -> int | None:
        """SIGTERM, then SIGKILL after `timeout` seconds; the exit code, None if it never started."""
        child = self._child
        if child is None:
            return None
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
        try:
            return child.wait(timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()


def free_port() -> int:
    """A TCP port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def is_port_free(port: int) -> bool:
    """True if a server could listen on this TCP port of loopback."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
