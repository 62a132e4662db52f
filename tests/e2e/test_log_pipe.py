"""The log's reader may be slow, absent or out of room: the server answers all the same, and ends in time."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from lora_serve.commands.server_process import HOST, ServerProcess
from tests.e2e.answers import metric
from tests.e2e.conftest import Site
from tests.e2e.plain_http import call
from tests.e2e.processes import children_of, eventually, is_alive
from tests.tiers import mostly_nightly

pytestmark = pytest.mark.timeout(300)

NUM_REQUESTS = 3000  # 6 MB of log, where a pipe holds 64 kB and the server's queue 4 MiB
SLOWEST = 2.0  # seconds for the slowest of 100 answers, on a busy machine
ENDED = 15.0  # seconds from SIGTERM


class UnreadPipe:
    """A named pipe with a reader that reads when it is told to."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def leave(self) -> None:
        os.close(self._end)

    def read_all(self) -> str:
        """Whatever is written until every writer has ended."""
        os.set_blocking(self._end, True)
        with os.fdopen(self._end, "rb") as file:
            return file.read().decode()

    def read_until(self, words: str) -> str:
        """To the end of the line with these words."""
        found = b""

        def is_there() -> bool:
            nonlocal found
            with suppress(BlockingIOError):
                found += os.read(self._end, 2**20)
            return words.encode() in found and found.endswith(b"\n")

        eventually(is_there, f"not said: {words}")
        return found.decode()


def entries_of(text: str) -> list[Any]:
    """Every line is whole."""
    return [json.loads(line) for line in text.splitlines()]


def logging_to(log: Path, site: Site, name: str, closed: bool = False) -> AbstractContextManager[ServerProcess]:
    """`closed`: the server's standard streams."""
    wrapper = ["/bin/sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-'] if closed else []
    return site.serving(name, "--warmup", "off", "--log-format", "json", log=log, wrapper=wrapper)


def seconds_of_each(process: ServerProcess, count: int) -> list[float]:
    """Each answer is a line of log of two kilobytes."""
    connection = http.client.HTTPConnection(HOST, process.port, timeout=20)
    seconds = []
    for number in range(count):
        start = time.monotonic()
        connection.request("GET", f"/nothing/{number:0900}")
        answer = connection.getresponse()
        answer.read()
        seconds.append(time.monotonic() - start)
        assert answer.status == 404
    connection.close()
    return sorted(seconds)


def complete(process: ServerProcess) -> int:
    body = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
    return call(f"{process.url}/v1/completions", body).status


def exit_code(process: ServerProcess) -> int:
    """SIGTERM, once; well within what --shutdown-timeout and the last resort would take."""
    start = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    eventually(lambda: process.exit_code is not None, "it waits for a reader")
    assert time.monotonic() - start < ENDED
    return process.wait()


@pytest.mark.engines("thread", nightly=["process"])
def test_log_pipe_that_nobody_reads_delays_no_answer_and_no_end(site: Site, tmp_path: Path) -> None:
    pipe = UnreadPipe(tmp_path / "log")
    with logging_to(pipe.path, site, "unread") as process:
        children = children_of(process.pid)
        seconds = seconds_of_each(process, NUM_REQUESTS)
        assert seconds[len(seconds) * 99 // 100] < SLOWEST
        assert complete(process) == 200
        assert metric(process, "lora_serve_log_records_dropped_total") > 0
        entries = entries_of(pipe.read_until("records were dropped"))
        assert {entry["status"] for entry in entries if entry["logger"] == "lora_serve.access"} >= {404}
        seconds_of_each(process, 100)
        assert exit_code(process) == 0
        assert not any(is_alive(child) for child in children)
    assert entries_of(pipe.read_all())


@pytest.mark.parametrize("way", mostly_nightly(["full", "left", "closed"], "left"))
def test_log_that_cannot_be_written_disturbs_nobody(site: Site, tmp_path: Path, way: str) -> None:
    """A full disk, a reader that has left, and standard streams that were closed from the start."""
    pipe = UnreadPipe(tmp_path / "log") if way == "left" else None
    log = Path("/dev/full") if way == "full" else tmp_path / "log"
    with logging_to(log, site, f"log-{way}", closed=way == "closed") as process:
        if pipe is not None:
            pipe.leave()
        seconds_of_each(process, 300)
        assert complete(process) == 200
        if way == "closed":
            assert os.readlink(f"/proc/{process.pid}/fd/2") == os.devnull
        assert exit_code(process) == 0
