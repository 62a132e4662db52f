"""Texts and pairs as encoders want them, cut if they are too long, with transformers' own wrapper as the oracle."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import InvalidRequestError, ModelError
from lora_serve.text.tokenizer import TextModel, TextPreparation, preparation_of
from tests.text.tiny_tokenizer import bert_tokenizer, byte_level_tokenizer

TOKENIZERS = {"bert": bert_tokenizer, "byte_level": byte_level_tokenizer}
TEXTS = ("", "a", "The quick brown fox", "hello world! 12", "der schöne hund " * 3)
SIDES = pytest.mark.parametrize("side", ["right", "left"])


def pair_of(kind: str, side: str = "right") -> tuple[TextModel, Any]:
    """Ours, and the oracle: wrappers of their own, as transformers' one changes its tokenizer's state."""
    mine, oracle = TOKENIZERS[kind](), TOKENIZERS[kind]()
    mine.truncation_side = oracle.truncation_side = side
    return TextModel(mine), oracle


@pytest.mark.parametrize("kind", TOKENIZERS)
@SIDES
@pytest.mark.parametrize("special", [True, False])
def test_cut_texts_and_pairs_are_what_transformers_gives(kind: str, side: str, special: bool) -> None:
    mine, oracle = pair_of(kind, side)
    for first in TEXTS:
        for second in (None, *TEXTS[1:]):  # the oracle takes an empty text for none
            for limit in range(3, 40):
                expected = oracle(first, second, truncation=True, max_length=limit, add_special_tokens=special)
                found = mine.encode_input(first, second, add_special_tokens=special, max_tokens=limit)
                assert list(found.token_ids) == expected["input_ids"], (first, second, limit)
                assert list(found.type_ids) == expected.get("token_type_ids", []), (first, second, limit)


@given(st.text(max_size=60), st.text(min_size=1, max_size=60), st.integers(3, 40))
def test_any_pair_is_cut_as_transformers_cuts_it(first: str, second: str, limit: int) -> None:
    found = BERT.encode_input(first, second, max_tokens=limit)
    expected = ORACLE(first, second, truncation=True, max_length=limit)
    assert list(found.token_ids) == expected["input_ids"]
    assert list(found.type_ids) == expected["token_type_ids"]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text(max_size=60), most=st.integers(1, 20))
def test_beginning_of_a_text_is_as_long_as_its_tokens_allow(kind: str, text: str, most: int) -> None:
    mine, oracle = PAIRS[kind]
    found = mine.beginning(text, most)
    assert text.startswith(found)
    whole = oracle(text, add_special_tokens=False, return_offsets_mapping=True)
    assert bool(found) == bool(text)  # a first character of more tokens stays
    if len(found) > 1:
        assert len(oracle(found, add_special_tokens=False)["input_ids"]) <= most
    if len(whole["input_ids"]) <= most:
        assert found == text
    else:
        ends = [min(end, start) for (_, end), (start, _) in itertools.pairwise(whole["offset_mapping"])]
        assert len(found) <= max(1, ends[most - 1])


PAIRS = {kind: pair_of(kind) for kind in TOKENIZERS}
BERT, ORACLE = PAIRS["bert"]


def test_what_is_not_too_long_is_not_cut() -> None:
    found = BERT.encode_input("the fox", "the dog", max_tokens=100)
    assert list(found.token_ids) == ORACLE("the fox", "the dog")["input_ids"]
    assert BERT.encode_input("the fox") == BERT.encode_input("the fox", max_tokens=len(found.token_ids))


def test_room_for_less_than_the_special_tokens_is_refused_in_words() -> None:
    with pytest.raises(InvalidRequestError, match="2 special tokens"):
        BERT.encode_input("the quick fox", max_tokens=1)


def test_folder_without_chat_template_and_end_of_text_is_loaded(tmp_path: Path) -> None:
    bert_tokenizer().save_pretrained(tmp_path)
    loaded = TextModel.load(str(tmp_path))
    assert loaded.wrapper.eos_token is None
    assert not loaded.wrapper.chat_template
    assert loaded.encode_input("the fox", "dog") == BERT.encode_input("the fox", "dog")
    assert loaded.preparation == TextPreparation()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "The Fox"),
        ({"config_sentence_transformers.json": {"prompts": {"query": "q: "}, "default_prompt_name": None}}, "The Fox"),
        ({"config_sentence_transformers.json": {"prompts": {"query": "q: "}}}, "The Fox"),
        (
            {"config_sentence_transformers.json": {"prompts": {"query": "Q: "}, "default_prompt_name": "query"}},
            "Q: The Fox",
        ),
        ({"sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": True}}, "the fox"),
    ],
)
def test_texts_are_prepared_as_the_folder_says(tmp_path: Path, files: dict[str, Any], expected: str) -> None:
    bert_tokenizer().save_pretrained(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    loaded = TextModel.load(str(tmp_path))
    assert loaded.preparation.of("The Fox") == expected
    number = max(loaded.vocabulary().values()) + 1
    assert loaded.with_added((AddedToken(number, "<new>"),)).preparation == loaded.preparation


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"default_prompt_name": "query", "prompts": {}}', '{"default_prompt_name": "query"}']
)
def test_broken_prompts_file_is_refused_in_words(tmp_path: Path, content: str) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(content)
    with pytest.raises(ModelError, match="config_sentence_transformers"):
        preparation_of(str(tmp_path))
