"""Registering from URLs, the hub and folders over HTTP: what is answered, and what is not held up meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lora_serve.adapters.sources.archive_url import ArchiveUrlSource
from lora_serve.adapters.sources.base import OnBytes
from lora_serve.adapters.sources.folder import FolderSource
from lora_serve.adapters.sources.hub import HubSource
from lora_serve.adapters.sources.table import SourceTable
from lora_serve.app.warm_up import register_modules
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import NotReadyError
from lora_serve.server.background.tasks import NUM_TRANSFERS, Staging
from tests.fake_hub import COMMIT, FakeHub
from tests.http_thread import serving
from tests.server.admin.test_upload import NAMES, nothing_left, tar_of


class Shelf:
    """Archives by name on a web server of our own."""

    def __init__(self) -> None:
        self.archives: dict[str, bytes] = {}
        self.hub = FakeHub()
        self.url = self.hub_url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{name}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        content = self.archives.get(request.match_info["name"])
        return web.Response(status=404) if content is None else web.Response(body=content)


class SlowSource:
    """Waits until it is let go; counts who is inside."""

    def __init__(self, folders: FolderSource) -> None:
        self._folders = folders
        self.go = threading.Event()
        self.inside = threading.Semaphore(0)
        self.num_inside = 0

    def fetch(self, source: str, target: Path, limit: int, progress: OnBytes) -> str:
        self.num_inside += 1
        self.inside.release()
        (target / "half").write_bytes(b"x")
        while not self.go.wait(0.01):
            progress(1)
        (target / "half").unlink()
        return self._folders.fetch(source.removeprefix("slow://"), target, limit, progress)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    shelf = Shelf()
    with serving(shelf.app()) as shelf.url, serving(shelf.hub.app()) as shelf.hub_url:
        yield shelf


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowSource]:
    source = SlowSource(FolderSource((tmp_path / "root",)))
    yield source
    source.go.set()


@pytest.fixture
def sources(shelf: Shelf, slow: SlowSource) -> Callable[[AdapterConfig], SourceTable]:
    def build(config: AdapterConfig) -> SourceTable:
        url, hub = ArchiveUrlSource([shelf.url]), HubSource(shelf.hub_url)
        return SourceTable({"": FolderSource(config.adapter_root), "http": url, "hf": hub, "slow": slow})

    return build


async def register(session: aiohttp.ClientSession, source: str, name: str = "acme/a", **more: Any) -> tuple[int, Any]:
    async with session.post("/admin/adapters", json={"id": name, "source": source, **more}) as answer:
        return answer.status, await answer.json()


async def inside(slow: SlowSource) -> None:
    assert await asyncio.to_thread(slow.inside.acquire, timeout=60)


async def test_archive_behind_a_url(admin: aiohttp.ClientSession, house: Any, shelf: Shelf) -> None:
    shelf.archives["a.tar"] = tar_of(house.make_adapter("a"))
    status, card = await register(admin, f"{shelf.url}/a.tar?signature=secret", tenant="globex", pin=True)
    assert status == 201, card
    assert (card["source"], card["tenant"], card["pinned"]) == (f"{shelf.url}/a.tar", "globex", True)
    assert (await register(admin, f"{shelf.url}/a.tar"))[0] == 200
    async with admin.post("/v1/completions", json={"model": "acme/a", "prompt": "x"}) as answer:
        assert answer.status == 200
    assert await nothing_left(house)


async def test_hub_repository(admin: aiohttp.ClientSession, house: Any, shelf: Shelf) -> None:
    folder = house.make_adapter("a")
    shelf.hub.repos["org/a"] = {name: (folder / name).read_bytes() for name in NAMES}
    status, card = await register(admin, "hf://org/a@main")
    assert (status, card["source"]) == (201, f"hf://org/a@{COMMIT}"), card
    assert (await register(admin, str(folder)))[0] == 200  # the same content, whichever way it came


async def test_failures_are_told_and_leave_nothing(admin: aiohttp.ClientSession, house: Any, shelf: Shelf) -> None:
    shelf.archives["html"] = b"<html>" * 1000
    shelf.hub.status = 503
    cases = {
        f"{shelf.url}/missing.tar": (400, "source"),
        f"{shelf.url}/html": (422, None),
        "http://127.0.0.1:1/x": (400, "source"),
        "hf://org/a": (503, None),
        "hf://a": (400, "source"),
        "s3://bucket/a": (400, "source"),
    }
    for source, expected in cases.items():
        status, answer = await register(admin, source)
        assert (status, answer["error"]["param"]) == expected, answer
    assert await nothing_left(house)
    assert house.services.catalog.snapshot.page() == ()


async def test_foreign_tenant_is_refused_before_anything_is_fetched(
    admin: aiohttp.ClientSession, house: Any, slow: SlowSource
) -> None:
    await house.register("acme/a", tenant="acme")
    status, _ = await register(admin, "slow://a", tenant="globex")
    assert (status, slow.num_inside) == (409, 0)


async def test_slow_source_holds_up_no_other_registration(
    admin: aiohttp.ClientSession, house: Any, slow: SlowSource
) -> None:
    folder = house.make_adapter("a")
    waiting = asyncio.create_task(register(admin, f"slow://{folder}", "acme/slow"))
    await inside(slow)
    assert (await register(admin, str(folder), "acme/fast"))[0] == 201
    assert not waiting.done()
    slow.go.set()
    assert (await waiting)[0] == 201


async def test_no_more_than_a_few_transfers_run_at_once(
    admin: aiohttp.ClientSession, house: Any, slow: SlowSource
) -> None:
    folder = house.make_adapter("a")
    calls = [register(admin, f"slow://{folder}", f"tenant-{i}/a") for i in range(NUM_TRANSFERS + 2)]
    waiting = [asyncio.create_task(call) for call in calls]
    for _ in range(NUM_TRANSFERS):
        await inside(slow)
    assert not await asyncio.to_thread(slow.inside.acquire, timeout=0.2)
    slow.go.set()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [201] * (NUM_TRANSFERS + 2)


async def test_transfers_of_one_tenant_leave_a_thread_to_others(
    admin: aiohttp.ClientSession, house: Any, slow: SlowSource
) -> None:
    folder = house.make_adapter("a")
    calls = [register(admin, f"slow://{folder}", f"acme/{i}") for i in range(NUM_TRANSFERS + 2)]
    waiting = [asyncio.create_task(call) for call in calls]
    for _ in range(NUM_TRANSFERS - 1):
        await inside(slow)
    assert (await register(admin, str(folder), "globex/a"))[0] == 201
    slow.go.set()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [201] * (NUM_TRANSFERS + 2)


async def test_registration_is_completed_though_its_client_leaves(house: Any, slow: SlowSource) -> None:
    folder = house.make_adapter("a")
    async with aiohttp.ClientSession(house.url, headers={"Authorization": "Bearer admin-key-of-the-tests"}) as session:
        call = asyncio.create_task(register(session, f"slow://{folder}"))
        await inside(slow)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    slow.go.set()
    assert await nothing_left(house)
    assert house.services.catalog.entry("acme/a").versions[0].source == f"folder {folder}"


async def test_shutdown_breaks_transfers_off_and_leaves_nothing(
    admin: aiohttp.ClientSession, house: Any, slow: SlowSource
) -> None:
    folder = house.make_adapter("a")
    calls = [register(admin, f"slow://{folder}", f"acme/{i}") for i in range(NUM_TRANSFERS + 1)]
    waiting = [asyncio.create_task(call) for call in calls]
    await inside(slow)
    house.services.staging.close()
    for status, answer in await asyncio.gather(*waiting):
        assert (status, "shutting down" in answer["error"]["message"]) == (503, True)
    assert (await register(admin, str(folder)))[0] == 503
    assert await nothing_left(house)


async def test_cancelled_wait_removes_what_still_comes(house: Any, slow: SlowSource) -> None:
    staging: Staging = house.services.staging
    task = asyncio.create_task(staging.stage(f"slow://{house.make_adapter('a')}"))
    await inside(slow)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    slow.go.set()
    await asyncio.to_thread(staging._threads.close)
    assert await nothing_left(house)
    with pytest.raises(NotReadyError):
        await staging.stage("a")


async def test_vllms_call_takes_the_same_sources(admin: aiohttp.ClientSession, house: Any, shelf: Shelf) -> None:
    shelf.archives["a.tar"] = tar_of(house.make_adapter("a"))
    shelf.archives["b.tar"] = tar_of(house.make_adapter("b", seed=1))

    async def load(path: str) -> tuple[int, str]:
        async with admin.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": path}) as answer:
            return answer.status, await answer.text()

    assert (await load(f"{shelf.url}/a.tar"))[0] == 200
    assert (await load(f"{shelf.url}/a.tar"))[0] == 200
    assert (await load(f"{shelf.url}/b.tar"))[0] == 400
    status, text = await load(f"{shelf.url}/c.tar?signature=secret")
    assert status == 404
    assert "Loading lora sql failed: The URL answers with status 404" in text
    assert "secret" not in text
    assert await nothing_left(house)
    assert len(house.services.catalog.entry("sql").versions) == 1


async def test_adapters_of_the_command_line_may_come_from_a_source(
    house: Any, shelf: Shelf, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    shelf.archives["a.tar"] = tar_of(house.make_adapter("a"))
    await register_modules(house.services, (f"sql={shelf.url}/a.tar", f"plain={house.make_adapter('b')}"))
    assert house.services.catalog.entry("sql").versions[0].source == f"{shelf.url}/a.tar"
    assert house.services.catalog.entry("plain").versions[0].source == f"folder {house.root}/b"
    assert [name for name in ("sql@1", "plain@1") if f"--lora-modules: {name} is registered" not in caplog.text] == []
    assert await nothing_left(house)
