"""A server that is told to stop while its cluster starts gives the start up, and leaves nothing of it."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lora_serve.core.errors import ConfigError
from lora_serve.core.settings import Settings
from lora_serve.engine_host.fleet import node
from lora_serve.engine_host.hosts import ray as ray_host


async def test_a_cancelled_start_is_halted_and_what_it_had_begun_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()

    @contextmanager
    def opening(config: object, halted: threading.Event) -> Iterator[None]:
        loop.call_soon_threadsafe(begun.set)
        assert halted.wait(20)
        told.append("halted")
        time.sleep(0.1)  # it could not be given up any more
        yield
        told.append("closed")

    monkeypatch.setattr(ray_host, "open_cluster", opening)
    monkeypatch.setattr(ray_host, "check_model_files", lambda model, has_weights: None)
    nothing: Any = None
    host = ray_host.open_host(Settings(model="a/model", engine="ray"), nothing, lambda: nothing)
    async with AsyncExitStack() as stack:
        start = asyncio.create_task(stack.enter_async_context(host))
        await begun.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert told == ["halted", "closed"]


def test_nobody_waits_for_a_node_once_the_start_is_halted(tmp_path: Path) -> None:
    halted = threading.Event()
    halted.set()
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with pytest.raises(ConfigError, match="not here: it was told to stop"):
                node._address(tmp_path, process, 60.0, "not here", halted)
        finally:
            process.kill()
