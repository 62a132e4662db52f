"""A forked server is one that was started: it answers, ends by signals, and has its own environment and log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from lora_serve.commands import server_process
from lora_serve.commands.server_process import ServerFailedError, ServerProcess
from tests.zygote import FORKING, ForkedServer, zygote

MODEL = Path(server_process.__file__).parents[1] / "demo_data" / "model"


@pytest.fixture(autouse=True)
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """By night, too."""
    monkeypatch.setattr(server_process, "subprocess", FORKING)


def server(tmp_path: Path, *flags: str) -> ServerProcess:
    arguments = ["--model", str(MODEL), "--store", str(tmp_path / "store"), "--engine", "thread", *flags]
    return ServerProcess(arguments, tmp_path / "log")


def test_forked_servers_answer_and_end_by_signals_each_in_a_group_of_its_own(tmp_path: Path) -> None:
    codes = {}
    for number in (signal.SIGTERM, signal.SIGKILL):
        with server(tmp_path, "--warmup", "off") as process:
            assert isinstance(process._child, ForkedServer)
            process.wait_until_ready(60)
            assert os.getpgid(process.pid) == process.pid
            with urllib.request.urlopen(f"{process.url}/v1/models") as answer:
                assert json.load(answer)["data"]
            with pytest.raises(subprocess.TimeoutExpired):
                process._child.wait(0.01)
            assert process.exit_code is None
            os.kill(process.pid, number)
            codes[number] = process.wait()
            assert process.exit_code == codes[number]
        assert ("stopped" in process.tail()) == (number == signal.SIGTERM)
    assert codes == {signal.SIGTERM: 0, signal.SIGKILL: -signal.SIGKILL}


def test_wrong_flags_end_a_forked_server_with_its_words(tmp_path: Path) -> None:
    with server(tmp_path, "--max-loras", "none") as process, pytest.raises(ServerFailedError, match="max-loras"):
        process.wait_until_ready(60)
    assert process.exit_code == 2


def test_what_is_not_the_same_is_started_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zygote()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with server(tmp_path, "--max-loras", "none") as process:
        assert isinstance(process._child, subprocess.Popen)
        assert process.wait() == 2
    monkeypatch.undo()
    monkeypatch.setattr(server_process, "subprocess", FORKING)
    with ServerProcess(["--engine", "process", "--max-loras", "none"], tmp_path / "log") as process:
        assert isinstance(process._child, subprocess.Popen)
        assert process.wait() == 2
