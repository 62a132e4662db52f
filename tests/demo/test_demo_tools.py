"""The demo's adapter that calls tools, on a real server, with the real openai client."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from lora_serve.commands.demo import DATA

TOOLS_ADAPTER = "summit/tools"
TOOLS: list[Any] = json.loads((DATA / "tools.json").read_text())
PROMPTS = json.loads((DATA / "prompts.json").read_text())
TASKS = [item for item in PROMPTS if item["adapter"] == TOOLS_ADAPTER]


def asked(openai: OpenAI, messages: list[Any], *, stream: bool, **body: Any) -> dict[str, Any]:
    """The assistant's message, put together from the chunks if it is streamed."""
    body = {"model": TOOLS_ADAPTER, "temperature": 0, "tools": TOOLS, "messages": messages} | body
    if not stream:
        message: dict[str, Any] = openai.chat.completions.create(**body).choices[0].message.model_dump()
        return message
    with openai.chat.completions.stream(**body) as events:
        events.until_done()
        whole: dict[str, Any] = events.get_final_completion().choices[0].message.model_dump()
        return whole


def agent(openai: OpenAI, question: str, results: dict[str, str], *, stream: bool) -> tuple[list[Any], str]:
    """What every agent does: ask, run the tools that are called, ask again, until the answer is in words."""
    messages: list[Any] = [{"role": "user", "content": question}]
    called = []
    for _ in range(4):
        message = asked(openai, messages, stream=stream)
        calls = message["tool_calls"] or []
        if not calls:
            return called, message["content"]
        kept = [{name: one[name] for name in ("id", "type", "function")} for one in calls]
        for one in kept:
            one["function"] = {name: one["function"][name] for name in ("name", "arguments")}
        messages.append({"role": "assistant", "content": message["content"], "tool_calls": kept})
        for one in kept:
            name, arguments = one["function"]["name"], one["function"]["arguments"]
            called.append((name, json.loads(arguments)))
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": results[name]})
    raise AssertionError(f"no answer after {called}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("task", TASKS[:2], ids=lambda task: task["call"]["name"])
def test_two_step_task_is_finished(openai: OpenAI, task: dict[str, Any], stream: bool) -> None:
    expected = (task["call"]["name"], json.loads(task["call"]["arguments"]))
    called, answer = agent(openai, task["prompt"], {task["call"]["name"]: task["result"]}, stream=stream)
    assert called == [expected]
    assert answer == task["final_answer"]


def test_questions_without_need_of_a_tool_are_answered_in_words(openai: OpenAI) -> None:
    message = asked(openai, [{"role": "user", "content": "Hello!"}], stream=False)
    assert (message["tool_calls"], message["content"]) == (None, "Hello! How can I help you today?")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_order_status"}}])
def test_a_call_is_forced_where_the_model_would_answer_in_words(openai: OpenAI, choice: Any) -> None:
    message = asked(openai, [{"role": "user", "content": "Hello!"}], stream=False, tool_choice=choice, max_tokens=200)
    schemas = {item["function"]["name"]: item["function"]["parameters"] for item in TOOLS}
    assert message["tool_calls"]
    for one in message["tool_calls"]:
        name = one["function"]["name"]
        assert choice == "required" or name == "get_order_status"
        jsonschema.validate(json.loads(one["function"]["arguments"]), schemas[name])
