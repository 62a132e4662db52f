"""200 registered adapters, 4 device slots, Zipf traffic, a real server: no wrong answer, no starvation."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import aiohttp
import pytest
import torch

from lora_serve.commands.server_process import ServerProcess
from tests.e2e.conftest import ADMIN, Site
from tests.e2e.merged import greedy, save_sibling
from tests.oracle import load_plain

NUM_ADAPTERS, NUM_REQUESTS, NUM_USERS, NEW_TOKENS = 200, 300, 24, 4


@pytest.fixture(scope="module")
def folders(site: Site) -> dict[str, Path]:
    template = site.adapters["acme/a"]
    return {
        f"t{index}/bot": save_sibling(template, site.root / "many" / str(index), index) for index in range(NUM_ADAPTERS)
    }


async def test_two_hundred_adapters_on_four_slots(server: ServerProcess, site: Site, folders: dict[str, Path]) -> None:
    generator = random.Random(7)
    weights = [1 / (rank + 1) ** 1.1 for rank in range(NUM_ADAPTERS)]
    names = list(folders)
    asks = [
        (generator.choices(names, weights)[0], [generator.randint(10, 250) for _ in range(6)])
        for _ in range(NUM_REQUESTS)
    ]
    async with aiohttp.ClientSession(server.url, headers=ADMIN) as session:
        for name, folder in folders.items():
            async with session.post("/admin/adapters", json={"id": name, "source": str(folder)}) as response:
                assert response.status == 201, await response.text()
        gate = asyncio.Semaphore(NUM_USERS)

        async def ask(name: str, ids: list[int]) -> list[int]:
            body = {
                "model": name, "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": 0,
                "ignore_eos": True, "return_tokens_as_token_ids": True,
            }  # fmt: skip
            async with gate, session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                tokens = (await response.json())["choices"][0]["logprobs"]["tokens"]
            return [int(token.removeprefix("token_id:")) for token in tokens]

        answers = await asyncio.gather(*(ask(name, ids) for name, ids in asks))
        engine = await (await session.get("/admin/engine")).json()
    assert len(engine["slots"]) == 4
    assert engine["tiers"]["device"]["evictions"] > 20
    plain = load_plain(site.model)
    for name in {name for name, _ in asks}:
        mine = [index for index, (other, _) in enumerate(asks) if other == name]
        with torch.inference_mode():
            truth = greedy(plain, folders[name], [asks[index][1] for index in mine], NEW_TOKENS)
        assert [answers[index] for index in mine] == truth, name
