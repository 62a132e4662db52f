"""The same house with a model whose chat template knows tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import TokenGrammar
from lora_serve.text.tokenizer import TextModel
from tests.mock_engine import MockReply
from tests.text.tool_templates import tool_model

Says = Callable[..., None]


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return tool_model("qwen2_5")


@pytest.fixture
def spec(spec: ModelSpec, text_model: TextModel) -> ModelSpec:
    end = text_model.token_id(text_model.wrapper.eos_token)
    assert end is not None
    return replace(spec, eos_token_ids=(end,), max_model_len=4096)


@pytest.fixture
def says(house: Any, text_model: TextModel) -> Says:
    """says(text): what the model answers, token by token, and then ends unless `end` is false."""

    def script(*texts: str, end: bool = True, **reply: Any) -> None:
        ending = text_model.wrapper.eos_token if end else ""
        replies = [MockReply(token_ids=text_model.encode(text + ending, False), **reply) for text in texts]
        answers = iter(replies)
        house.engine.script = lambda request: next(answers, replies[-1])

    return script


def accepts(text_model: TextModel, grammar: TokenGrammar, text: str) -> bool:
    """True if a model may answer `text` under the grammar, with the tokens that the tokenizer gives it."""
    backend = text_model.wrapper.backend_tokenizer
    tokenizer = LLTokenizer(backend.to_str(), n_vocab=text_model.vocab_size, eos_token=text_model.wrapper.eos_token_id)
    matcher = LLMatcher(tokenizer, grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = text_model.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(list(token_ids)) == len(token_ids) and matcher.is_accepting()
