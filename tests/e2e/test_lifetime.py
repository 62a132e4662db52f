"""Start, registration, kill -9, restart, drain: a real server process each time."""

from __future__ import annotations

import asyncio
import http.client
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import aiohttp
import pytest

from lora_serve.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.merged import save_sibling
from tests.e2e.plain_http import call


def test_acknowledged_registrations_survive_kill_minus_nine(site: Site) -> None:
    folders = [save_sibling(site.adapters["acme/a"], site.root / "kill" / str(i), 1000 + i) for i in range(60)]
    acknowledged: list[str] = []
    with ServerProcess(site.arguments("kill-store", "--warmup", "off"), site.root / "kill-log") as process:
        process.wait_until_ready(90)

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
    with ServerProcess(site.arguments("kill-store", "--warmup", "off"), site.root / "kill-log") as process:
        process.wait_until_ready(90)
        listed = {card["id"] for card in call(f"{process.url}/v1/models").json["data"]}
        assert set(acknowledged) <= listed
        for name in listed - {"tiny"}:
            body = {"model": name, "prompt": [5, 6], "max_tokens": 2}
            assert call(f"{process.url}/v1/completions", body).status == 200
    assert process.exit_code == 0


async def test_sigterm_lets_running_streams_end_uncut_and_refuses_new_requests(site: Site) -> None:
    with ServerProcess(site.arguments("drain-store", "--warmup", "off"), site.root / "drain-log") as process:
        await asyncio.to_thread(process.wait_until_ready, 90)
        body = {"model": "tiny", "prompt": [5], "max_tokens": 90, "stream": True, "ignore_eos": True, "temperature": 0}
        async with aiohttp.ClientSession(process.url) as session:
            async with session.post("/v1/completions", json=body) as response:
                lines = aiter(response.content)
                await anext(lines)
                subprocess.run(["kill", f"-{signal.SIGTERM.value}", str(process.pid)], check=True)
                await asyncio.sleep(0.05)
                async with session.get("/ready") as ready:
                    assert ready.status == 503
                async with session.post("/v1/completions", json={**body, "stream": False}) as refused:
                    assert refused.status == 503
                    assert int(refused.headers["Retry-After"]) >= 1
                rest = [line async for line in lines if line.strip()]
            assert rest[-1].strip() == b"data: [DONE]"
            assert b'"finish_reason": "length"' in rest[-2] or b'"finish_reason":"length"' in rest[-2]
        assert await asyncio.to_thread(process.wait) == 0


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
