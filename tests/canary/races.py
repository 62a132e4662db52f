"""Races for slots: many adapters, few slots, adapters that come and go, and every answer checked against the truth.

The truth is transformers alone with one adapter merged into its weights at a time, by the digest of what was merged:
whatever an id means at the moment of a request, the answer's own header says which content it must come from.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch

from lora_serve.adapters.checkpoint.content import adapter_digest
from tests.canary.asking import NEAR
from tests.canary.questions import BASE
from tests.e2e.merged import merged_into, save_sibling
from tests.oracle import load_plain

NEW_TOKENS = 4
PROMPTS = tuple(tuple(random.Random(number).randint(10, 250) for _ in range(5 + number)) for number in range(4))
NUM_CHURNING = 6  # ids whose content changes all the time
NOT_NOW = (404, 409, 503)  # of an id that comes and goes

Truth = tuple[tuple[int, ...], torch.Tensor]  # tokens, their log-probabilities; or those that a server showed


@dataclass(frozen=True)
class Field:
    """The adapters of a race, and the answers of each to each prompt."""

    folders: Mapping[str, Path]  # by id
    truths: Mapping[str, Sequence[Truth]]  # by digest ("base": of the base), one per prompt
    near: float = NEAR  # the greatest mean |difference| of log-probabilities

    @property
    def names(self) -> list[str]:
        return [BASE, *self.folders, *(f"churn/{number}" for number in range(NUM_CHURNING))]


@dataclass
class Outcome:
    """What came of a race."""

    num_answers: int = 0
    num_gone: int = 0  # asked for while it was not there
    num_registrations: int = 0
    num_deletions: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


def make_field(model: Path, template: Path, folder: Path, num_adapters: int) -> Field:
    folders = {f"racer/{i}": save_sibling(template, folder / str(i), 4000 + i) for i in range(num_adapters)}
    plain = load_plain(model)
    truths = {adapter_digest(path): [_truth(plain, path, prompt) for prompt in PROMPTS] for path in folders.values()}
    truths["base"] = [_truth(plain, None, prompt) for prompt in PROMPTS]
    assert len({truth[0][0] for truth in truths.values()}) > num_adapters / 2, "the answers hardly differ"
    return Field(folders, truths)


@torch.inference_mode()
def _truth(plain: torch.nn.Module, folder: Path | None, prompt: Sequence[int]) -> Truth:
    ids, logprobs = list(prompt), []
    with merged_into(plain, folder):  # type: ignore[arg-type]
        for _ in range(NEW_TOKENS):
            found = plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float().log_softmax(-1)
            ids.append(int(found.argmax()))
            logprobs.append(found.max())
    return tuple(ids[len(prompt) :]), torch.stack(logprobs)


async def quiet_field(url: str, admin: Mapping[str, str], runners: Field) -> Field:
    """The same adapters with the server's own answers, one request at a time: in a race they are the same bits."""
    outcome, truths = Outcome(), dict[str, list[Truth]]()
    async with aiohttp.ClientSession(url, headers=admin) as session:
        for name, folder in runners.folders.items():
            await _register(session, admin, name, folder, outcome)
        assert outcome.wrong == []
        for name in (BASE, *runners.folders):
            for number in range(len(PROMPTS)):
                async with session.post("/v1/completions", json=question(name, number)) as response:
                    assert response.status == 200, await response.text()
                    truths.setdefault(response.headers["X-Adapter-Digest"], []).append(await _shown(response))
    return Field(runners.folders, truths, near=0.0)


def same_tokens(one: Field, other: Field) -> float:
    """The share of answers with the same tokens in both."""
    pairs = [pair for digest, truths in one.truths.items() for pair in zip(truths, other.truths[digest], strict=True)]
    return sum(mine[0] == theirs[0] for mine, theirs in pairs) / len(pairs)


