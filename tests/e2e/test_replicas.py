"""Two server processes on one registry in a real Redis: what one registers both serve, whatever happens to Redis."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.conftest import ADMIN, Pair
from tests.e2e.merged import save_sibling

NUMBERS = itertools.count(100)
PROMPT = "Dear customer"


def fresh(pair: Pair) -> Path:
    """A folder whose content no server has seen."""
    number = next(NUMBERS)
    template = next(iter(pair.site.adapters.values()))
    return save_sibling(template, pair.site.root / "fresh" / str(number), number)


def bytes_on_disk(pair: Pair, hexadecimal: str) -> list[Path]:
    walked = (entry for store in pair.stores for entry in os.walk(store))  # folders may vanish meanwhile
    paths = (Path(folder, name) for folder, folders, files in walked for name in folders + files)
    return [path for path in paths if path.name.startswith(hexadecimal)]


def keys_in_redis(pair: Pair, hexadecimal: str) -> list[bytes]:
    with pair.redis.client() as client:
        return list(client.scan_iter(match=f"*{hexadecimal}*"))


@pytest.fixture
async def http() -> Iterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60), headers=ADMIN) as session:
        yield session


async def register(http: aiohttp.ClientSession, url: str, name: str, folder: Path) -> str:
    """The digest."""
    async with http.post(f"{url}/admin/adapters", json={"id": name, "source": str(folder)}) as answer:
        assert answer.status in (200, 201), await answer.text()
        return str((await answer.json())["digest"])


async def ask(http: aiohttp.ClientSession, url: str, name: str, **fields: object) -> tuple[int, str, str]:
    """Status, digest and text."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": 6, "temperature": 0} | fields
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        data = await answer.json()
        text = data["choices"][0]["text"] if answer.status == 200 else data["error"]["message"]
        return answer.status, answer.headers.get("X-Adapter-Digest", ""), text


async def served(http: aiohttp.ClientSession, url: str, name: str, digest: str | None, seconds: float) -> str:
    """The text, once `url` answers for `name` with this digest (None: once it is 404)."""
    deadline = time.monotonic() + seconds
    while True:
        status, found, text = await ask(http, url, name)
        if (status, found) == (200, digest) or (digest is None and status == 404):
            return text
        assert time.monotonic() < deadline, (status, found, text)


