"""Whatever a body holds, it gives inputs or a 400."""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.inference.prompts import parse_prompts
from lora_serve.server.json_body import check_fields
from lora_serve.server.pooling.scores import documents_of, texts_of
from lora_serve.server.schemas.pooling import ClassifyFields, EmbeddingFields, RerankFields, ScoreFields

MODELS = (ClassifyFields, EmbeddingFields, RerankFields, ScoreFields)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["text", "x"]), inner, max_size=2),
    max_leaves=10,
)
NAMES = st.sampled_from(sorted({name for model in MODELS for name in model.model_fields}))


@given(st.dictionaries(NAMES, JSON_VALUES, max_size=6))
def test_any_values_of_any_fields_give_fields_or_a_400(body: dict[str, Any]) -> None:
    for model in MODELS:
        with suppress(InvalidRequestError):
            check_fields(model, {"input": "x", "text_1": "x", "text_2": "x", "query": "x", "documents": ["x"], **body})


@given(JSON_VALUES)
def test_any_value_gives_inputs_or_a_400(value: Any) -> None:
    with suppress(InvalidRequestError):
        assert all(isinstance(item, str | list | array) for item in parse_prompts(value, "input", 2048))
    with suppress(InvalidRequestError):
        assert all(isinstance(text, str) for text in texts_of(value, "text_1"))
    with suppress(InvalidRequestError):
        assert all(isinstance(text, str) for text in documents_of(value))
