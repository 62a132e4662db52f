"""The demo's endless traffic: its tenants ask their adapters, so that there is something to look at.

Each tenant has a key of its own. A few people ask, wait, and ask again; one comes with a long conversation at times,
one leaves before the end, and many come at once. There are more adapters than slots: some are always cold.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

import aiohttp

# Tenants by their keys, more adapters than slots, more people in a burst than rows, prompts in chunks: all is seen.
ARGUMENTS: tuple[str, ...] = ("--auth", "on", "--max-loras", "6", "--max-cpu-loras", "8", "--max-num-seqs", "16")
ARGUMENTS += ("--max-num-batched-tokens", "256", "--latency-target-ms", "250")
PEOPLE = 12
PAUSE_SECONDS = 0.7  # between two questions of a person, on average
BURST_SECONDS = (12.0, 25.0)  # between two bursts
BURST_PEOPLE = (12, 24)
LONG, LEAVING, BASE = 0.15, 0.03, 0.08  # parts of all questions
MIN_TOKENS, MAX_TOKENS = 48, 240
SECONDS_TO_LEAVE = 0.4
REFUSED_SECONDS = 1.0  # until a refused person asks again


@dataclass(frozen=True, slots=True)
class Ask:
    """One question of one tenant's to its adapter, or to the base model."""

    tenant: str
    body: Mapping[str, Any]
    leaves: bool = False  # before the answer is complete


class Questions:
    """A seeded source of questions: popular adapters are asked more often, and which are popular changes."""

    def __init__(self, prompts: Mapping[str, Sequence[str]], base: str, seed: int = 0) -> None:
        """`prompts`: by adapter id; `base`: the base model's name."""
        self._random = random.Random(seed)
        self._prompts = prompts
        self._base = base
        self._order = list(prompts)

    def next(self) -> Ask:
        """A question of any tenant's."""
        draw = self._random.random
        if draw() < 0.02:
            self._random.shuffle(self._order)  # other adapters are popular from now on
        weights = [1 / (place + 1) for place in range(len(self._order))]
        return self.of(self._random.choices(self._order, weights)[0])

    def burst(self) -> list[Ask]:
        """Many questions at once, to one or two adapters."""
        adapters = self._random.sample(self._order, 2)
        return [self.of(self._random.choice(adapters)) for _ in range(self._random.randint(*BURST_PEOPLE))]

    def of(self, adapter: str) -> Ask:
        """A question to this adapter, of its tenant's."""
        draw, prompts = self._random.random, self._prompts[adapter]
        said = self._random.sample(prompts, 7 if draw() < LONG else 1)
        messages = [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(said)]
        body = {
            "model": self._base if draw() < BASE else adapter,
            "messages": messages,
            "temperature": 0.8,
            "seed": self._random.getrandbits(31),
            "min_tokens": self._random.randint(MIN_TOKENS, MAX_TOKENS // 2),
            "max_tokens": self._random.randint(MAX_TOKENS // 2, MAX_TOKENS),
        }
        return Ask(adapter.partition("/")[0], body, draw() < LEAVING)

    def pause(self) -> float:
        """Seconds until a person's next question."""
        return self._random.expovariate(1 / PAUSE_SECONDS)

    def quiet(self) -> float:
        """Seconds until the next burst."""
        return self._random.uniform(*BURST_SECONDS)


async def send_traffic(url: str, admin_key: str, questions: Questions, tenants: Sequence[str]) -> None:
    """Ask, endlessly, with a new key for each tenant; returns when the server no longer answers."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        keys = {tenant: await _key_of(http, tenant, admin_key) for tenant in tenants}
        try:
            async with asyncio.TaskGroup() as people:
                for _ in range(PEOPLE):
                    people.create_task(_person(http, questions, keys))
                people.create_task(_bursts(http, questions, keys, people))
        except* aiohttp.ClientConnectionError:
            pass  # the server was stopped


def ends_at_enter(traffic: asyncio.Task[None], terminal: TextIO) -> bool:
    """Cancels the traffic at the first line that is typed; False if `terminal` is none."""
    if not terminal.isatty():
        return False
    loop, number = asyncio.get_running_loop(), terminal.fileno()

    def typed() -> None:
        with suppress(OSError):  # it is no controlling terminal
            if os.tcgetpgrp(number) != os.getpgrp():
                return  # in the background: the line is another process's
        os.read(number, 1024)
        loop.remove_reader(number)
        traffic.cancel()

    loop.add_reader(number, typed)
    traffic.add_done_callback(lambda _: loop.remove_reader(number))
    return True


async def _key_of(http: aiohttp.ClientSession, tenant: str, admin_key: str) -> str:
    admin = {"Authorization": f"Bearer {admin_key}"}
    async with http.post("/admin/tenants", json={"name": tenant}, headers=admin):
        pass  # it may be there already
    path = f"/admin/tenants/{tenant}/keys"
    async with http.post(path, json={"name": "traffic", "role": "inference"}, headers=admin) as made:
        made.raise_for_status()
        secret: str = (await made.json())["secret"]
    return secret


async def _person(http: aiohttp.ClientSession, questions: Questions, keys: Mapping[str, str]) -> None:
    while True:
        await asyncio.sleep(questions.pause())
        await _ask(http, questions.next(), keys)


async def _bursts(
    http: aiohttp.ClientSession, questions: Questions, keys: Mapping[str, str], people: asyncio.TaskGroup
) -> None:
    while True:
        await asyncio.sleep(questions.quiet())
        for ask in questions.burst():
            people.create_task(_ask(http, ask, keys))


async def _ask(http: aiohttp.ClientSession, ask: Ask, keys: Mapping[str, str]) -> None:
    headers = {"Authorization": f"Bearer {keys[ask.tenant]}"}
    try:
        async with asyncio.timeout(SECONDS_TO_LEAVE if ask.leaves else None):
            async with http.post("/v1/chat/completions", json=ask.body, headers=headers) as answer:
                await answer.read()
                if not answer.ok:
                    await asyncio.sleep(REFUSED_SECONDS)
    except TimeoutError:
        return  # it left


def prompts_by_adapter(items: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The texts of `demo_data/prompts.json` by the adapter that they are for."""
    found: dict[str, list[str]] = {}
    for item in items:
        found.setdefault(item["adapter"], []).append(item["prompt"])
    return found
