"""Point 3: nobody finds another tenant's KV blocks, and no field of a request says whose blocks it may find.

What a prompt's timing could tell is how many of its tokens were computed; that number is looked at, not a clock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from lora_serve.core.request import InferenceRequest
from lora_serve.engine.blocks import BlockManager, BlockTables
from lora_serve.engine.prefix_cache import PrefixCache
from lora_serve.engine.sequence import Sequence
from tests.local_engine import LocalEngine
from tests.oracle import save_adapter, save_tiny_model

PROMPT = list(range(3, 43))
PRETENCES: list[dict[str, Any]] = [
    {"cache_salt": "globex"},
    {"tenant": "globex"},
    {"user": "globex"},
    {"extra_body": {"tenant": "globex", "cache_salt": "globex"}},
    {"metadata": {"tenant": "globex"}},
]
HEADERS = ("X-Tenant", "X-Tenant-Id", "X-Organization", "OpenAI-Organization", "OpenAI-Project", "X-Forwarded-User")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    root = tmp_path_factory.mktemp("prefix")
    model = save_tiny_model("llama", root / "model")
    adapters = {name: save_adapter(model, root / name, seed=seed) for seed, name in enumerate("ab")}
    return LocalEngine(model, adapters, block_size=4, max_loras=2, kv_cache_memory="400KiB")


def num_cached(engine: LocalEngine, tenant: str, adapter: str | None) -> int:
    (answer,) = engine.run([replace(engine.request(PROMPT, adapter, max_tokens=1), tenant=tenant)])
    return answer.num_cached_tokens


@pytest.mark.parametrize("adapter", [None, "a"])
def test_prompt_of_another_tenant_is_computed_in_full_as_if_nobody_had_sent_it(
    engine: LocalEngine, adapter: str | None
) -> None:
    ours = f"acme-{adapter}"
    assert num_cached(engine, ours, adapter) == 0
    assert num_cached(engine, ours, adapter) == len(PROMPT) - 4, "its own: all but the last block"
    for stranger in ("globex", ours.upper(), f"{ours} ", "", "default"):
        assert num_cached(engine, f"{stranger}/{adapter}", adapter) == 0


def test_one_tenants_adapters_do_not_find_each_others_blocks(engine: LocalEngine) -> None:
    assert [num_cached(engine, "hooli", name) for name in (None, "a", "b")] == [0, 0, 0]
    assert [num_cached(engine, "hooli", name) for name in (None, "a", "b")] == [len(PROMPT) - 4] * 3


def test_same_keys_in_another_process_are_others() -> None:
    """The salt is made by the server at its start: knowing tenant, tokens and adapter gives nobody a key."""
    request = InferenceRequest("r", tuple(PROMPT), tenant="acme")
    keys = [
        PrefixCache(BlockTables(BlockManager(16, 4)), is_enabled=True).keys_of(Sequence(0, request, 0, PROMPT, ()))
        for _ in range(2)
    ]
    assert len(keys[0]) == len(PROMPT) // 4
    assert not set(keys[0]) & set(keys[1])


@pytest.mark.parametrize("pretence", PRETENCES)
async def test_no_field_of_a_body_changes_whose_request_it_is(
    http: aiohttp.ClientSession, house: Any, pretence: dict[str, Any]
) -> None:
    async with http.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 1, **pretence}) as answer:
        assert answer.status == 200
    assert [request.tenant for request in house.engine.requests] == ["default"]


async def test_no_header_changes_whose_request_it_is(http: aiohttp.ClientSession, house: Any) -> None:
    headers = dict.fromkeys(HEADERS, "globex")
    async with http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1}, headers=headers) as answer:
        assert answer.status == 200
    assert [request.tenant for request in house.engine.requests] == ["default"]
