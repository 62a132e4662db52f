"""GET /admin/engine/stream: who may read it, that each event is as promised, and how it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from lora_serve.console.live import hub as hub_module
from lora_serve.server import console as stream_module
from lora_serve.server.route import EVENTS
from tests.mock_engine import MockReply
from tests.server.answer_schemas import faults_of
from tests.server.conftest import ADMIN, BASE, House
from tests.server.tenants import Tenancy, tenancy_of

PATH = "/admin/engine/stream"
FOREIGN = "globex"


@pytest.fixture
def auth_required() -> bool:
    return True


@pytest.fixture
async def tenancy(house: House) -> AsyncIterator[Tenancy]:
    """Two tenants, each with an adapter; what each may not see of the other has its name in it."""
    async with tenancy_of(house) as tenancy:
        for name in ("acme", FOREIGN):
            await tenancy.tenant(name)
            await house.register(f"{name}/a", seed=len(name), tenant=name)
        yield tenancy


class Events:
    """The events of a stream, each checked against /openapi.json."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.raw = b""

    async def next(self) -> tuple[str, dict[str, Any]]:
        async with asyncio.timeout(60):
            name, data = await self._line("event: "), await self._line("data: ")
        found = json.loads(data)
        assert faults_of("GET", PATH, EVENTS, found) == []
        return name, found

    async def frame(self) -> dict[str, Any]:
        name, frame = await self.next()
        assert name == "frame"
        return frame

    async def bye(self) -> str:
        """The reason of the end, which is the end."""
        while (event := await self.next())[0] == "frame":
            pass
        assert event[0] == "bye"
        assert await self.response.content.read() == b"\n"
        return str(event[1]["reason"])

    async def _line(self, start: str) -> str:
        while not (line := await self.response.content.readline()).startswith(start.encode()):
            assert line in (b"\n", b": nothing new\n"), line
        self.raw += line
        return line.decode().removeprefix(start).rstrip("\n")


@asynccontextmanager
async def watching(house: House, secret: str, query: str = "?rate=10") -> AsyncIterator[Events]:
    headers = {"Authorization": f"Bearer {secret}"}
    async with aiohttp.ClientSession(house.url, headers=headers) as http, http.get(PATH + query) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == EVENTS
        yield Events(response)


ADMIN_KEY = ADMIN["Authorization"].removeprefix("Bearer ")


async def test_events_are_what_the_document_promises(house: House, tenancy: Tenancy) -> None:
    house.engine.script = lambda request: MockReply(delay=0.02)
    async with watching(house, ADMIN_KEY) as events:
        name, hello = await events.next()
        assert name == "hello"
        assert time.time() - 60 < hello["started"] <= time.time()
        assert (hello["model"], hello["scope"], hello["engine"], hello["rate"]) == (BASE, None, "thread", 10)
        asked = asyncio.create_task(tenancy.ask("acme", "acme/a", max_tokens=30, ignore_eos=True))
        frames: list[dict[str, Any]] = []
        while not any(request["state"] == "finished" for frame in frames for request in frame["requests"]):
            frames.append(await events.frame())
        headers = (await asked).headers
    steps = [step for frame in frames for step in frame["steps"]]
    assert [step["number"] for step in steps] == list(range(1, 31))
    assert {row[0] for step in steps for row in step.get("rows", ())} == {f"{headers['X-Request-Id']}-0"}
    running = [request for frame in frames for request in frame["requests"] if request["state"] == "running"]
    assert {use["digest"] for request in running for use in request["adapters"]} == {headers["X-Adapter-Digest"]}
    assert [frame["number"] for frame in frames] == list(range(1, len(frames) + 1))
    assert [slot["name"] for slot in frames[-1]["slots"]] == ["acme/a"]


async def test_names_and_digests_are_those_of_the_engines_state(house: House, tenancy: Tenancy) -> None:
    for name in ("acme", FOREIGN):
        await tenancy.ask(name, f"{name}/a")
    async with watching(house, ADMIN_KEY) as events:
        await events.next()
        slots = {(slot["name"], slot["digest"]) for slot in (await events.frame())["slots"]}
    state = (await tenancy.call("admin", "GET", "/admin/engine")).data
    assert slots == {(slot["name"], slot["digest"]) for slot in state["slots"]}
    assert len(slots) == 2


