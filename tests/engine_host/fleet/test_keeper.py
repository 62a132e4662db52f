"""The keeper ends what it has started, however the server ends. `sleep` stands for Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_serve.engine_host.fleet import keeper
from lora_serve.engine_host.fleet.keeper import processes


def kept(folder: Path, script: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", keeper.__file__, str(folder), "bash", "-c", script]
    return subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)


def until(is_so: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray"


@pytest.fixture
def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    # As Ray's raylet, which stays when the command ends and starts each worker in a group of its own.
    process = kept(folder, "bash -c 'set -m; sleep 300 & echo started; wait' & exec sleep 300")
    assert until(lambda: (folder / keeper.LOG).exists() and "started" in (folder / keeper.LOG).read_text())
    yield process
    process.kill()
    process.communicate()
    keeper.end_processes(process.pid)


def test_a_closed_pipe_ends_all_processes_and_deletes_the_folder(
    running: subprocess.Popen[bytes], folder: Path
) -> None:
    assert len(processes(running.pid)) == 4
    running.communicate(timeout=10)  # closes it, as when the server is killed
    assert running.returncode == 0
    assert not processes(running.pid)
    assert not folder.exists()


def test_a_terminals_signals_do_not_end_the_keeper(running: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        running.send_signal(number)
    time.sleep(0.2)
    assert running.poll() is None
    assert len(processes(running.pid)) == 4


def test_the_command_ends_with_a_killed_keeper(running: subprocess.Popen[bytes]) -> None:
    running.kill()
    running.wait()
    assert until(lambda: len(processes(running.pid)) == 2)  # what the command had started; Ray's end with it
    keeper.end_processes(running.pid)
    assert not processes(running.pid)


def test_a_command_that_ends_is_noted_and_its_orphans_are_waited_for(folder: Path) -> None:
    process = kept(folder, "(sleep 0.1 &) ; echo why >&2; exit 3")
    try:
        assert until(lambda: (folder / keeper.ENDED).exists())
        assert (folder / keeper.LOG).read_text() == "why\n"
        time.sleep(0.3)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        assert children == ""  # no zombie either
        assert process.poll() is None
    finally:
        process.communicate()
    assert not os.path.exists(folder)
