"""Warm tenants that stream while a storm of cold adapters is loaded beside them, over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

NUM_AT_ONCE = 8  # cold loads that are asked for at the same time
SETTLING = 1.0  # seconds at the start of a window that do not count
_PROMPT = list(range(10, 42))


@dataclass(frozen=True, slots=True)
class Site:
    """A server and the key to it."""

    http: aiohttp.ClientSession
    admin: Mapping[str, str]

    @staticmethod
    @asynccontextmanager
    async def at(url: str, admin_key: str) -> AsyncIterator[Site]:
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=3600)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as http:
            yield Site(http, {"Authorization": f"Bearer {admin_key}"})

    async def post(self, path: str, body: Mapping[str, object]) -> int:
        """The status; the answer is read to its end."""
        async with self.http.post(path, json=body, headers=self.admin) as answer:
            await answer.read()
            return answer.status


async def register(site: Site, folders: Mapping[str, Path]) -> None:
    """Raises RuntimeError for the first that is refused."""
    for name, folder in folders.items():
        status = await site.post("/admin/adapters", {"id": name, "source": str(folder.resolve())})
        if status not in (200, 201):
            raise RuntimeError(f"{name} was not registered: {status}")


async def warm_up(site: Site, names: Sequence[str]) -> None:
    """Onto the device, to stay there."""
    for name in names:
        status = await site.post(f"/admin/adapters/{name}/pin", {})
        if status != 200:
            raise RuntimeError(f"{name} was not pinned: {status}")


class Storm:
    """Loads cold adapters, one after the other round and round, until it is stopped."""

    def __init__(self, site: Site, names: Sequence[str], kind: str) -> None:
        """`kind`: "prefetch", or "requests" of a few tokens each."""
        self._site = site
        self._names = itertools.cycle(names)
        self._kind = kind
        self.num_done = 0
        self.num_failed = 0

    async def blow(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(*(self._one_after_another() for _ in range(NUM_AT_ONCE)))

    async def _one_after_another(self) -> None:
        for name in self._names:
            status = await self._load(name)
            self.num_done += status == 200
            self.num_failed += status != 200

    async def _load(self, name: str) -> int:
        if self._kind == "prefetch":
            return await self._site.post(f"/admin/adapters/{name}/prefetch", {})
        return await self._site.post("/v1/completions", _body(name, num_tokens=2, prompt=_PROMPT[:4]))


async def gaps_of_window(site: Site, warm: Sequence[str], seconds: float, storm: Storm | None) -> list[float]:
    """Seconds between tokens of the warm tenants' streams, which begin again whenever they end."""
    beside = asyncio.create_task(storm.blow()) if storm else None
    end = time.perf_counter() + SETTLING + seconds
    try:
        streams = await asyncio.gather(*(_stream_until(site, name, end) for name in warm))
    finally:
        if beside is not None:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
    return [gap for gaps in streams for gap in gaps]


async def _stream_until(site: Site, name: str, end: float) -> list[float]:
    """Gaps that lie after the settling time."""
    begin, gaps = time.perf_counter() + SETTLING, list[float]()
    while time.perf_counter() < end:
        times = [moment async for moment in _moments(site, name, end)]
        gaps += _pairs_after(times, begin)
    return gaps


async def _moments(site: Site, name: str, end: float) -> AsyncIterator[float]:
    body = _body(name, num_tokens=256, prompt=_PROMPT) | {"stream": True}
    async with site.http.post("/v1/completions", json=body, headers=site.admin) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{name} was not served: {answer.status} {await answer.text()}")
        async for line in answer.content:
            if line.startswith(b"data: {"):
                yield time.perf_counter()
            if time.perf_counter() > end:
                return  # leaving the answer aborts it


def _pairs_after(times: Sequence[float], begin: float) -> Iterator[float]:
    return (later - earlier for earlier, later in itertools.pairwise(times) if earlier >= begin)


def _body(name: str, num_tokens: int, prompt: list[int]) -> dict[str, object]:
    return {"model": name, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
