"""vLLM's dynamic LoRA endpoints: its texts and codes."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest


async def load(session: aiohttp.ClientSession, **body: Any) -> tuple[int, str]:
    async with session.post("/v1/load_lora_adapter", json=body) as answer:
        return answer.status, await answer.text()


async def unload(session: aiohttp.ClientSession, **body: Any) -> tuple[int, str]:
    async with session.post("/v1/unload_lora_adapter", json=body) as answer:
        return answer.status, await answer.text()


async def test_load_call_unload(admin: aiohttp.ClientSession, http: aiohttp.ClientSession, house: Any) -> None:
    folder = str(house.make_adapter("a"))
    expected = (200, "Success: LoRA adapter 'sql' added successfully.")
    assert await load(admin, lora_name="sql", lora_path=folder) == expected
    assert await load(admin, lora_name="sql", lora_path=folder) == expected
    async with http.post("/v1/completions", json={"model": "sql", "prompt": "x"}) as answer:
        assert answer.status == 200
    assert await unload(admin, lora_name="sql") == (200, "Success: LoRA adapter 'sql' removed successfully.")
    async with http.post("/v1/completions", json={"model": "sql", "prompt": "x"}) as answer:
        assert answer.status == 404


async def test_other_content_needs_load_inplace_and_is_never_served_before(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    old = await house.register("sql", seed=1)
    folder = str(house.make_adapter("new", seed=2))
    status, text = await load(admin, lora_name="sql", lora_path=folder)
    assert status == 400
    assert "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place" in text
    assert [entry.digest for entry in house.services.catalog.entry("sql").versions] == [old.digest]
    assert (await load(admin, lora_name="sql", lora_path=folder, load_inplace=True))[0] == 200
    assert house.services.catalog.resolve("sql").ref.version == 2


async def test_missing_fields_are_told_in_vllms_words(admin: aiohttp.ClientSession) -> None:
    for body in ({}, {"lora_name": "a"}, {"lora_path": "b"}, {"lora_name": "", "lora_path": ""}):
        status, text = await load(admin, **body)
        assert status == 400
        assert "Both 'lora_name' and 'lora_path' must be provided." in text
        assert "InvalidUserInput" in text
    status, text = await unload(admin)
    assert (status, "'lora_name' needs to be provided to unload a LoRA adapter." in text) == (400, True)


async def test_unknown_paths_and_names_are_404(
    admin: aiohttp.ClientSession, house: Any, caplog: pytest.LogCaptureFixture
) -> None:
    status, text = await load(admin, lora_name="sql", lora_path="/does/not/exist")
    assert (status, "No adapter found for /does/not/exist" in text) == (404, True)
    assert ("--adapter-root" in caplog.text, "--adapter-root" in text) == (True, False)
    await house.register("old")
    assert (await load(admin, lora_name="old", lora_path="/does/not/exist"))[0] == 404
    status, text = await unload(admin, lora_name="nobody")
    assert (status, "The lora adapter 'nobody' cannot be found." in text) == (404, True)
    assert "NotFoundError" in text


async def test_broken_adapter_is_400_as_in_vllm(admin: aiohttp.ClientSession, house: Any) -> None:
    folder = house.make_adapter("a")
    (folder / "adapter_model.safetensors").unlink()
    assert (await load(admin, lora_name="sql", lora_path=str(folder)))[0] == 400
    await house.register("known")
    assert (await load(admin, lora_name="known", lora_path=str(folder)))[0] == 400
