"""A fleet that is interrupted while it starts, and one whose cluster ends by itself."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import Site
from tests.e2e.processes import descendants_of, eventually, is_alive
from tests.engine_choice import hosted_by

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.0, 4.0, 8.0, None])
def test_ctrl_c_during_the_start_or_after_it_ends_it_quietly_and_leaves_no_process(
    files: Site, tmp_path: Path, seconds: float | None
) -> None:
    arguments = files.arguments("interrupted", "--warmup", "off", "--engine", "ray")
    with ServerProcess(arguments, tmp_path / "log") as server:
        server.wait_until_ready(200) if seconds is None else time.sleep(seconds)
        started, begun = descendants_of(server.pid), time.monotonic()
        os.kill(server.pid, signal.SIGINT)
        assert server.wait() in (0, 130, -signal.SIGINT)  # a shell shows 130 for the last of them, too
        took = time.monotonic() - begun
        assert seconds is not None or took < 4, "an idle fleet takes 1 s; 5 if Ray waits for its node to drain"
    told = (tmp_path / "log").read_text()
    assert "Traceback" not in told
    assert any(word in told.splitlines()[-1] for word in ("interrupted", "stopped"))
    eventually(lambda: not any(map(is_alive, started)), "Ray's processes outlive their server")


def test_every_line_is_json_when_the_heart_of_ray_dies(files: Site, tmp_path: Path) -> None:
    arguments = files.arguments("json", "--warmup", "off", "--log-format", "json")
    with hosted_by("ray").serving(arguments, tmp_path / "log") as server:
        server.wait_until_ready(200)
        os.kill(_gcs_below(server), signal.SIGKILL)
        assert server.wait() == 3
    entries = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert any("the engine is lost for good" in entry["message"] for entry in entries)


def _gcs_below(server: ServerProcess) -> int:
    (pid,) = (pid for pid in descendants_of(server.pid) if Path(f"/proc/{pid}/comm").read_text() == "gcs_server\n")
    return pid