async def test_a_tenants_own_admin_reads_nothing_of_others(house: House, tenancy: Tenancy) -> None:
    """Under mixed load no byte holds another tenant's name, digest or request id."""
    house.engine.script = lambda request: MockReply(delay=0.01)
    foreign = {(await house.register(f"{FOREIGN}/b", seed=9, tenant=FOREIGN)).digest}
    foreign.add((await tenancy.ask(FOREIGN, f"{FOREIGN}/a")).headers["X-Adapter-Digest"])
    own = {(await tenancy.ask("acme", "acme/a")).headers["X-Adapter-Digest"]}

    async def load(tenant: str, model: str, digests: set[str]) -> set[str]:
        answers = [await tenancy.ask(tenant, model, max_tokens=10, ignore_eos=True) for _ in range(6)]
        assert {answer.headers["X-Adapter-Digest"] for answer in answers} <= digests
        return {answer.headers["X-Request-Id"] for answer in answers}

    async with watching(house, tenancy.secrets["acme+"]) as scoped, watching(house, ADMIN_KEY) as whole:
        assert (await scoped.next())[1]["scope"] == "acme"
        jobs = [load("acme", "acme/a", own), *(load(FOREIGN, f"{FOREIGN}/{one}", foreign) for one in "ab")]
        running = asyncio.gather(*jobs)
        frames = []
        while not running.done():
            frames.append(await scoped.frame())
            await whole.next()
        frames.append(await scoped.frame())
        mine, *others = await running
        for _ in range(3):
            await whole.next()
    words = {FOREIGN, *foreign, *(request_id for found in others for request_id in found)}
    assert [word for word in words if word.encode() in scoped.raw] == []
    assert all(word.encode() in whole.raw for word in (FOREIGN, *foreign)), "there was something to be seen"
    seen = {request["id"].rpartition("-")[0] for frame in frames for request in frame["requests"]}
    assert seen & mine
    assert seen <= mine
    assert {"tiers", "blocks", "limits", "preemptions", "restarts"}.isdisjoint(frames[-1])


async def test_a_tenant_made_again_is_shown_nothing_of_the_one_before(house: House, tenancy: Tenancy) -> None:
    """Its requests still run, on an adapter that is gone from the catalog and not yet from the engine."""
    house.engine.script = lambda request: MockReply(delay=0.1)
    async with watching(house, ADMIN_KEY) as whole:
        asked = asyncio.create_task(tenancy.ask("acme", "acme/a", max_tokens=100, ignore_eos=True))
        await whole.next()
        while not (await whole.frame())["requests"]:
            pass
        await asyncio.to_thread(house.services.keys.directory.delete_tenant, "acme")
        await asyncio.to_thread(house.services.catalog.remove_tenant, "acme")
        await tenancy.tenant("acme")
        await house.register("acme/b", seed=11, tenant="acme")
        async with watching(house, tenancy.secrets["acme+"]) as scoped:
            await scoped.next()
            answer = asyncio.create_task(tenancy.ask("acme", "acme/b", max_tokens=3, ignore_eos=True))
            frames = [await scoped.frame()]
            while not (answer.done() and any(frame["requests"] for frame in frames)):
                frames.append(await scoped.frame())
            assert not asked.done()
            own = f"{(await answer).headers['X-Request-Id']}-0"
            assert {one["id"] for frame in frames for one in frame["requests"]} == {own}
            assert b"acme/a" not in scoped.raw
            assert any(slot["name"] == "acme/b" for frame in frames for slot in frame["slots"])
    asked.cancel()


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("nonsense", 401), ("acme", 403), ("acme+", 200)])
async def test_roles(tenancy: Tenancy, key: str | None, status: int) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {tenancy.secrets.get(key, key)}"}
    async with tenancy.http.get(PATH, headers=headers) as response:
        assert response.status == status


@pytest.mark.parametrize("query", ["?rate=0", "?rate=11", "?rate=fast"])
async def test_wrong_queries_are_refused(admin: aiohttp.ClientSession, query: str) -> None:
    async with admin.get(PATH + query) as response:
        assert response.status == 400


