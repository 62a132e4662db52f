"""What tenants and their admin do all the time while servers are replaced, and what must be true of it afterwards."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.canary.questions import BASE
from tests.canary.races import PROMPTS, Field, question
from tests.rolling.ledger import Key, Ledger
from tests.rolling.round_robin import Reply, RoundRobin

TENANTS = ("acme", "globex", "hooli", "initech")
NUM_CHURNING = 3  # ids of each tenant whose meaning changes
STREAM_TOKENS = 40
NOT_YET = (404, 409)
QUOTA = 10_000_000  # tokens a minute: counted, never reached
ACT_RESTS = (0.05, 0.3)  # seconds from one act to the next
Work = Callable[[str, random.Random], Awaitable[None]]


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


class RefusedError(Exception):
    """An act was refused that should have been carried out; it stands in `wrong`."""


@dataclass
class Traffic:
    """Runs until it is told to rest; `wrong` says in words what was not as acknowledged. `askers`: of each tenant, who
    ask and ask by stream; `rests`: seconds from one request to the next, at least and at most.
    """

    client: RoundRobin
    admin: dict[str, str]
    runners: Field
    ledger: Ledger = field(default_factory=Ledger)
    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0
    secrets: dict[str, str] = field(default_factory=dict)  # by tenant: a key that stays
    askers: int = 1
    rests: tuple[float, float] = (0.05, 0.3)

    def __post_init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        self._is_over = asyncio.Event()
        self._numbers = iter(range(10**9))
        self.in_doubt: set[str] = set()  # tenants of whose requests one was not answered at first
        self.digests = {digest: name for name, digest in self._digests().items()}

    def _digests(self) -> dict[str, str]:
        from lora_serve.adapters.checkpoint.content import adapter_digest

        return {name: adapter_digest(path) for name, path in self.runners.folders.items()}

    # -- the beginning and the end ---------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Tenants, a key for each, and adapters that stay as they are."""
        for number, tenant in enumerate(TENANTS):
            await self._make_tenant(tenant)
            made = await self.act("POST", f"/admin/tenants/{tenant}/keys", {"role": "inference"})
            self.secrets[tenant] = json.loads(made.body)["secret"]
            for n in range(2):
                await self._register(f"{tenant}/stable-{n}", sorted(self.digests)[2 * number + n])
        await asyncio.sleep(self.ledger.lag)

    def requests(self) -> list[Work]:
        """The kinds of requests; each asker does one of them all the time."""
        return [self._ask, self._ask_by_stream]

    def acts(self) -> list[Work]:
        """The kinds of acts on what a tenant has."""
        return [self._change, self._keys]

    def other_acts(self) -> list[Work]:
        """The kinds of acts that have to do with none of the tenants that ask."""
        return [self._tenants]

    def start(self) -> None:
        self._is_over.clear()
        for tenant in TENANTS:
            self._begin(self.requests() * self.askers, tenant, self.rests)
            self._begin(self.acts(), tenant, ACT_RESTS)
        self._begin(self.other_acts(), "", ACT_RESTS)

    def _begin(self, works: Sequence[Work], tenant: str, rests: tuple[float, float]) -> None:
        for work in works:
            generator = random.Random(f"{tenant} {next(self._numbers)}")
            self._tasks.append(asyncio.create_task(self._forever(work, tenant, generator, rests)))

    async def rest(self) -> None:
        """End what runs, and wait until all servers can know of it."""
        self._is_over.set()
        await asyncio.gather(*self._tasks)
        self._tasks.clear()
        await asyncio.sleep(self.ledger.lag)

    async def _forever(self, work: Work, tenant: str, generator: random.Random, rests: tuple[float, float]) -> None:
        while not self._is_over.is_set():
            with suppress(RefusedError):
                await work(tenant, generator)
            await asyncio.sleep(generator.uniform(*rests))

    # -- requests --------------------------------------------------------------------------------------------------

    async def _ask(self, tenant: str, generator: random.Random) -> None:
        name, number = self._name(tenant, generator), generator.randrange(len(PROMPTS))
        reply = await self._answer(tenant, question(name, number))
        if reply is not None:
            answer = json.loads(reply.body)
            self._compare(name, number, reply, answer["choices"][0]["logprobs"]["tokens"])
            self.ledger.tokens[tenant] += answer["usage"]["total_tokens"]

    async def _ask_by_stream(self, tenant: str, generator: random.Random) -> None:
        name, number = self._name(tenant, generator), generator.randrange(len(PROMPTS))
        body = question(name, number) | {
            "stream": True, "max_tokens": STREAM_TOKENS, "stream_options": {"include_usage": True}
        }  # fmt: skip
        reply = await self._answer(tenant, body)
        if reply is None:
            return
        if not reply.body.endswith(b"data: [DONE]\n\n"):
            self.wrong.append(f"a stream of {name} was cut: {reply.body[-200:]!r}")
            return
        events = [json.loads(part[6:]) for part in reply.body.split(b"\n\n")[:-2]]
        if "error" in events[-1]:
            self._failed_within(tenant, name, number, reply, events)
            return
        shown = [token for event in events for one in event["choices"] for token in one["logprobs"]["tokens"]]
        self._compare(name, number, reply, shown)
        if len(shown) != STREAM_TOKENS:
            self.wrong.append(f"a stream of {name} has {len(shown)} tokens")
        self.ledger.tokens[tenant] += events[-1]["usage"]["total_tokens"]

    def _failed_within(self, tenant: str, name: str, number: int, reply: Reply, events: Sequence[Any]) -> None:
        """A stream ended with an error: no server here may let one end so."""
        self.wrong.append(f"a stream of {name} failed: {events[-1]}")

    def _name(self, tenant: str, generator: random.Random) -> str:
        stays = [BASE, f"{tenant}/stable-0", f"{tenant}/stable-1"]
        return generator.choice([*stays, *(f"{tenant}/churn-{n}" for n in range(NUM_CHURNING))])

    async def _answer(self, tenant: str, body: dict[str, Any], path: str = "/v1/completions") -> Reply | None:
        """None: 404, which is right if the name may have meant nothing."""
        reply = await self.client.send("POST", path, bearer(self.secrets[tenant]), json=body)
        self.num_answers += 1
        name = body["model"]
        if reply.is_repeated:
            self.in_doubt.add(tenant)
        if reply.status == 200:
            return reply
        if reply.status != 404 or not self.ledger.may_mean(name, None, reply.began, reply.ended):
            self.wrong.append(f"{name}: {reply.status}: {reply.body[:300]!r}")
        return None

    def _compare(self, name: str, number: int, reply: Reply, shown: list[str], *, is_whole: bool = True) -> None:
        """`is_whole`: false if the answer may have ended before its first tokens were all there."""
        digest = reply.headers["X-Adapter-Digest"]
        truth = self.runners.truths[digest][number][0]
        truth = truth if is_whole else truth[: len(shown)]
        found = tuple(int(token.removeprefix("token_id:")) for token in shown[: len(truth)])
        if found != truth:
            self.wrong.append(f"{name} ({digest}): {found} instead of {truth}")
        if name != BASE and not self.ledger.may_mean(name, digest, reply.began, reply.ended):
            self.wrong.append(f"{name} did not mean {digest} then: {self.ledger.names.get(name)}, {reply.began}")

    # -- acts ------------------------------------------------------------------------------------------------------

    async def act(self, method: str, path: str, body: Any = None, *, also: tuple[int, ...] = ()) -> Reply:
        """`also`: what a repeated act may be answered. A server may not know yet what the other has just been told."""
        began = time.monotonic()
        reply = await self.client.send(method, path, self.admin, json=body)
        while reply.status in NOT_YET and not (reply.is_repeated and reply.status in also):
            if time.monotonic() - began > self.ledger.lag:
                break
            await asyncio.sleep(0.1)
            reply = await self.client.send(method, path, self.admin, json=body)
        if reply.status >= 300 and not (reply.is_repeated and reply.status in also):
            self.wrong.append(f"{method} {path}: {reply.status}: {reply.body[:300]!r}")
            raise RefusedError(self.wrong[-1])
        self.ledger.acts[reply.headers["X-Request-Id"]] = f"{method} {path}"
        return reply

    async def _register(self, name: str, digest: str) -> None:
        meaning = self.ledger.means(name, digest, time.monotonic())
        folder = self.runners.folders[self.digests[digest]]
        reply = await self.act("POST", "/admin/adapters", {"id": name, "source": str(folder)})
        meaning.answered = time.monotonic()
        card = json.loads(reply.body)
        if card.get("digest") != digest:
            self.wrong.append(f"{name} was registered as {card}, not as {digest}")
        self.ledger.versions[name] = {one["version"]: one["digest"] for one in card.get("versions", ())}
        self.ledger.cards.setdefault(name, {"pinned": False, "shared_with": []})

    async def _change(self, tenant: str, generator: random.Random) -> None:
        name, ledger = f"{tenant}/churn-{generator.randrange(NUM_CHURNING)}", self.ledger
        known = ledger.versions.get(name, {})
        if not known:
            await self._register(name, generator.choice(sorted(self.digests)))
            return
        acts = ("new", "new", "delete", "route", "canary", "canary", "no canary", "pin", "share", "alias", "unname")
        act = generator.choice(acts)
        if act == "new" and len(known) < 6:
            await self._register(name, generator.choice(sorted(set(self.digests) - set(known.values()))))
        elif act == "delete":
            await self._delete(name)
        elif act == "route":
            version = generator.choice(sorted(known))
            meaning = ledger.means(name, known[version], time.monotonic())
            await self.act("PUT", f"/admin/adapters/{name}/route", {"version": version})
            meaning.answered = time.monotonic()
        elif act in ("canary", "no canary"):
            await self._split(name, generator, act == "canary")
        elif act == "pin":
            pinned = not ledger.cards[name]["pinned"] and tenant == TENANTS[0]  # else all slots would be taken
            await self.act("POST", f"/admin/adapters/{name}/{'pin' if pinned else 'unpin'}")
            ledger.cards[name]["pinned"] = pinned
        elif act == "share":
            others = sorted(generator.sample([other for other in TENANTS if other != tenant], 2))
            await self.act("PUT", f"/admin/adapters/{name}/sharing", {"shared_with": others})
            ledger.cards[name]["shared_with"] = others
        elif act == "alias":
            await self.act("PUT", f"/admin/aliases/{name}-alias", {"target": name})
            ledger.aliases[f"{name}-alias"] = name
        elif act == "unname" and f"{name}-alias" in ledger.aliases:
            await self.act("DELETE", f"/admin/aliases/{name}-alias", also=(404,))
            del ledger.aliases[f"{name}-alias"]

    async def _split(self, name: str, generator: random.Random, is_wanted: bool) -> None:
        """The name gets a canary, or another one, or loses it; what it means by default stays."""
        default = self.ledger.now(name)
        others = {version: one for version, one in self.ledger.versions[name].items() if one != default}
        if not others or (not is_wanted and self.ledger.canary(name) is None):
            return
        version = generator.choice(sorted(others))
        body = {"canary": {"version": version, "percent": generator.choice((10, 50, 90))} if is_wanted else None}
        meaning = self.ledger.means(name, default, time.monotonic(), others[version] if is_wanted else None)
        await self.act("PUT", f"/admin/adapters/{name}/route", body)
        meaning.answered = time.monotonic()

    async def _delete(self, name: str) -> None:
        meaning = self.ledger.means(name, None, time.monotonic())
        await self.act("DELETE", f"/admin/adapters/{name}", also=(404,))
        meaning.answered = time.monotonic()
        self.ledger.versions.pop(name)
        self.ledger.cards.pop(name)
        self.ledger.aliases.pop(f"{name}-alias", None)

    async def _keys(self, tenant: str, generator: random.Random) -> None:
        """A key is made, opens everywhere, and mostly ends."""
        reply = await self.act("POST", f"/admin/tenants/{tenant}/keys", {"label": "of the traffic"})
        made = json.loads(reply.body)
        key = Key(made["secret"], made["id"], tenant, reply.ended)
        self.ledger.keys.append(key)
        await asyncio.sleep(self.ledger.lag)
        for _ in self.client.urls:
            told = await self.client.send("GET", "/v1/models", bearer(key.secret))
            if told.status != 200:
                self.wrong.append(f"a key of {tenant} does not open: {told.status}: {told.body[:200]!r}")
        if generator.random() < 0.7:
            key.end_sent = time.monotonic()
            ended = await self.act("DELETE", f"/admin/tenants/{tenant}/keys/{key.id}", also=(404,))
            key.ended = ended.ended

    async def _tenants(self, _: str, generator: random.Random) -> None:
        """A tenant is made, gets other limits, and mostly goes."""
        name = f"guest-{next(self._numbers)}"
        await self._make_tenant(name)
        quota = {"tokens_per_minute": QUOTA + generator.randrange(1000)}
        await self.act("PATCH", f"/admin/tenants/{name}", {"quota": quota})
        self.ledger.quotas[name] = quota
        if generator.random() < 0.7:
            await self.act("DELETE", f"/admin/tenants/{name}", also=(404,))
            self.ledger.quotas[name] = None
        await asyncio.sleep(0.3)

    async def _make_tenant(self, name: str) -> None:
        quota = {"tokens_per_minute": QUOTA}
        await self.act("POST", "/admin/tenants", {"name": name, "quota": quota}, also=(409,))
        self.ledger.quotas[name] = quota
