"""What was acknowledged, compared with what each server says once it rests."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import aiohttp

from tests.canary.races import PROMPTS, question
from tests.rolling.traffic import Traffic, bearer

CLOSED = (401, 429)  # of a key that ended; 429: so many of them were tried


async def missing(traffic: Traffic, urls: Sequence[str]) -> list[str]:
    """What the servers lack of all that was acknowledged, or have too much of; in words."""
    lines = list[str]()
    async with aiohttp.ClientSession(headers=traffic.admin) as session:
        servers = [Whole(traffic, url, session) for url in urls]
        for server in servers:  # before anything is asked here, which is metered too
            lines += await server.usage()
        for server in servers:
            for part in (server.adapters, server.aliases, server.tenants, server.keys, server.audit):
                lines += [f"{server.url}: {line}" for line in await part()]
    return lines


class Whole:
    """Each method compares one kind of thing."""

    def __init__(self, traffic: Traffic, url: str, session: aiohttp.ClientSession) -> None:
        self._traffic, self._ledger, self.url, self._session = traffic, traffic.ledger, url, session

    async def _get(self, path: str) -> Any:
        async with self._session.get(self.url + path) as answer:
            return json.loads(await answer.read()) if answer.status == 200 else None

    async def adapters(self) -> list[str]:
        found = {card["id"]: card for card in (await self._get("/admin/adapters?limit=1000"))["data"]}
        wanted = self._ledger.cards
        lines = [f"adapters {sorted(set(found) ^ set(wanted))}"] * (set(found) != set(wanted))
        for name in sorted(set(found) & set(wanted)):
            lines += [line async for line in self._adapter(name)]
        return lines

    async def _adapter(self, name: str) -> AsyncIterator[str]:
        card, digest = await self._get(f"/admin/adapters/{name}"), self._ledger.now(name)
        if card["digest"] != digest:
            yield f"{name} means {card['digest']}, not {digest}"
        versions = {one["version"]: one["digest"] for one in card["versions"]}
        if versions != self._ledger.versions[name]:
            yield f"{name} has the versions {versions}, not {self._ledger.versions[name]}"
        shown = {field: card[field] for field in self._ledger.cards[name]}
        if shown != self._ledger.cards[name]:
            yield f"{name}: {shown}, not {self._ledger.cards[name]}"
        for number in range(len(PROMPTS)):
            async with self._session.post(f"{self.url}/v1/completions", json=question(name, number)) as answer:
                told = await answer.json()
            if answer.status != 200:
                yield f"{name}: {answer.status}: {told}"
                continue
            if (found := answer.headers["X-Adapter-Digest"]) not in (digest, self._ledger.canary(name)):
                yield f"{name} is answered by {found}, not by {digest} or its canary {self._ledger.canary(name)}"
            truth = self._traffic.runners.truths[found][number][0]
            self._ledger.tokens[name.partition("/")[0]] += told["usage"]["total_tokens"]
            if told["choices"][0]["logprobs"]["tokens"] != [f"token_id:{token}" for token in truth]:
                yield f"{name} answers {told}, not {truth}"

    async def aliases(self) -> list[str]:
        found = {one["alias"]: one["target"] for one in (await self._get("/admin/aliases"))["data"]}
        return [] if found == self._ledger.aliases else [f"aliases {found}, not {self._ledger.aliases}"]

    async def tenants(self) -> list[str]:
        lines = []
        for name, quota in self._ledger.quotas.items():
            shown = await self._get(f"/admin/tenants/{name}")
            found = None if shown is None else {key: limit for key, limit in shown["quota"].items() if limit}
            if found != quota:
                lines.append(f"tenant {name}: {found}, not {quota}")
        return lines

    async def keys(self) -> list[str]:
        lines, ended = [], []
        for key in self._ledger.keys:
            if key.end_sent != float("inf"):
                ended.append(key)
                continue
            async with self._session.get(f"{self.url}/v1/models", headers=bearer(key.secret)) as answer:
                lines += [f"a key of {key.tenant}: {answer.status}"] * (answer.status != 200)
        for key in ended:
            async with self._session.get(f"{self.url}/v1/models", headers=bearer(key.secret)) as answer:
                lines += [f"a key of {key.tenant} that ended: {answer.status}"] * (answer.status not in CLOSED)
            listed = (await self._get(f"/admin/tenants/{key.tenant}/keys"))["data"]
            lines += [
                f"key {one['id']} was revoked: {one}" for one in listed if one["id"] == key.id and not one["revoked"]
            ]
        return lines

    async def usage(self) -> list[str]:
        rows = (await self._get("/admin/usage?by=tenant"))["data"]
        found = {row["tenant"]: row["prompt_tokens"] + row["generated_tokens"] for row in rows}
        return [
            f"usage of {tenant}: {found.get(tenant, 0)} tokens, {tokens} were told"
            for tenant, tokens in self._ledger.tokens.items()
            if found.get(tenant, 0) < tokens or (found[tenant] > tokens and tenant not in self._traffic.in_doubt)
        ]

    async def audit(self) -> list[str]:
        noted, after = set[str](), None
        while True:
            page = await self._get(f"/admin/audit?limit=1000{f'&after={after}' if after else ''}")
            noted |= {line["request_id"] for line in page["data"]}
            if not page["has_more"]:
                break
            after = page["last_id"]
        return [f"not in the audit log: {what}" for request, what in self._ledger.acts.items() if request not in noted]


def counted(traffic: Traffic) -> Iterator[str]:
    """The figures, in words."""
    yield f"{traffic.num_answers} answers, {len(traffic.ledger.acts)} acts, {dict(traffic.client.counts)}"