async def test_a_page_of_another_site_is_refused(admin: aiohttp.ClientSession) -> None:
    async with admin.get(PATH, headers={"Origin": "https://elsewhere.example"}) as response:
        assert "Access-Control-Allow-Origin" not in response.headers
    async with admin.options(
        PATH, headers={"Origin": "https://elsewhere.example", "Access-Control-Request-Method": "GET"}
    ) as response:
        assert response.status in (403, 405)
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_head_ends_at_once(admin: aiohttp.ClientSession) -> None:
    async with admin.head(PATH) as response:
        assert (response.status, response.content_type) == (200, EVENTS)


async def test_a_revoked_key_ends_the_stream(house: House, tenancy: Tenancy) -> None:
    key = await tenancy.key("acme", role="tenant-admin")
    async with watching(house, key) as events, watching(house, tenancy.secrets["acme+"]) as other:
        await events.next()
        key_id = (await tenancy.call(key, "GET", "/admin/whoami")).data["key_id"]
        assert (await tenancy.call("admin", "DELETE", f"/admin/tenants/acme/keys/{key_id}")).status == 200
        before = time.monotonic()
        assert "revoked" in await events.bye()
        assert time.monotonic() - before < 3
        await other.next()
        assert (await other.frame())["number"] > 0


async def test_a_lost_engine_ends_the_stream_and_the_next_one_is_refused(house: House) -> None:
    async with watching(house, ADMIN_KEY) as events:
        await events.next()
        await house.engine.stop()
        assert await events.bye() == "The engine is stopped."
    async with aiohttp.ClientSession(house.url, headers=ADMIN) as http, http.get(PATH) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "1")


async def test_more_viewers_than_there_may_be_are_refused(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_VIEWERS", 2)
    async with aiohttp.ClientSession(house.url, headers=ADMIN) as http:
        async with watching(house, ADMIN_KEY), watching(house, ADMIN_KEY), http.get(PATH) as response:
            assert response.status == 503
            assert "2 live views are open" in (await response.json())["error"]["message"]
        async with asyncio.timeout(60):
            while True:
                async with http.get(PATH) as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.01)


async def test_a_silent_stream_says_that_it_is_alive(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "SILENT_SECONDS", 0.3)
    async with watching(house, ADMIN_KEY) as events:
        await events.next()
        await events.frame()
        gate = asyncio.Event()
        plain = house.engine.watch

        async def slow(*arguments: Any, **options: Any) -> Any:
            await gate.wait()
            return await plain(*arguments, **options)

        monkeypatch.setattr(house.engine, "watch", slow)
        async with asyncio.timeout(60):
            while await events.response.content.readline() != b": nothing new\n":
                pass
        gate.set()


def slow_socket(house: House) -> socket.socket:
    """Takes little from the network, and is not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    address = urlsplit(house.url)
    sock.connect((address.hostname, address.port))
    sock.sendall(
        f"GET {PATH}?rate=10 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ADMIN_KEY}\r\n\r\n".encode()
    )
    return sock


async def test_a_reader_that_lags_misses_frames_and_none_are_kept_for_it(
    house: House, tenancy: Tenancy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each frame is large; what waits for the socket stays about one of them."""
    house.engine.script = lambda request: MockReply(delay=0.005)
    unsent: list[int] = []
    plain = stream_module._num_unsent

    def noting(request: Any) -> int:
        unsent.append(plain(request))
        return unsent[-1]

    monkeypatch.setattr(stream_module, "_num_unsent", noting)
    with slow_socket(house) as sock:
        async with asyncio.timeout(60):
            while sum(size > 0 for size in unsent) < 5:
                asked = (tenancy.ask("acme", "acme/a", max_tokens=30, ignore_eos=True) for _ in range(20))
                await asyncio.gather(*asked)
        assert max(unsent) < 200_000
        sock.setblocking(False)
        numbers, data = [], b""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(60):
            while not numbers or numbers[-1] == len(numbers):
                data += await loop.sock_recv(sock, 2**20)
                numbers = [
                    int(part[: part.index(b",")]) for part in data.split(b'"number":')[1:] if b',"steps"' in part[:30]
                ]
    assert numbers == sorted(set(numbers)), "those that were dropped are missing, and no other"
    assert len(data) < 600_000, "the kernel kept little for it, too"


async def test_streams_end_when_the_server_drains(house: House) -> None:
    async with watching(house, ADMIN_KEY) as events:
        await events.next()
        draining = asyncio.create_task(house.services.lifecycle.drain(10))
        before = time.monotonic()
        assert await events.bye() == "The server is shutting down."
        assert time.monotonic() - before < 2
        assert await draining is True
