"""A server that gives the answers a real one rarely gives."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web

Card = dict[str, Any]


def make_card(name: str = "acme/support", version: int = 1, num_versions: int = 4) -> Card:
    versions = [_version(number) for number in range(1, num_versions + 1)]
    facts = {key: value for key, value in versions[version - 1].items() if key not in ("version", "created")}
    return {
        "id": name, "object": "adapter", "tenant": "acme", "pinned": False, "created": 1_700_000_000, "metadata": {},
        "version": version, **facts, "versions": versions, "aliases": [],
        "route": {"version": version, "canary": None, "history": []},
    }  # fmt: skip


def _version(number: int) -> Card:
    return {
        "version": number, "created": 1_700_000_000 + number, "digest": f"sha256:{number:064x}", "rank": 8,
        "targets": ["q_proj"], "bytes": 1_234_567, "source": "upload", "kinds": [], "composable": True,
        "warnings": [], "state": "on_host", "tiers": ["disk", "host"], "hits": 5, "misses": 1, "loads": 1,
        "evictions": 0, "last_load": {"fetch": 1.5, "verify": 0.25, "parse": 2.0, "copy": 0.5},
    }  # fmt: skip


class StubServer:
    """`cards` is its state; `replies` is answered first, while it lasts."""

    def __init__(self) -> None:
        self.cards: dict[str, Card] = {"acme/support": make_card()}
        self.replies: list[web.Response] = []
        self.requests: list[str] = []  # their methods
        self.keys: list[str] = []  # and headers
        self.gets = 0
        self.upload_seconds_per_byte = 0.0
        self.upload_bytes = 0
        self.on_chunk: Callable[[], None] = lambda: None
        self.has_upload_begun = asyncio.Event()
        self.may_upload_go_on = asyncio.Event()
        self.may_upload_go_on.set()
        self.url = ""
        app = web.Application(middlewares=[self._answer_first])
        one = "/admin/adapters/{id:.+}"
        app.add_routes([
            web.put(f"{one}/route", self._put_route), web.put(one, self._upload), web.get(one, self._get),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)  # a slow upload waits in the client, not here
        listener.bind(("127.0.0.1", 0))
        await web.SockSite(self._runner, listener).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *error: object) -> None:
        self.may_upload_go_on.set()
        await self._runner.cleanup()

    @web.middleware
    async def _answer_first(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(request.method)
        self.keys.append(request.headers.get("Authorization", ""))
        if self.replies:
            return self.replies.pop(0)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _put_route(self, request: web.Request) -> web.Response:
        body = await request.json()
        return self.set_route(request.match_info["id"], body["version"] or 1, body["canary"])

    def set_route(self, name: str, version: int, canary: Any = None) -> web.Response:
        old = self.cards[name]
        card = make_card(name, version)
        card["route"] = {
            "version": version,
            "canary": canary,
            "history": [*old["route"]["history"], old["version"]],
        }
        self.cards[name] = card
        return web.json_response(card)

    async def _get(self, request: web.Request) -> web.Response:
        self.gets += 1
        card = self.cards.get(request.match_info["id"])
        return not_found() if card is None else web.json_response(card)

    async def _upload(self, request: web.Request) -> web.Response:
        async for chunk in request.content.iter_chunked(2**16):
            self.upload_bytes += len(chunk)
            self.on_chunk()
            await asyncio.sleep(self.upload_seconds_per_byte * len(chunk))
            self.has_upload_begun.set()
            await self.may_upload_go_on.wait()
        return web.json_response(make_card(request.match_info["id"], 1, 1), status=201)


def not_found() -> web.Response:
    return refusal(404, "The model `x` does not exist or you do not have access to it.")


def refusal(status: int, message: str, code: str = "c", **headers: str) -> web.Response:
    body = {"error": {"message": message, "type": "t", "param": None, "code": code}}
    return web.json_response(
        body, status=status, headers={key.replace("_", "-"): text for key, text in headers.items()}
    )
