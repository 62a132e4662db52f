"""Calls of tools that must come, from a model of random weights: they fit the schemas, whatever it would write."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

from lora_serve.app.launch import run_server
from lora_serve.core.settings import Settings
from lora_serve.server.sockets.listener import bound_socket
from tests.oracle import save_adapter, save_tiny_model
from tests.text.tool_templates import tool_model

HI: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]


class GetWeather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Köln"]
    is_short: bool


class Pay(BaseModel):
    """Pay a bill."""

    number: Literal[7, 11]


TOOLS: Any = [pydantic_function_tool(GetWeather), pydantic_function_tool(Pay)]
KINDS: dict[str, type[BaseModel]] = {"GetWeather": GetWeather, "Pay": Pay}


@pytest.fixture
async def openai(tmp_path: Path) -> AsyncIterator[AsyncOpenAI]:
    tokenizer = tool_model("qwen2_5").wrapper
    end = tokenizer.eos_token_id
    model = save_tiny_model(
        "llama", tmp_path / "model", vocab_size=len(tokenizer), eos_token_id=end, max_position_embeddings=2048
    )
    tokenizer.save_pretrained(model)
    adapter = save_adapter(model, tmp_path / "adapter")
    settings = Settings(
        model=str(model), engine="thread", host="127.0.0.1", port=0, store=tmp_path / "store", kv_cache_memory="16MiB",
        adapter_root=[tmp_path], lora_modules=[f"acme/a={adapter}"], served_model_name="tiny",
    )  # fmt: skip
    with bound_socket("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = asyncio.create_task(run_server(settings, listener))
        try:
            async with aiohttp.ClientSession(url) as http, asyncio.timeout(90):
                while not await _is_ready(http):
                    assert not server.done(), server.exception()
                    await asyncio.sleep(0.1)
            async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                yield client
        finally:
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)


async def _is_ready(http: aiohttp.ClientSession) -> bool:
    try:
        async with http.get("/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_calls_that_must_come_fit_their_schemas_whole_and_streamed(openai: AsyncOpenAI) -> None:
    for model in ("tiny", "acme/a"):
        body: dict[str, Any] = {"model": model, "tools": TOOLS, "seed": 3, "max_tokens": 200}
        answer = await openai.chat.completions.parse(
            messages=HI, tool_choice="required", parallel_tool_calls=False, n=4, **body
        )
        found = [choice.message.tool_calls or [] for choice in answer.choices]
        assert [len(calls) for calls in found] == [1] * 4
        for (call,), choice in zip(found, answer.choices, strict=True):
            assert isinstance(call.function.parsed_arguments, KINDS[call.function.name])
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)

        # The agent's second step: the result is in the chat, and one tool is named.
        message, (call,) = answer.choices[0].message, found[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": "warm <|im_end|>"}
        chat: list[Any] = [*HI, message.model_dump(exclude_none=True), result]
        named: Any = {"type": "function", "function": {"name": "Pay"}}
        async with openai.chat.completions.stream(messages=chat, tool_choice=named, **body) as stream:
            async for _ in stream:
                pass
            final = (await stream.get_final_completion()).choices[0]
        (paid,) = final.message.tool_calls or []
        assert isinstance(paid.function.parsed_arguments, Pay)
        assert final.finish_reason == "stop"
        whole = await openai.chat.completions.create(messages=chat, tool_choice=named, **body)
        (same,) = whole.choices[0].message.tool_calls or []
        assert json.loads(same.function.arguments) == json.loads(paid.function.arguments)  # type: ignore[union-attr]

    free = await openai.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, max_tokens=40, temperature=1.5)
    assert free.choices[0].finish_reason in ("length", "stop")
