"""Tenants with keys on the running application, and sessions that send them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.server.conftest import ADMIN, House


@dataclass(frozen=True)
class Reply:
    """An answer, read."""

    status: int
    body: bytes
    data: Any
    headers: Any

    @property
    def message(self) -> str:
        return str(self.data["error"]["message"])


@dataclass(frozen=True)
class Tenancy:
    """Calls of the application with one key or another; "admin" is the admin key."""

    house: House
    secrets: dict[str, str]
    http: aiohttp.ClientSession

    async def call(self, key: str | None, method: str, path: str, body: Any = None, **options: Any) -> Reply:
        headers = {} if key is None else {"Authorization": f"Bearer {self.secrets.get(key, key)}"}
        headers |= options.pop("headers", {})
        if body is not None:
            options["json"] = body
        async with self.http.request(method, path, headers=headers, **options) as answer:
            raw = await answer.read()
            return Reply(answer.status, raw, await answer.json() if raw else None, answer.headers)

    async def tenant(self, name: str, **fields: Any) -> None:
        """With a key of each role, `name` for inference and `name+` for its admin."""
        made = await self.call("admin", "POST", "/admin/tenants", {"name": name, **fields})
        assert made.status == 201, made.data
        self.secrets[name] = await self.key(name, role="inference")
        self.secrets[f"{name}+"] = await self.key(name, role="tenant-admin")

    async def key(self, tenant: str, **fields: Any) -> str:
        made = await self.call("admin", "POST", f"/admin/tenants/{tenant}/keys", fields)
        assert made.status == 201, made.data
        return str(made.data["secret"])

    async def ask(self, key: str | None, model: str | None, **fields: Any) -> Reply:
        body = {"prompt": "x", "max_tokens": 1, **({} if model is None else {"model": model}), **fields}
        return await self.call(key, "POST", "/v1/completions", body)

    async def models(self, key: str) -> list[str]:
        return [card["id"] for card in (await self.call(key, "GET", "/v1/models")).data["data"]]

    async def adapters(self, key: str) -> list[str]:
        return [card["id"] for card in (await self.call(key, "GET", "/admin/adapters")).data["data"]]


@asynccontextmanager
async def tenancy_of(house: House) -> AsyncIterator[Tenancy]:
    async with aiohttp.ClientSession(house.url) as http:
        yield Tenancy(house, {"admin": ADMIN["Authorization"].removeprefix("Bearer ")}, http)
