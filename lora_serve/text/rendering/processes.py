"""The server's side of the rendering processes: started when they are needed, ended when one does not answer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lora_serve
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.text.marked import Marked, Marks
from lora_serve.text.rendering.wire import ClosedError, frame_of, packed, receive, send

_WORKER = "lora_serve.text.rendering.worker"
_ENVIRONMENT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
SECONDS = 0.5
_START_SECONDS = 60.0
_ANSWER_SECONDS = 10.0  # the process ends by itself long before, unless the machine stands still
_MIN_CHARACTERS = 2**20  # that any chat may have
_GROWTH = 8  # characters that a template may write for each that it is given


class TemplateFaultError(Exception):
    """The template itself is wrong, or refuses what it was given. `line`: where, if that is known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


class TemplateLimitError(Exception):
    """The template asks for more than it may have."""


class TemplateProcesses:
    """Every method may be called from any thread, and waits."""

    def __init__(self, num_processes: int = 2, seconds: float = SECONDS) -> None:
        """`seconds`: of the processor, for one template."""
        self._seconds = seconds
        self._free = threading.Semaphore(num_processes)
        self._idle: list[_Process] = []
        self._lock = threading.Lock()
        self._is_closed = False
        self._finalizer = weakref.finalize(self, _end_all, self._idle)

    def fault_in(self, source: str) -> str | None:
        """The reason why a text is no template; None: it is one. Raises AdapterUnavailableError."""
        try:
            self._ask({"source": source}, 0)
        except (TemplateFaultError, TemplateLimitError) as error:
            return str(error)
        return None

    def render(self, source: str, names: Mapping[str, Any], marks: Marks | None = None) -> Marked:
        """The text that a template writes. `marks`: of the marked texts in `names`.

        Raises TemplateFaultError, TemplateLimitError, AdapterUnavailableError.
        """
        meanings = {} if marks is None else dict(marks.meanings)
        answer = self._ask(
            {"source": source, "render": {"names": packed(names), "meanings": meanings}}, _MIN_CHARACTERS
        )
        meaning = str.__str__ if marks is None else marks.meaning
        return Marked(str(answer["text"]), str(answer["true"]), meaning)

    def close(self) -> None:
        """End the processes; those at work when they have answered."""
        with self._lock:
            self._is_closed = True
        self._finalizer()

    def _ask(self, job: dict[str, Any], max_characters: int) -> dict[str, Any]:
        frame = frame_of(job)
        most = max(max_characters, _GROWTH * len(frame))
        with self._free:
            process = self._take()
            try:
                answer = process.ask(frame_of({**job, "max_characters": most}), most)
            except BaseException:
                process.end()
                raise
            self._give_back(process)
        if "limit" in answer:
            raise TemplateLimitError(str(answer["limit"]))
        if "error" in answer:
            raise TemplateFaultError(str(answer["error"]), answer.get("line"))
        return answer

    def _take(self) -> _Process:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Process(self._seconds)

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
                return
        process.end()


class _Process:
    """One rendering process, which does one job after another."""

    def __init__(self, seconds: float) -> None:
        """Raises AdapterUnavailableError if it does not start."""
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(_START_SECONDS)
        own = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        own["PYTHONPATH"] = str(Path(lora_serve.__file__).resolve().parents[1])
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _WORKER, str(seconds)], stdin=theirs.fileno(), env=own
                )
        except OSError as error:
            self._connection.close()
            raise _unavailable() from error
        try:
            receive(self._connection, 2)  # it is ready
        except (ClosedError, OSError) as error:
            self.end()
            raise _unavailable() from error

    def ask(self, frame: bytes, max_characters: int) -> dict[str, Any]:
        """The answer to a job. Raises TemplateLimitError if there is none."""
        self._connection.settimeout(_ANSWER_SECONDS)
        try:
            send(self._connection, frame)
            found = json.loads(receive(self._connection, 12 * max_characters + 2**16))
        except (ClosedError, OSError, ValueError, RecursionError):
            raise TemplateLimitError("it takes more time or memory than there may be") from None
        return found if isinstance(found, dict) else {}

    def end(self) -> None:
        """End the process, whatever it does."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()


def _unavailable() -> AdapterUnavailableError:
    return AdapterUnavailableError("The adapter's chat template cannot be rendered at present; try again.")
