"""Chat messages by the model's own template, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.chat import parse_messages, render_chat
from lora_serve.text.tokenizer import TextModel
from tests.text.tiny_tokenizer import byte_level_tokenizer

TEXT_MODEL = TextModel(byte_level_tokenizer())


def render(messages: Any, **options: Any) -> str:
    return render_chat(TEXT_MODEL, parse_messages(messages), **options).text


def test_messages_are_rendered_as_transformers_does_it() -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    expected = TEXT_MODEL.wrapper.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render(messages) == expected == "<|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"


def test_text_parts_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo" in render([{"role": "user", "content": parts}])


def test_last_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
    assert render(messages, add_generation_prompt=False, continue_final_message=True).endswith("<|assistant|>Hel")


def test_developer_is_system_to_a_template_that_does_not_know_it() -> None:
    assert render([{"role": "developer", "content": "x"}]).startswith("<|system|>x")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "a"}, {"role": "function", "content": "b"}], "messages[1]"),
    ],
)
def test_wrong_messages_are_refused_naming_the_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(messages)
    assert caught.value.param == param


RAG = """
{%- for document in documents or [] %}[{{ document.title }}: {{ document.text }}]{% endfor %}
{%- for message in messages %}
    {%- if message['role'] == 'context' %}({{ message['content'] }})
    {%- elif message['role'] != 'content' %}{{ message['role'] }}: {{ message['content'] }};
    {%- endif %}
{%- endfor %}"""
DOCUMENTS = [{"title": "Returns", "text": "<|end|> 30 days"}]


def rag_model() -> TextModel:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = RAG
    return TextModel(tokenizer)


def test_role_and_documents_that_the_template_names_reach_it_as_text() -> None:
    model, said = rag_model(), [{"role": "context", "content": "shop"}, {"role": "user", "content": "Hi"}]
    rendered = render_chat(model, parse_messages(said), documents=DOCUMENTS)
    expected = model.wrapper.apply_chat_template(said, documents=DOCUMENTS, tokenize=False, add_generation_prompt=True)
    assert rendered.text == expected == "[Returns: <|end|> 30 days](shop)user: Hi;"
    assert model.token_id("<|end|>") not in model.encode_chat(rendered, False)


@pytest.mark.parametrize(
    "role", ["content", "critic", "<|end|>", ""]
)  # `content` is named, but no such role is written
def test_role_that_the_template_does_not_write_is_refused(role: str) -> None:
    with pytest.raises(InvalidRequestError, match="role") as caught:
        render_chat(rag_model(), parse_messages([{"role": role, "content": "x"}]))
    assert caught.value.param == "messages[0].role"


def test_documents_without_a_place_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no place for `documents`") as caught:
        render([{"role": "user", "content": "Hi"}], documents=DOCUMENTS)
    assert caught.value.param == "documents"


def test_model_without_a_template_says_so() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        render_chat(TextModel(tokenizer), parse_messages([{"role": "user", "content": "x"}]))


def test_of_several_templates_the_default_is_taken_and_no_other() -> None:
    for name, expected in (("default", "Hi"), ("rag", None)):
        tokenizer = byte_level_tokenizer()
        tokenizer.chat_template = {name: "{{ messages[0].content }}", "tool_use": "tools"}
        text_model, messages = TextModel(tokenizer), parse_messages([{"role": "user", "content": "Hi"}])
        if expected is None:
            with pytest.raises(InvalidRequestError, match="no chat template"):
                render_chat(text_model, messages)
        else:
            assert render_chat(text_model, messages).text == expected


def test_refusal_of_the_template_is_the_callers_error() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render_chat(TextModel(tokenizer), parse_messages([{"role": "user", "content": "x"}]))


def test_content_is_data_and_never_a_template() -> None:
    assert "{{ 7 * 7 }}" in render([{"role": "user", "content": "{{ 7 * 7 }}"}])


def test_template_values_reach_the_template() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = "{% if enable_thinking %}think{% else %}plain{% endif %}"
    text_model, messages = TextModel(tokenizer), parse_messages([{"role": "user", "content": "x"}])
    assert render_chat(text_model, messages, template_values={"enable_thinking": True}).text == "think"


@pytest.mark.parametrize("name", ["chat_template", "messages", "conversation", "tokenize", "tools"])
def test_template_values_cannot_replace_the_template_or_the_messages(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="may not hold"):
        render([{"role": "user", "content": "x"}], template_values={name: "{{ 1 }}"})
