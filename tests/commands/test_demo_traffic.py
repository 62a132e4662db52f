"""The demo's endless traffic: who asks what, with whose key, and how it ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from lora_serve.commands import demo, demo_traffic
from lora_serve.commands.demo_traffic import Questions, prompts_by_adapter, send_traffic
from lora_serve.commands.server_process import free_port
from lora_serve.core.errors import ConfigError

PROMPTS = prompts_by_adapter(json.loads((demo.DATA / "prompts.json").read_text()))


async def test_enter_ends_the_traffic_alone() -> None:
    ours, theirs = pty.openpty()
    with open(theirs) as terminal, open(ours, "wb", buffering=0) as typing:
        traffic = asyncio.create_task(asyncio.sleep(60))
        assert demo_traffic.ends_at_enter(traffic, terminal)
        typing.write(b"\n")
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(traffic, 30)
    with open(os.devnull) as nothing:
        assert not demo_traffic.ends_at_enter(traffic, nothing)


def questions() -> Questions:
    return Questions(PROMPTS, "demo-base", seed=3)


def test_every_adapter_and_the_base_are_asked_and_some_more_than_others() -> None:
    source = questions()
    asked = Counter(source.next().body["model"] for _ in range(600))
    assert set(asked) == {*PROMPTS, "demo-base"}
    assert max(asked.values()) > 3 * min(asked.values())


def test_questions_fit_the_model_and_differ() -> None:
    source = questions()
    asks = [source.next() for _ in range(300)]
    assert {len(ask.body["messages"]) for ask in asks} == {1, 7}
    assert all(ask.body["min_tokens"] <= ask.body["max_tokens"] <= demo_traffic.MAX_TOKENS for ask in asks)
    assert len({json.dumps(dict(ask.body)) for ask in asks}) == len(asks)
    assert 0 < sum(ask.leaves for ask in asks) < 30


def test_a_burst_is_of_one_or_two_adapters() -> None:
    source = questions()
    for _ in range(20):
        burst = source.burst()
        assert 12 <= len(burst) <= 24
        assert len({ask.tenant for ask in burst}) <= 2


async def test_each_tenant_asks_with_its_own_key_until_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_traffic, "PAUSE_SECONDS", 0.001)
    seen: list[tuple[str, str]] = []
    enough = asyncio.Event()
    counter = itertools.count()

    async def tenant(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer the-admin-key"
        return web.json_response({}, status=409 if next(counter) % 2 else 201)

    async def key(request: web.Request) -> web.Response:
        assert (await request.json())["role"] == "inference"
        return web.json_response({"secret": f"key-of-{request.match_info['tenant']}"}, status=201)

    async def chat(request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        seen.append((request.headers["Authorization"].removeprefix("Bearer key-of-"), body["model"]))
        if len(seen) > 100:
            enough.set()
        return web.json_response({}, status=503 if len(seen) == 7 else 200)

    made = web.Application()
    made.router.add_post("/admin/tenants", tenant)
    made.router.add_post("/admin/tenants/{tenant}/keys", key)
    made.router.add_post("/v1/chat/completions", chat)
    tenants = sorted({name.partition("/")[0] for name in PROMPTS})
    async with TestServer(made) as server:
        url = str(server.make_url("/"))
        sending = asyncio.create_task(send_traffic(url, "the-admin-key", questions(), tenants))
        await asyncio.wait_for(enough.wait(), 20)
    await asyncio.wait_for(sending, 20)  # it ends by itself
    assert all(model.startswith(f"{tenant}/") or model == "demo-base" for tenant, model in seen)
    assert len({tenant for tenant, _ in seen}) > 4


def test_traffic_and_once_are_not_asked_for_together() -> None:
    with pytest.raises(ConfigError, match="--traffic"):
        demo.run(["--once", "--traffic"])


@pytest.mark.nightly  # a server
def test_the_demo_with_traffic_prints_the_console_first_and_keeps_its_tenants_busy() -> None:
    port = free_port()
    command = [sys.executable, "-u", "-m", "lora_serve", "demo", "--traffic", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == f"The console: http://127.0.0.1:{port}/ui/#/live\n"
        place = next(line.split()[-1] for line in child.stdout if line.startswith("The admin key is in"))
        key = Path(place).read_text().strip()
        tenants = busy_tenants(f"http://127.0.0.1:{port}/admin/engine/stream", key)
        child.send_signal(signal.SIGTERM)
        assert child.wait(40) == 0
    assert len(tenants) >= 4


def busy_tenants(url: str, key: str) -> set[str]:
    """The tenants of the requests in the first frames."""
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    found: set[str] = set()
    with urllib.request.urlopen(asked, timeout=60) as answer:
        frames = (json.loads(line[6:]) for line in answer if line.startswith(b'data: {"time"'))
        for frame in itertools.islice(frames, 100):
            found |= {request["tenant"] for request in frame["requests"]}
            if len(found) >= 4:
                break
    return found
