"""The format in which calls are read: the adapter's, the settings', the template's; and control tokens that mark it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, BadRequestError

from lora_serve.core.config import ServerConfig
from lora_serve.text.tokenizer import TextModel
from tests.server.conftest import BASE
from tests.server.tools.conftest import Says
from tests.text.tool_templates import tool_model

HI: list[Any] = [{"role": "user", "content": "Hi"}]
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "The weather."}}
ARGUMENTS = {"city": "Köln"}
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}\n</tool_call>'
MISTRAL = f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS)}}}]'


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return tool_model("mistral")


async def calls_in(openai: AsyncOpenAI, model: str = BASE, messages: list[Any] = HI, **body: Any) -> list[Any]:
    answer = await openai.chat.completions.create(model=model, messages=messages, tools=[TOOL], **body)
    return list(answer.choices[0].message.tool_calls or [])


async def test_special_token_that_begins_a_call_is_read_and_never_shown(openai: AsyncOpenAI, says: Says) -> None:
    says(f"[INST]Well.{MISTRAL}")
    answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL])
    message = answer.choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls or ()] == [ARGUMENTS]  # type: ignore[union-attr]
    assert message.content == "Well."  # the other special token is left out, as ever
    plain = await openai.chat.completions.create(model=BASE, messages=HI)
    assert "[TOOL_CALLS]" not in (plain.choices[0].message.content or "")


async def test_ids_of_calls_are_such_as_the_template_takes_back(
    openai: AsyncOpenAI, says: Says, house: Any, text_model: TextModel
) -> None:
    says(MISTRAL)
    (call,) = await calls_in(openai)
    assert len(call.id) == 9
    turns = [{"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}]
    await calls_in(openai, messages=[*HI, *turns, {"role": "tool", "tool_call_id": call.id, "content": "warm"}])
    prompt = text_model.decode(house.engine.requests[1].prompt_token_ids, False)
    assert prompt.count(call.id) == 2


async def test_adapters_own_format_counts_before_the_templates(openai: AsyncOpenAI, says: Says, house: Any) -> None:
    await house.register("acme/agent", metadata={"tool_call_parser": "hermes", "reasoning_parser": "qwen3"})
    says(f"<think>Hm.</think>{HERMES}")
    answer = await openai.chat.completions.create(model="acme/agent", messages=HI, tools=[TOOL])
    message = answer.choices[0].message
    assert len(message.tool_calls or ()) == 1
    assert getattr(message, "reasoning_content", None) == "Hm."
    assert await calls_in(openai) == []


async def test_format_that_nobody_knows_is_refused_at_registration(admin: aiohttp.ClientSession, house: Any) -> None:
    folder = house.make_adapter("agent")
    body = {"id": "acme/agent", "source": str(folder), "metadata": {"tool_call_parser": "klingon"}}
    async with admin.post("/admin/adapters", json=body) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "metadata.tool_call_parser")


class TestNamedBySettings:
    """--tool-call-parser and --reasoning-parser"""

    @pytest.fixture
    def server_config(self, server_config: ServerConfig) -> ServerConfig:
        return replace(server_config, tool_call_parser="hermes", reasoning_parser="deepseek_r1")

    async def test_settings_count_before_the_template(self, openai: AsyncOpenAI, says: Says) -> None:
        says(f"<think>Hm.</think>{HERMES}")
        answer = await openai.chat.completions.create(model=BASE, messages=HI, tools=[TOOL])
        assert len(answer.choices[0].message.tool_calls or ()) == 1
        assert getattr(answer.choices[0].message, "reasoning", None) == "Hm."


class TestTurnedOff:
    """--tool-call-parser none"""

    @pytest.fixture
    def server_config(self, server_config: ServerConfig) -> ServerConfig:
        return replace(server_config, tool_call_parser="none")

    async def test_tools_are_refused_naming_the_setting(self, openai: AsyncOpenAI, says: Says) -> None:
        says("Well.")
        with pytest.raises(BadRequestError, match="--tool-call-parser") as caught:
            await calls_in(openai)
        assert caught.value.param == "tools"
        assert await calls_in(openai, tool_choice="none") == []
