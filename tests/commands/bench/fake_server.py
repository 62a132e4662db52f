"""A server that streams what a test scripts, in vLLM's shapes, over a real socket."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Script = Callable[["Call"], Awaitable[web.StreamResponse]]


@dataclass
class Call:
    """One request to the fake."""

    request: web.Request
    body: dict[str, Any]
    response: web.StreamResponse = field(
        default_factory=lambda: web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    )

    async def event(self, document: dict[str, Any] | str) -> None:
        if not self.response.prepared:
            await self.response.prepare(self.request)
        data = document if isinstance(document, str) else json.dumps(document)
        await self.response.write(f"data: {data}\n\n".encode())

    async def chunk(self, text: str, reason: str | None = None, **more: Any) -> None:
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": reason}], **more})

    async def usage(self, prompt: int, completion: int) -> None:
        await self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})

    async def done(self) -> web.StreamResponse:
        await self.event("[DONE]")
        await self.response.write_eof()
        return self.response

    def hang_up(self) -> web.StreamResponse:
        """Without the end that chunked encoding owes."""
        assert self.request.transport is not None
        self.request.transport.abort()
        return self.response


@dataclass
class Fake:
    """`calls`: what was asked, in order."""

    url: str
    calls: list[Call] = field(default_factory=list)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [call.body for call in self.calls]


@asynccontextmanager
async def fake_server(script: Script, pages: dict[str, Any] | None = None) -> AsyncIterator[Fake]:
    """`pages`: JSON answers of GET paths."""
    fake = Fake("")

    async def answer(request: web.Request) -> web.StreamResponse:
        call = Call(request, await request.json())
        fake.calls.append(call)
        return await script(call)

    async def page(request: web.Request) -> web.StreamResponse:
        found = (pages or {}).get(request.path)
        return web.json_response(found) if found is not None else web.json_response({}, status=404)

    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/{path:.*}", page)
    async with TestServer(app) as server:
        fake.url = str(server.make_url("/")).rstrip("/")
        yield fake
