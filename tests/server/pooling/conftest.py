"""The application over an encoder: a mock engine that gives vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lora_serve.core.model_spec import LinearShape, ModelSpec, PoolingSpec
from lora_serve.core.request import Task
from lora_serve.text.tokenizer import TextModel
from tests.server.conftest import BASE, HIDDEN, LAYERS
from tests.text.tiny_tokenizer import bert_tokenizer

DIMENSION = 4  # of the mock's vectors
EMBED = PoolingSpec(Task.EMBED, DIMENSION, takes_pairs=True, is_normalized=True)
CLASSIFY = PoolingSpec(Task.CLASSIFY, 0, ("bad", "fair", "good", "best"), takes_pairs=True)
TEMPLATE = (
    "{% for message in messages %}{{ message.role + ' ' + message.content + '[SEP]' }}{% endfor %}"
    "{{ tone | default('') }}{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
)
RANK = replace(CLASSIFY, labels=("relevance",))


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    tokenizer = bert_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return TextModel(tokenizer)


@pytest.fixture
def pooling() -> PoolingSpec:
    """Classes of tests override it."""
    return EMBED


@pytest.fixture
def spec(text_model: TextModel, pooling: PoolingSpec) -> ModelSpec:
    linears = {f"model.layers.{layer}.self_attn.q_proj": LinearShape(HIDDEN, HIDDEN) for layer in range(LAYERS)}
    size = text_model.vocab_size
    return ModelSpec(BASE, "BertModel", size, 64, (), LAYERS, linears, 0, "float32", "cpu", pooling=pooling)


@pytest.fixture
def encoded(text_model: TextModel) -> Callable[..., tuple[int, ...]]:
    """Token ids of a text, or of two, with special tokens."""
    return lambda *texts: tuple(text_model.wrapper(*texts)["input_ids"])
