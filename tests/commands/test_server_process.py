"""The child process around the server: ready, failed and stopped, seen from its parent."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerFailedError, ServerProcess, free_port, is_port_free
from lora_serve.core.process import KERNELS


def test_a_server_that_cannot_start_fails_at_once_with_its_own_words(tmp_path: Path) -> None:
    with (
        ServerProcess(["--model", str(tmp_path), "--port-of-call", "1"], tmp_path / "log") as server,
        pytest.raises(ServerFailedError, match=r"ended with code 2(.|\n)*port-of-call"),
    ):
        server.wait_until_ready(60)


def test_settings_in_the_environment_do_not_reach_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_SERVE_DEVICE", "abacus")
    with (
        ServerProcess(["--model", str(tmp_path / "nothing")], tmp_path / "log") as server,
        pytest.raises(ServerFailedError) as caught,
    ):
        server.wait_until_ready(60)
    assert "abacus" not in str(caught.value)


def test_level_of_the_kernels_reaches_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS, "abacus")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with (
        ServerProcess(["--model", str(model)], tmp_path / "log") as server,
        pytest.raises(ServerFailedError, match="LORA_SERVE_KERNELS=abacus: not one of"),
    ):
        server.wait_until_ready(60)


def test_a_server_that_is_late_is_reported_and_ended(tmp_path: Path) -> None:
    with ServerProcess(["--model", str(tmp_path)], tmp_path / "log") as server:
        with pytest.raises(ServerFailedError, match="not ready after 0 s"):
            server.wait_until_ready(0)
        assert server.exit_code is None
    assert server.exit_code is not None


def test_a_server_is_in_this_session_and_in_a_group_of_its_own(tmp_path: Path) -> None:
    with ServerProcess(["--model", str(tmp_path)], tmp_path / "log") as server:
        assert os.getsid(server.pid) == os.getsid(0)
        assert os.getpgid(server.pid) == server.pid


def test_a_taken_port_is_not_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not is_port_free(taken.getsockname()[1])
    assert is_port_free(free_port())
