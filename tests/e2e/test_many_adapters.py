"""200 registered adapters (60 by day), 4 device slots, Zipf traffic, a real server: no wrong answer, no starvation."""

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
from tests.tiers import mostly_nightly

NUM_USERS, NEW_TOKENS = 24, 4


@pytest.fixture(scope="module", params=mostly_nightly([60, 200], 60))
def folders(request: pytest.FixtureRequest, site: Site) -> dict[str, Path]:
    number, template = request.param, site.adapters["acme/a"]
    return {
        f"t{index}/of-{number}": save_sibling(template, site.root / f"many-{number}" / str(index), index)
        for index in range(number)
    }


async def test_many_adapters_on_four_slots(server: ServerProcess, site: Site, folders: dict[str, Path]) -> None:
    generator = random.Random(7)
    weights = [1 / (rank + 1) ** 1.1 for rank in range(len(folders))]
    names = list(folders)
    asks = [
        (generator.choices(names, weights)[0], [generator.randint(10, 250) for _ in range(6)])
        for _ in range(3 * len(folders) // 2)
    ]
    async with aiohttp.ClientSession(server.url, headers=ADMIN) as session:
        for name, folder in folders.items():
            async with session.post("/admin/adapters", json={"id": name, "source": str(folder)}) as response:
                assert response.status == 201, await response.text()
        before = await (await session.get("/admin/engine")).json()
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
    assert len(engine["slots"]) == 4 * site.host.num_engines
    assert engine["tiers"]["device"]["evictions"] > before["tiers"]["device"]["evictions"] + 20
    plain = load_plain(site.model)
    for name in {name for name, _ in asks}:
        mine = [index for index, (other, _) in enumerate(asks) if other == name]
        with torch.inference_mode():
            truth = greedy(plain, folders[name], [asks[index][1] for index in mine], NEW_TOKENS)
        assert [answers[index] for index in mine] == truth, name
