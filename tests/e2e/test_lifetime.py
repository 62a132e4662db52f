"""Start, registration, kill -9, restart, drain: a real server process each time."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lora_serve.commands.server_process import ServerProcess
from lora_serve.core.process import running_servers
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.merged import save_sibling
from tests.e2e.plain_http import call


@pytest.mark.nightly  # by day: tests/faults/test_process_faults.py
def test_acknowledged_registrations_survive_kill_minus_nine(site: Site) -> None:
    folders = [save_sibling(site.adapters["acme/a"], site.root / "kill" / str(i), 1000 + i) for i in range(60)]
    acknowledged: list[str] = []
    with site.serving("kill", "--warmup", "off") as process:

        def register() -> None:
            for index, folder in enumerate(folders):
                body = {"id": f"k{index}/bot", "source": str(folder)}
                try:
                    acknowledged.append(call(f"{process.url}/admin/adapters", body, ADMIN).json["id"])
                except (OSError, http.client.HTTPException):
                    return  # the server was killed

        thread = threading.Thread(target=register)
        thread.start()
        while len(acknowledged) < 12 and thread.is_alive():
            time.sleep(0.002)
        subprocess.run(["kill", "-9", str(process.pid)], check=True)
        process.wait()
        thread.join()
    assert 12 <= len(acknowledged) < 60, "the kill must hit the middle of the registrations"
    with site.serving("kill", "--warmup", "off") as process:
        listed = {card["id"] for card in call(f"{process.url}/v1/models").json["data"]}
        assert set(acknowledged) <= listed
        for name in listed - {"tiny"}:
            body = {"model": name, "prompt": [5, 6], "max_tokens": 2}
            assert call(f"{process.url}/v1/completions", body).status == 200
    assert process.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/nowhere/at/all"], "--model"),
        (["--model", ".", "--port", "x"], "--port"),
        (["--model", ".", "--dtype", "int3"], "--dtype"),
    ],
)
def test_wrong_start_exits_with_two_and_names_the_flag(arguments: list[str], words: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lora_serve", "serve", *arguments, "--store", str(tmp_path / "store")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_find_a_running_server_by_themselves(site: Site, server: ServerProcess) -> None:
    assert (server.url, str(site.store("store"))) in {(note.url, note.store) for note in running_servers()}