async def race(
    url: str, admin: Mapping[str, str], runners: Field, num_answers: int, seed: int = 0, num_users: int = 12
) -> Outcome:
    """Ask until there are `num_answers`, and a deletion, while ids are registered and deleted; all adapters first."""
    outcome, generator, started = Outcome(), random.Random(seed), time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, headers=admin) as session:
        for name, folder in runners.folders.items():
            await _register(session, admin, name, folder, outcome)
        churning = asyncio.create_task(_churn(session, admin, runners, outcome, random.Random(seed + 1)))
        users = [
            _use(session, runners, outcome, num_answers, random.Random(generator.random())) for _ in range(num_users)
        ]
        try:
            await asyncio.gather(*users)
        finally:
            churning.cancel()
            await asyncio.gather(churning, return_exceptions=True)
        for number in range(NUM_CHURNING):
            await _act(session, admin, "DELETE", f"/admin/adapters/churn/{number}")
    outcome.seconds = time.monotonic() - started
    return outcome


async def _use(
    session: aiohttp.ClientSession, runners: Field, outcome: Outcome, num_answers: int, generator: random.Random
) -> None:
    names = runners.names
    while outcome.num_answers < num_answers or not outcome.num_deletions:
        name, number = generator.choice(names), generator.randrange(len(PROMPTS))
        async with session.post("/v1/completions", json=question(name, number)) as response:
            if name.startswith("churn/") and response.status in NOT_NOW:
                outcome.num_gone += 1
                continue
            fault = await fault_of(response, runners, number)
        outcome.num_answers += 1
        if fault:
            outcome.wrong.append(f"{name}, prompt {number}: {fault}")


def question(name: str, number: int) -> dict[str, Any]:
    """The body that asks an adapter for the prompt of that number."""
    return {
        "model": name, "prompt": PROMPTS[number], "max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": 0,
        "ignore_eos": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip


async def fault_of(response: aiohttp.ClientResponse, runners: Field, number: int) -> str:
    if response.status != 200:
        return f"status {response.status}: {(await response.text())[:200]}"
    tokens, logprobs = runners.truths[response.headers["X-Adapter-Digest"]][number]
    found, shown = await _shown(response)
    if found != tokens:
        return f"{found} instead of {tokens}"
    distance = (shown - logprobs).abs().mean().item()
    return "" if distance <= runners.near else f"log-probabilities are off by {distance:.2g}"


async def _shown(response: aiohttp.ClientResponse) -> Truth:
    shown = (await response.json())["choices"][0]["logprobs"]
    return tuple(int(token.removeprefix("token_id:")) for token in shown["tokens"]), torch.tensor(
        shown["token_logprobs"]
    )


async def _churn(
    session: aiohttp.ClientSession,
    admin: Mapping[str, str],
    runners: Field,
    outcome: Outcome,
    generator: random.Random,
) -> None:
    """Each id gets one content after the other, and is gone in between."""
    folders, there = list(runners.folders.values()), set[str]()
    while True:
        name = f"churn/{generator.randrange(NUM_CHURNING)}"
        if name not in there or generator.random() < 0.5:
            await _register(session, admin, name, generator.choice(folders), outcome)
            there.add(name)
        else:
            there.remove(name)
            status, _ = await _act(session, admin, "DELETE", f"/admin/adapters/{name}")
            outcome.num_deletions += status == 200
        await asyncio.sleep(0.005)


async def _register(
    session: aiohttp.ClientSession, admin: Mapping[str, str], name: str, folder: Path, outcome: Outcome
) -> None:
    status, text = await _act(session, admin, "POST", "/admin/adapters", {"id": name, "source": str(folder)})
    if status not in (200, 201):
        outcome.wrong.append(f"registering {name}: {status}: {text[:200]}")
    outcome.num_registrations += 1


async def _act(
    session: aiohttp.ClientSession, admin: Mapping[str, str], method: str, path: str, body: Any = None
) -> tuple[int, str]:
    """Status and text; 429, where the key's acts of this minute are used up, is tried again for two minutes."""
    deadline = time.monotonic() + 120
    while True:
        async with session.request(method, path, json=body, headers=admin) as response:
            if response.status != 429 or time.monotonic() > deadline:
                return response.status, await response.text()
            pause = float(response.headers["Retry-After"])
        await asyncio.sleep(pause)
