"""One token at a time gives what the tokenizer gives for the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.text.output import Detokenizer
from lora_serve.text.tokenizer import TextModel
from tests.text.tiny_tokenizer import byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = TextModel(byte_level_tokenizer())
BYTE_FALLBACK = TextModel(byte_fallback_tokenizer())
KINDS = pytest.mark.parametrize("text_model", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd▁"), max_size=40)


def pieces_of(text_model: TextModel, token_ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(text_model, prompt or [])
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    return [*pieces, detokenizer.flush()]


@KINDS
@given(text=TEXTS)
def test_pieces_together_are_the_full_decode(text_model: TextModel, text: str) -> None:
    token_ids = list(text_model.encode(text, add_special_tokens=False))
    assert "".join(pieces_of(text_model, token_ids)) == text_model.decode(token_ids)


@KINDS
@given(text=TEXTS)
def test_no_piece_shows_half_a_character(text_model: TextModel, text: str) -> None:
    token_ids = list(text_model.encode(text, add_special_tokens=False))
    assert not any("\ufffd" in piece for piece in pieces_of(text_model, token_ids))


@KINDS
@given(prompt=TEXTS, text=TEXTS)
def test_answer_continues_the_prompt_as_one_text(text_model: TextModel, prompt: str, text: str) -> None:
    """A decoder strips the space of a text's first token; an answer's first token is not one."""
    before = list(text_model.encode("x" + prompt, add_special_tokens=True))
    after = list(text_model.encode(text, add_special_tokens=False))
    together = text_model.decode(before) + "".join(pieces_of(text_model, after, before))
    assert together == text_model.decode(before + after)


@given(token_ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60))
def test_any_token_ids_give_the_full_decode_even_where_they_are_not_utf8(token_ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, token_ids)) == BYTE_LEVEL.decode(token_ids)


@given(token_ids=st.lists(st.integers(0, BYTE_FALLBACK.vocab_size + 5), max_size=60))
def test_any_token_ids_of_a_byte_fallback_tokenizer_give_some_text(token_ids: list[int]) -> None:
    pieces = pieces_of(BYTE_FALLBACK, token_ids)
    assert len("".join(pieces)) <= 4 * sum(len(BYTE_FALLBACK.token_text(token_id)) + 1 for token_id in token_ids)


def test_character_split_over_tokens_comes_with_its_last_token() -> None:
    token_ids = [BYTE_LEVEL.wrapper.convert_tokens_to_ids(token) for token in ("ð", "Ł", "ĺ", "Ģ")]
    assert BYTE_LEVEL.decode(token_ids) == "😀"
    assert pieces_of(BYTE_LEVEL, token_ids) == ["", "", "", "😀", ""]


def test_incomplete_character_at_the_end_is_a_replacement_character() -> None:
    token_ids = [BYTE_LEVEL.wrapper.convert_tokens_to_ids(token) for token in ("A", "ð", "Ł")]
    assert pieces_of(BYTE_LEVEL, token_ids) == ["A", "", "", "\ufffd"]


def test_endless_invalid_bytes_are_not_held_back_for_ever() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL)
    invalid = BYTE_LEVEL.wrapper.convert_tokens_to_ids("ÿ")
    shown = "".join(detokenizer.push(invalid) for _ in range(100))
    assert len(shown) > 90
    assert shown + detokenizer.flush() == "\ufffd" * 100


def test_special_tokens_are_hidden_or_shown_as_asked() -> None:
    end = BYTE_LEVEL.wrapper.convert_tokens_to_ids("<|end|>")
    assert Detokenizer(BYTE_LEVEL).push(end) == ""
    assert Detokenizer(BYTE_LEVEL, skip_special_tokens=False).push(end) == "<|end|>"


def test_ids_beyond_the_tokenizers_vocabulary_give_nothing_and_disturb_nothing() -> None:
    letters = list(BYTE_LEVEL.encode("Hello", add_special_tokens=False))
    unknown = [BYTE_LEVEL.vocab_size + 7] * 50
    assert "".join(pieces_of(BYTE_LEVEL, [*unknown, *letters, *unknown])) == "Hello"
