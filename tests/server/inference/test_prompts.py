"""Whoever sends much text is tokenised beside the event loop, which belongs to everybody's streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.server.inference import prompts
from lora_serve.server.inference.prompts import chat_messages, chat_prompt, completion_prompts
from lora_serve.server.schemas.inference import ChatFields, CompletionFields
from lora_serve.text.tokenizer import TextModel


@pytest.fixture
def threads(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Those on which messages were read and rendered, texts tokenised, or ids turned into text."""
    found: list[threading.Thread] = []

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*values: Any, **options: Any) -> Any:
            found.append(threading.current_thread())
            return work(*values, **options)

        return noting

    for name in ("encode", "encode_chat", "decode"):
        monkeypatch.setattr(text_model, name, watched(getattr(text_model, name)))
    for name in ("parse_messages", "render_chat"):
        monkeypatch.setattr(prompts, name, watched(getattr(prompts, name)))
    return found


@pytest.mark.parametrize(
    ("prompt", "is_much"),
    [
        ("short", False),
        (["short"] * 64, False),
        (["none of them is long alone " * 40] * 64, True),
        ([1] * 60_000, True),
    ],
)
async def test_prompts_that_are_much_together_do_not_hold_up_the_event_loop(
    text_model: TextModel, spec: ModelSpec, threads: list[threading.Thread], prompt: Any, is_much: bool
) -> None:
    found = await completion_prompts(text_model, spec, CompletionFields(prompt=prompt, echo=True))
    assert len(found) == (len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1)
    assert threads
    assert all((thread is not threading.main_thread()) == is_much for thread in threads)


@pytest.mark.parametrize(
    ("messages", "is_much"),
    [
        ([{"role": "user", "content": "short"}], False),
        ([{"role": "user", "content": ""}] * 10_000, True),
        ([{"role": "user", "content": [{"type": "text", "text": ""}] * 1_000}], True),
    ],
)
async def test_many_messages_do_not_hold_up_the_event_loop_though_there_is_nothing_in_them(
    text_model: TextModel, spec: ModelSpec, threads: list[threading.Thread], messages: Any, is_much: bool
) -> None:
    found = await chat_messages(messages)
    assert len(found) == len(messages)
    assert (threads[0] is not threading.main_thread()) == is_much
    with suppress(InvalidRequestError):  # it is longer than the context, which is known once it is rendered
        await chat_prompt(text_model, spec, ChatFields(messages=messages), found)
    assert (threads[1] is not threading.main_thread()) == (len(messages) > 1)
