"""Whoever sends much text is tokenised beside the event loop, which belongs to everybody's streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from lora_serve.core.model_spec import ModelSpec
from lora_serve.server.openai.prompts import completion_prompts
from lora_serve.server.schemas.completion import CompletionFields
from lora_serve.text.tokenizer import TextModel


@pytest.fixture
def threads(text_model: TextModel, monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Those on which texts were tokenised, or ids turned into text."""
    found: list[threading.Thread] = []

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*values: Any) -> Any:
            found.append(threading.current_thread())
            return work(*values)

        return noting

    for name in ("encode", "decode"):
        monkeypatch.setattr(text_model, name, watched(getattr(text_model, name)))
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
