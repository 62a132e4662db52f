"""The console's page before a made-up engine: what a browser asks for until a real server's stream could tell it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from lora_serve.console.files import page_files

POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
CALLER = {"tenant": "", "role": "admin", "key_id": "admin", "may_use_base": True, "quota": {}, "key_quota": {}}


def hello(scope: str | None = None) -> dict[str, Any]:
    """The stream's first event."""
    targets = {"first_token_ms": 200, "inter_token_ms": 30}
    made: dict[str, Any] = {
        "version": "0.0",
        "started": 0.0,
        "model": "demo-base",
        "rate": 5,
        "scope": scope,
        "engine": "thread",
    }
    return made | {"max_num_seqs": 16, "block_size": 16, "targets": targets}


def application(frame: Callable[[float], dict[str, Any]]) -> web.Application:
    """Serves the page, a caller who is an admin, and a stream of what `frame(now)` says, five times a second."""

    started = {"started": time.time()}

    async def page(request: web.Request) -> web.Response:
        name = request.match_info.get("file") or "index.html"
        found = page_files()[name]
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-store"}
        return web.Response(body=found.content, content_type=found.media_type, charset="utf-8", headers=headers)

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await response.prepare(request)
        await response.write(event("hello", hello() | started))
        try:
            while True:
                await response.write(event("frame", frame(time.time())))
                await asyncio.sleep(0.2)
        except ConnectionError:
            return response

    def said(value: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(_: web.Request) -> web.Response:
            return web.json_response(value)

        return handler

    made = web.Application()
    made.router.add_get("/ui/about.json", said({"version": "0.0", "asks_for_key": True}))
    made.router.add_get("/ui/", page)
    made.router.add_get("/ui/{file:.+}", page)
    made.router.add_get("/admin/engine/stream", stream)
    made.router.add_get("/admin/whoami", said(CALLER))
    made.router.add_get("/v1/models", said({"data": []}))
    made.router.add_get("/ready", said({}))
    return made


def event(name: str, data: Any) -> bytes:
    """One server-sent event."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
