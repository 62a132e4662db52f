"""A real redis-server of the tests' own, on a free port; it can be killed, paused and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import redis

from lora_serve.commands.server_process import free_port


class RedisServer:
    """Keeps its data in `folder`, with an append-only file if asked: then a killed server forgets nothing.

    `more`: settings for redis-server's command line. `environment`: added to this process's.
    """

    def __init__(
        self,
        folder: Path,
        append_only: bool = False,
        more: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._append_only = append_only
        self._more = more
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        durable = ["--appendonly", "yes"] if self._append_only else []
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        with (self._folder / "log").open("a") as log:
            command += ["--save", "", *durable, *self._more]
            self._process = subprocess.Popen(command, stdout=log, env=self._environment)
        self._wait()

    def kill(self) -> None:
        """kill -9."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._process = None

    def has_died(self) -> bool:
        """True if it ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def mend(self) -> None:
        """Cut a write that was not finished off the append-only file, as the operator of one does that is killed."""
        manifest = self._folder / "appendonlydir" / "appendonly.aof.manifest"
        done = subprocess.run(["redis-check-aof", "--fix", manifest], input=b"y", capture_output=True, check=False)
        assert done.returncode == 0, done.stdout

    def shut_down(self) -> None:
        """As an operator does; what it keeps by itself is on disk then."""
        assert self._process is not None, "it is not running"
        with self.client() as client:
            client.shutdown()
        self._process.wait()
        self._process = None

    def pause(self) -> None:
        """It takes connections and answers nothing, as behind a broken network."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """For good; does nothing if it is down."""
        if self._process is not None and not self.has_died():
            self.resume()
            self.kill()
        self._process = None

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it is not running"
        os.kill(self._process.pid, number)

    def _wait(self) -> None:
        with self.client() as client:
            for _ in range(400):
                try:
                    client.ping()
                except (redis.ConnectionError, redis.BusyLoadingError):
                    threading.Event().wait(0.025)
                else:
                    return
        raise TimeoutError("redis-server did not come up")
