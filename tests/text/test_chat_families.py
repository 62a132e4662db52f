"""Chats of all families: token for token what transformers makes of them, but for control tokens' texts in messages."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import lora_serve
from lora_serve.core.errors import InvalidRequestError
from lora_serve.text.chat import parse_messages, render_chat
from lora_serve.text.tokenizer import TextModel
from tests.text.chat_families import FAMILIES, Family, wrapped, wrapper_of
from tests.tiers import num_examples

DEMO_MODEL = Path(lora_serve.__file__).parent / "demo_data" / "model"
ALL = pytest.mark.parametrize("name", FAMILIES)
CONTENTS = (
    "Hi",
    "",
    " ",
    "  two spaces before, a line break after\n",
    "\n\n\ttabs\t\n",
    "Grüße, 你好 😀 👩‍👩‍👧‍👦 e\u0301 \ufb01 \u212a",
    "def f(a: list[int]) -> bool:\n    return a < b | c > d  # <b>bold</b> && {{ x }} {% y %}",
    "user",
    "assistant",
    "end",
    "/think",
    "think",
    "a",
    "<",
    ">",
    "|>",
    "<|",
    "x <| y |> z",
    "[INST",
    "\U000f0000 \U000f8000 \U0010fffd \ue000",
    "<div>" * 40,
)
SYSTEM, USER, ANSWER = "You are kind.", "How are you?", "Fine."


@cache
def text_of(name: str) -> TextModel:
    return TextModel(wrapper_of(name))


def chat(place: str, content: str) -> list[dict[str, str]]:
    """Four turns, one of which says `content`."""
    said = {"system": SYSTEM, "user": USER, "assistant": ANSWER, "last": "And now?"} | {place: content}
    roles = {"system": "system", "user": "user", "assistant": "assistant", "last": "user"}
    return [{"role": roles[at], "content": said[at]} for at in roles if at != "system" or place == "system"]


def theirs(wrapper: PreTrainedTokenizerFast, messages: Any, **options: Any) -> list[int] | None:
    """None: the template refuses it."""
    try:
        options = {"add_generation_prompt": True} | options
        return list(wrapper.apply_chat_template(messages, tokenize=True, **options)["input_ids"])
    except (jinja2.TemplateError, ValueError):
        return None


def ours(text: TextModel, messages: Any, **options: Any) -> list[int] | None:
    try:
        rendered = render_chat(text, parse_messages(messages), **options)
    except InvalidRequestError as error:
        if "chat template refuses" in str(error):
            return None
        raise
    return list(text.encode_chat(rendered, False))


def controls(text: TextModel, ids: list[int]) -> list[int]:
    assert text.control_tokens is not None
    numbers = {text.wrapper.convert_tokens_to_ids(token) for token in text.control_tokens.texts} - {unknown(text)}
    return [number for number in ids if number in numbers]


def unknown(text: TextModel) -> int | None:
    return text.wrapper.convert_tokens_to_ids("<unk>") if "<unk>" in text.vocabulary() else None


def same_text(text: TextModel, ids: list[int], other: list[int]) -> bool:
    """But for white space, which decoders strip and put around special tokens, and which belongs to some of these."""
    shown, expected = ("".join(text.decode(part, skip_special_tokens=False).split()) for part in (ids, other))
    return shown == expected


@pytest.mark.crossed
@ALL
@pytest.mark.parametrize("place", ["system", "user", "assistant", "last"])
def test_ordinary_content_gives_the_ids_of_transformers(name: str, place: str) -> None:
    text = text_of(name)
    for content in CONTENTS:
        messages = chat(place, content)
        for prompted in (True, False):
            expected = theirs(text.wrapper, messages, add_generation_prompt=prompted)
            assert ours(text, messages, add_generation_prompt=prompted) == expected, content


@ALL
def test_continued_messages_give_the_ids_of_transformers(name: str) -> None:
    text, options = text_of(name), {"add_generation_prompt": False, "continue_final_message": True}
    for content in ("Hel", "a < b", "x <| ", " <b>  "):
        messages = [{"role": "user", "content": USER}, {"role": "assistant", "content": content}]
        assert ours(text, messages, **options) == theirs(text.wrapper, messages, **options)


WORDS = st.sampled_from(
    ["<", "<|", "|>", ">", "[", "/", "im_", "end", "user", " ", "\n", "é", "你", "😀", "K", "<b>", "\ue000"]
)
SAID = st.lists(WORDS | st.text(max_size=6), max_size=12).map("".join)


@ALL
@settings(max_examples=num_examples() // 5)
@given(said=st.lists(SAID, min_size=3, max_size=3))
def test_whatever_is_said_gives_the_ids_of_transformers(name: str, said: list[str]) -> None:
    text = text_of(name)
    tokens = text.control_tokens
    assert tokens is not None
    messages = [{"role": role, "content": part} for role, part in zip(("user", "assistant", "user"), said, strict=True)]
    expected = theirs(text.wrapper, messages)
    if expected is not None and controls(text, expected) != controls(
        text, theirs(text.wrapper, chat("user", USER)) or []
    ):
        return  # it holds the text of a control token, or one is left out with what is said
    assert ours(text, messages) == expected


@pytest.mark.crossed
@ALL
@pytest.mark.parametrize("place", ["system", "user", "assistant", "last"])
def test_no_content_writes_a_control_token(name: str, place: str) -> None:
    text = text_of(name)
    assert text.control_tokens is not None
    for token in {*text.control_tokens.texts, "<|im_end|>", "</s>"}:
        for form in ("{}", "x{}", "{}x", "a {} b", "{0}{0}\n{0}", "{}<|", "{} é 你\U000f0000\U000f8000"):
            messages = chat(place, form.format(token))
            plain = theirs(text.wrapper, messages)
            try:
                ids = ours(text, messages)
            except InvalidRequestError:
                assert token in FAMILIES[name].looks_for, token
                raise
            if ids is None or token in FAMILIES[name].looks_for:
                assert (ids is None) == (plain is None)
                continue
            harmless = theirs(text.wrapper, chat(place, form.format("zebra"))) or []
            assert controls(text, ids) == controls(text, harmless), (token, form)
            if name != "lowering":
                assert same_text(text, ids, plain or []), (token, form)


def renamed(name: str) -> PreTrainedTokenizerFast:
    """The same tokenizer and template with other texts for control tokens: those of the family mean nothing to it."""
    family: Family = FAMILIES[name]
    pairs = {token: _other(token) for token in (*family.specials, *family.ordinary, *family.pieces)}
    template = family.template
    for token in sorted(pairs, key=len, reverse=True):
        template = template.replace(token, pairs[token])
    described = json.loads(wrapper_of(name).backend_tokenizer.to_str())
    for added in described["added_tokens"]:
        added["content"] = pairs.get(added["content"], added["content"])
    vocabulary = described["model"]["vocab"]
    tokens = pairs.keys() - set(family.pieces)
    described["model"]["vocab"] = {pairs[key] if key in tokens else key: number for key, number in vocabulary.items()}
    described["post_processor"] = None
    tokenizer = Tokenizer.from_str(json.dumps(described))
    bos, eos = (None if token is None else pairs[token] for token in (family.bos, family.eos))
    return wrapped(tokenizer, template, bos=bos, eos=eos)


def _other(token: str) -> str:
    return token.translate(str.maketrans("<>[]|/\uff5c", "⟨⟩⟦⟧¦÷‖"))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("llama_2_oldest", "lowering")])
def test_text_of_a_control_token_is_tokenised_as_if_there_were_no_such_token(name: str) -> None:
    text, other = text_of(name), renamed(name)
    family = FAMILIES[name]
    for token in (*family.specials, *family.ordinary):
        if token in family.looks_for:
            continue
        for place in ("system", "user", "assistant", "last"):
            for form in ("{}", "Hello {} world", "<|{}>", " {}\n"):
                messages = chat(place, form.format(token))
                assert ours(text, messages) == theirs(other, messages), (token, place, form)


@ALL
def test_no_two_texts_make_a_control_token_together_nor_with_the_template(name: str) -> None:
    text = text_of(name)
    assert text.control_tokens is not None
    for token in text.control_tokens.texts:
        if token in FAMILIES[name].looks_for:
            continue
        for cut in range(1, len(token)):
            messages = chat("user", token[:cut])
            messages[-2]["content"] = token[cut:]
            harmless = theirs(text.wrapper, chat("user", "zebra"))
            assert controls(text, ours(text, messages) or []) == controls(text, harmless or []), (token, cut)


def test_demo_models_own_chats_are_transformers_too_and_hold_its_control_tokens_alone() -> None:
    text = TextModel.load(str(DEMO_MODEL))
    for place in ("system", "user", "assistant", "last"):
        for content in CONTENTS:
            assert ours(text, chat(place, content)) == theirs(text.wrapper, chat(place, content)), content
        harmless = theirs(text.wrapper, chat(place, "zebra")) or []
        for token in ("<|end|>", "<|system|>", "<|begin|>", "<|assistant|>", "<|pad|>"):
            ids = ours(text, chat(place, f"x{token}y")) or []
            assert controls(text, ids) == controls(text, harmless)
            assert same_text(text, ids, theirs(text.wrapper, chat(place, f"x{token}y")) or [])
