"""A tenant's whole life in a moment: limits, a key, an adapter that nobody had before, answers, and the end."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.canary.races import PROMPTS, question
from tests.rolling.holding import CLOSED
from tests.rolling.round_robin import Reply
from tests.rolling.traffic import Traffic, bearer

REQUESTS = 2  # that its limits allow in a minute


class Guest:
    """What is not as it must be goes into the traffic's `wrong`. Nothing of a guest may stay, so it has new names."""

    def __init__(self, traffic: Traffic, number: int) -> None:
        self._traffic = traffic
        self._tenant = f"visitor-{number}"
        self._adapter = f"{self._tenant}/own"
        self._was_repeated = False

    async def live(self, generator: random.Random) -> None:
        quota = {"requests_per_minute": REQUESTS, "max_adapters": 1}
        await self._act("POST", "/admin/tenants", {"name": self._tenant, "quota": quota}, also=(409,))
        made = json.loads((await self._act("POST", f"/admin/tenants/{self._tenant}/keys", {})).body)
        digest, source = generator.choice(sorted(self._traffic.digests.items()))
        with tempfile.TemporaryDirectory(dir=self._traffic.runners.folders[source].parent) as folder:
            copied = copy_with_a_mark(self._traffic.runners.folders[source], Path(folder) / "own", self._tenant)
            card = await self._act("POST", "/admin/adapters", {"id": self._adapter, "source": str(copied)})
        own = json.loads(card.body)["digest"]
        for _ in range(REQUESTS):
            number = generator.randrange(len(PROMPTS))
            self._judge(await self._ask(made["secret"], number), own, self._traffic.runners.truths[digest][number][0])
        await self._expect((429,), "its minute is used up", made["secret"])
        await self._act("DELETE", f"/admin/tenants/{self._tenant}/keys/{made['id']}", also=(404,))
        await self._expect(CLOSED, "its key has ended", made["secret"])
        await self._act("DELETE", f"/admin/tenants/{self._tenant}", also=(404,))
        left = await self._traffic.client.send("GET", f"/admin/adapters/{self._adapter}", self._traffic.admin)
        if left.status != 404:
            self._traffic.wrong.append(f"{self._adapter} outlives its tenant: {left.status}: {left.body[:200]!r}")

    async def _act(self, method: str, path: str, body: Any = None, *, also: tuple[int, ...] = ()) -> Reply:
        return await self._traffic.act(method, path, body, also=also)

    async def _ask(self, secret: str, number: int) -> Reply:
        body = question(self._adapter, number)
        return await self._traffic.client.send("POST", "/v1/completions", bearer(secret), json=body)

    def _judge(self, reply: Reply, digest: str, truth: tuple[int, ...]) -> None:
        """One that was sent twice may have used the minute up, for the next one too."""
        self._was_repeated |= reply.is_repeated
        if reply.status == 429 and self._was_repeated:
            return
        self._traffic.num_answers += 1
        shown = json.loads(reply.body)["choices"][0]["logprobs"]["tokens"] if reply.status == 200 else []
        if shown != [f"token_id:{token}" for token in truth] or reply.headers["X-Adapter-Digest"] != digest:
            self._traffic.wrong.append(f"{self._adapter} ({digest}) is not answered right: {reply}, not {truth}")

    async def _expect(self, statuses: tuple[int, ...], why: str, secret: str) -> None:
        reply = await self._ask(secret, 0)
        if reply.status not in statuses:
            self._traffic.wrong.append(f"{self._tenant} is answered by {reply.status}, though {why}: {reply.body!r}")


def copy_with_a_mark(folder: Path, target: Path, mark: str) -> Path:
    """The same weights under another digest: the config names a revision that means nothing."""
    shutil.copytree(folder, target)
    path = target / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"revision": mark}))
    return target
