"""A tiny load balancer: one server after the other; one that is away, or says 503 with Retry-After, is passed over."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

PATIENCE = 90.0  # seconds until some server takes a request
PAUSE = 0.05
REFUSAL = 120  # bytes of a 503's body by which it is counted


@dataclass(frozen=True)
class Reply:
    """An answer; when its request was first sent, and when it was read."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    began: float
    ended: float
    is_repeated: bool  # an earlier attempt was not answered, or by 503: it may have been carried out


class RoundRobin:
    """Sends to servers in turn. `faults`: what no client should see, in words; `refusals`: those of 503s, counted."""

    def __init__(self, urls: Sequence[str], session: aiohttp.ClientSession) -> None:
        self.urls = list(urls)
        self.session = session
        self.ending: set[str] = set()  # servers that were told to end, until their successors are there
        self.faults: list[str] = []
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._turn = itertools.count()

    async def send(self, method: str, path: str, headers: Mapping[str, str], **more: Any) -> Reply:
        """The first answer that is not 503."""
        began, is_repeated = time.monotonic(), False
        while time.monotonic() - began < PATIENCE:
            url = self.urls[next(self._turn) % len(self.urls)]
            answer = await self._begun(url, method, path, headers, more)
            if answer is None:
                is_repeated = True
            else:
                async with answer:
                    body = await answer.read()
                self.counts[str(answer.status)] += 1
                self._judge(f"{method} {path}", answer, body)
                if answer.status != 503:
                    return Reply(answer.status, answer.headers, body, began, time.monotonic(), is_repeated)
                is_repeated = True
            await asyncio.sleep(PAUSE)
        raise TimeoutError(f"{method} {path}: no server took it in {PATIENCE:.0f} s")

    async def _begun(
        self, url: str, method: str, path: str, headers: Mapping[str, str], more: Mapping[str, Any]
    ) -> aiohttp.ClientResponse | None:
        """An answer of which the head is there; None: there is none. Only a server that ends may leave one out."""
        try:
            return await self.session.request(method, url + path, headers=headers, **more)
        except aiohttp.ClientError as error:
            self.counts["away" if isinstance(error, aiohttp.ClientConnectorError) else "cut"] += 1
            if url not in self.ending:
                self.faults.append(f"{method} {path}: {error!r}")
            return None

    def _judge(self, what: str, answer: aiohttp.ClientResponse, body: bytes) -> None:
        if answer.status == 503:
            self.refusals[body[:REFUSAL].decode(errors="replace")] += 1
        if answer.status > 503 or answer.status in (500, 501, 502):
            self.faults.append(f"{what}: {answer.status}: {body[:300]!r}")
        elif answer.status == 503 and not answer.headers.get("Retry-After", "").isdigit():
            self.faults.append(f"{what}: 503 without Retry-After: {body[:300]!r}")