async def test_registered_on_one_is_served_by_the_other_within_two_seconds(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    digest = await register(http, pair.one.url, "acme/first", fresh(pair))
    theirs = await served(http, pair.other.url, "acme/first", digest, 2)
    assert theirs == (await ask(http, pair.one.url, "acme/first"))[2]
    assert theirs != (await ask(http, pair.other.url, "tiny"))[2]


async def test_new_version_and_rollback_reach_both_and_running_streams_end_as_they_began(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    name = "acme/moving"
    first = await register(http, pair.one.url, name, fresh(pair))
    old_text = await served(http, pair.other.url, name, first, 2)
    body = {"model": name, "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    async with http.post(f"{pair.other.url}/v1/completions", json=body) as stream:
        assert stream.headers["X-Adapter-Digest"] == first
        second = await register(http, pair.one.url, name, fresh(pair))
        await served(http, pair.other.url, name, second, 2)
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
    async with http.post(f"{pair.other.url}/admin/adapters/{name}/rollback") as answer:
        assert answer.status == 200
    assert await served(http, pair.one.url, name, first, 2) == old_text


async def test_pin_on_one_holds_on_both_within_two_seconds_until_the_other_takes_it_back(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    name = "acme/pinned"
    digest = await register(http, pair.one.url, name, fresh(pair))
    await served(http, pair.other.url, name, digest, 2)
    for url, verb in ((pair.one.url, "pin"), (pair.other.url, "unpin")):
        async with http.post(f"{url}/admin/adapters/{name}/{verb}") as answer:
            assert answer.status == 200, await answer.text()
        deadline = time.monotonic() + 2
        while [await pins(http, process.url, name, digest) for process in (pair.one, pair.other)] != [
            verb == "pin"
        ] * 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def pins(http: aiohttp.ClientSession, url: str, name: str, digest: str) -> bool | None:
    """What the card says of the pin; None while the engine does something else."""
    async with http.get(f"{url}/admin/adapters/{name}") as answer:
        is_pinned = bool((await answer.json())["pinned"])
    async with http.get(f"{url}/admin/engine") as answer:
        slots = (await answer.json())["slots"]
    return is_pinned if is_pinned == any(slot["digest"] == digest and slot["pinned"] for slot in slots) else None


async def test_canary_split_is_the_same_on_every_replica(pair: Pair, http: aiohttp.ClientSession) -> None:
    name = "acme/canary"
    await register(http, pair.one.url, name, fresh(pair))
    digest = await register(http, pair.one.url, name, fresh(pair))
    route = {"version": 1, "canary": {"version": 2, "percent": 50}}
    async with http.put(f"{pair.one.url}/admin/adapters/{name}/route", json=route) as answer:
        assert answer.status == 200
    sides = []
    for url in (pair.one.url, pair.other.url):
        await served(http, url, f"{name}@2", digest, 2)
        users = [f"user-{number}" for number in range(24)]
        sides.append([(await ask(http, url, name, user=user, max_tokens=1))[1] for user in users])
    assert sides[0] == sides[1]
    assert len(set(sides[0])) == 2


async def test_deleted_on_one_is_gone_everywhere_bytes_and_all_and_may_come_back_as_something_else(
    pair: Pair, http: aiohttp.ClientSession
) -> None:
    name = "acme/gone"
    digest = await register(http, pair.one.url, name, fresh(pair))
    await served(http, pair.other.url, name, digest, 2)
    assert keys_in_redis(pair, digest[7:])
    assert len(bytes_on_disk(pair, digest[7:])) >= (1 if pair.site.host.is_shared else 2)
    body = {"model": name, "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    async with http.post(f"{pair.other.url}/v1/completions", json=body) as stream:
        async with http.delete(f"{pair.one.url}/admin/adapters/{name}") as answer:
            assert answer.status == 200
        other = await register(http, pair.other.url, name, fresh(pair))
        await served(http, pair.one.url, name, other, 2)
        assert (await stream.read()).endswith(b"data: [DONE]\n\n")
    deadline = time.monotonic() + 5
    while keys_in_redis(pair, digest[7:]) or bytes_on_disk(pair, digest[7:]):
        assert time.monotonic() < deadline, (keys_in_redis(pair, digest[7:]), bytes_on_disk(pair, digest[7:]))
        threading.Event().wait(0.05)
    for url in (pair.one.url, pair.other.url):
        async with http.get(f"{url}/admin/engine") as answer:
            engine = await answer.json()
        assert digest not in engine["host_digests"]
        assert digest not in [slot["digest"] for slot in engine["slots"]]


async def test_redis_killed_and_back_under_load_disturbs_nobody(pair: Pair, http: aiohttp.ClientSession) -> None:
    digests = {name: await register(http, pair.one.url, name, fresh(pair)) for name in ("acme/x", "acme/y")}
    for name, digest in digests.items():
        await served(http, pair.other.url, name, digest, 2)
    with Load([(url, name) for url in (pair.one.url, pair.other.url) for name in digests]) as load:
        load.wait_for(8)
        pair.redis.kill()
        load.wait_for(16)
        async with http.post(
            f"{pair.other.url}/admin/adapters", json={"id": "acme/new", "source": str(fresh(pair))}
        ) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert "registry" in (await answer.json())["error"]["message"]
        load.wait_for(8)
        pair.redis.start()
        started = time.monotonic()
        await _registers(http, pair.other.url, "acme/new", fresh(pair), started + 5)
        new = (await ask(http, pair.other.url, "acme/new"))[1]
        await served(http, pair.one.url, "acme/new", new, started + 7 - time.monotonic())
        load.wait_for(8)
    assert load.failures == []
    for name, digest in digests.items():
        await served(http, pair.one.url, name, digest, 1)


async def test_emptied_redis_is_filled_again_by_the_replicas(pair: Pair, http: aiohttp.ClientSession) -> None:
    name = "acme/kept"
    digest = await register(http, pair.one.url, name, fresh(pair))
    await served(http, pair.other.url, name, digest, 2)
    with pair.redis.client() as client:
        client.flushall()
    deadline = time.monotonic() + 5
    while not any(key.endswith(b":manifest") for key in keys_in_redis(pair, digest[7:])):
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
    await served(http, pair.one.url, name, digest, 1)
    other = await register(http, pair.other.url, "acme/after", fresh(pair))
    await served(http, pair.one.url, "acme/after", other, 3)


async def _registers(http: aiohttp.ClientSession, url: str, name: str, folder: Path, deadline: float) -> None:
    while True:
        source = {"id": name, "source": str(folder)}
        async with http.post(f"{url}/admin/adapters", json=source) as answer:
            if answer.status == 201:
                return
            assert answer.status == 503, await answer.text()
        assert time.monotonic() < deadline, "the registry did not come back in time"
        threading.Event().wait(0.1)


class Load:
    """Threads that ask all the time, each for one adapter of one server; what is not 200 is a failure."""

    def __init__(self, targets: list[tuple[str, str]]) -> None:
        self.failures: list[str] = []
        self._answers = 0
        self._counted = threading.Condition()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=target) for target in targets]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        """Until so many more answers have come."""
        with self._counted:
            wanted = self._answers + more
            assert self._counted.wait_for(lambda: self._answers >= wanted, 30), self.failures

    def _run(self, url: str, name: str) -> None:
        ask: Callable[[], str] = plain_request(url, name)
        while not self._stop.is_set():
            failure = ask()
            with self._counted:
                self._answers += 1
                if failure:
                    self.failures.append(failure)
                self._counted.notify_all()


def plain_request(url: str, name: str) -> Callable[[], str]:
    """A call that asks once and says what went wrong, "" if nothing did."""
    import json
    import urllib.error
    import urllib.request

    body = json.dumps({"model": name, "prompt": PROMPT, "max_tokens": 4}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json", **ADMIN})

    def ask() -> str:
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return "" if answer.status == 200 else str(answer.status)
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read()!r}"
        except OSError as error:
            return repr(error)

    return ask
