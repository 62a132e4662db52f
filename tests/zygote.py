"""A process that has imported what a server with its engine on a thread imports, and forks such servers.

A start of a server is 2 s of imports and little else. By day a test's `ServerProcess` whose engine is on a thread is
forked here (one zygote for each worker), unless its environment is another than that in which the imports were made. By
night, and where a command or an engine's process stands before or beside it, it is `python -m lora_serve` as ever.

    python -m tests.zygote FD       a stream socket: requests with descriptors in, pids out
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from lora_serve.core.process import without_settings

ROOT = Path(__file__).resolve().parents[1]
SERVE = [sys.executable, "-m", "lora_serve", "serve"]
VARYING = {"PYTEST_CURRENT_TEST", "XDG_STATE_HOME", "PWD", "OLDPWD"}  # which no import reads
MAX_REQUEST = 2**20


def _of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name not in VARYING}


class ForkedServer:
    """What `ServerProcess` needs of a Popen."""

    def __init__(self, arguments: Sequence[str], stdout: IO[bytes], env: Mapping[str, str]) -> None:
        self._status, theirs = socket.socketpair()
        request = {"arguments": list(arguments), "env": dict(env), "cwd": os.getcwd()}
        with theirs:
            self.pid = zygote().fork(request, [stdout.fileno(), theirs.fileno()])
        self.returncode: int | None = None

    def __del__(self) -> None:
        self._status.close()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            told = select.poll()
            told.register(self._status, select.POLLIN)
            if not told.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"server {self.pid}", timeout or 0.0)
            self.returncode = int(self._status.recv(16, socket.MSG_PEEK))  # left there for other threads that wait
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The process, as its worker sees it."""

    def __init__(self) -> None:
        self.environment = _of_imports(without_settings(os.environ))
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.zygote", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=without_settings(os.environ),
            )
        atexit.register(self.close)

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        return int(self._socket.recv(16))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def zygote() -> Zygote:
    """The one of this worker; it starts with the first server."""
    return Zygote()


def popen(arguments: Sequence[str], **options: Any) -> Any:
    """A Popen, or a forked server if that is the same."""
    engine = arguments[arguments.index("--engine") + 1] if "--engine" in arguments else ""
    is_plain = list(arguments[: len(SERVE)]) == SERVE and engine == "thread"
    if is_plain and zygote().environment == _of_imports(options["env"]):
        return ForkedServer(arguments[len(SERVE) - 1 :], options["stdout"], options["env"])
    return subprocess.Popen(arguments, **options)


FORKING = SimpleNamespace(**{**vars(subprocess), "Popen": popen})  # in the place of a module's `subprocess`


def main() -> list[str]:
    """Forks for each request; returns in the children, with the arguments of the server."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _import()
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(woken.fileno())
    children: dict[int, socket.socket] = {}
    while True:
        ready = select.select([control, wake], [], [])[0]
        if wake in ready:
            wake.recv(4096)
            _reap(children)
        if control in ready:
            content, descriptors, *_ = socket.recv_fds(control, MAX_REQUEST, 2)
            if not content:
                sys.exit(0)
            output, status = descriptors
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                for kept in (control, wake, woken, *children.values()):
                    kept.close()
                os.close(status)
                return _become(json.loads(content), output)
            os.close(output)
            with suppress(OSError):  # the child was first, or has ended
                os.setpgid(pid, pid)
            children[pid] = socket.socket(fileno=status)
            control.send(str(pid).encode())


def _import() -> None:
    """In the order of `lora_serve serve`."""
    from lora_serve.commands import serve  # noqa: F401
    from lora_serve.core.settings import command_line  # noqa: F401
    from lora_serve.model.loading.transformers_import import import_transformers

    import_transformers("none", str(ROOT / "lora_serve" / "demo_data" / "model"))
    from transformers.models.llama import modeling_llama  # noqa: F401

    import lora_serve.app.launch
    import lora_serve.app.serving
    import lora_serve.engine_host.hosts.thread  # noqa: F401


def _reap(children: dict[int, socket.socket]) -> None:
    """Tells of the ends of children, as Popen counts them."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            with children.pop(found[0]) as status, suppress(OSError):
                status.send(str(os.waitstatus_to_exitcode(found[1])).encode())


def _become(request: Mapping[str, Any], output: int) -> list[str]:
    with suppress(OSError):
        os.setpgid(0, 0)
    for number in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    arguments: list[str] = request["arguments"]
    sys.argv[:] = ["lora-serve", *arguments]
    return arguments


if __name__ == "__main__":
    given = main()
    from lora_serve.cli import main as lora_serve

    sys.exit(lora_serve(given))
