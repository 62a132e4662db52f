"""Text <-> token ids, with transformers' own wrapper as the oracle."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.text.chat import parse_messages, render_chat
from lora_serve.text.tokenizer import TextModel
from tests.text.tiny_tokenizer import CORPUS, byte_fallback_tokenizer, byte_level_tokenizer

BYTE_LEVEL = TextModel(byte_level_tokenizer())
BYTE_FALLBACK = TextModel(byte_fallback_tokenizer())
KINDS = pytest.mark.parametrize("text_model", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])


@KINDS
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encoding_is_what_transformers_gives(text_model: TextModel, add_special_tokens: bool) -> None:
    for text in CORPUS:
        expected = text_model.wrapper(text, add_special_tokens=add_special_tokens)["input_ids"]
        assert list(text_model.encode(text, add_special_tokens)) == expected


@KINDS
@pytest.mark.parametrize("skip", [True, False])
def test_decoding_is_what_transformers_gives(text_model: TextModel, skip: bool) -> None:
    for text in CORPUS:
        token_ids = list(text_model.encode(text, add_special_tokens=True))
        expected = text_model.wrapper.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert text_model.decode(token_ids, skip) == expected


@KINDS
@given(text=st.text(max_size=30))
def test_bytes_of_the_tokens_together_are_the_texts_bytes(text_model: TextModel, text: str) -> None:
    token_ids = text_model.encode(text, add_special_tokens=False)
    together = b"".join(map(text_model.token_bytes, token_ids)).replace("▁".encode(), b" ")
    first_space = b" " if text and text_model is BYTE_FALLBACK else b""  # SentencePiece puts one before the text
    assert together == first_space + text.encode().replace("▁".encode(), b" ")


def test_text_of_one_token_keeps_its_leading_space() -> None:
    token_id = BYTE_FALLBACK.wrapper.convert_tokens_to_ids("▁wor")
    assert BYTE_FALLBACK.decode([token_id]) == "wor"
    assert BYTE_FALLBACK.token_text(token_id) == " wor"


def test_part_of_a_character_has_its_own_byte() -> None:
    assert BYTE_FALLBACK.token_bytes(BYTE_FALLBACK.wrapper.convert_tokens_to_ids("<0xE2>")) == b"\xe2"
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.wrapper.convert_tokens_to_ids("ð")) == b"\xf0"


def test_many_threads_may_encode_at_once() -> None:
    texts = [text * 20 for text in CORPUS] * 8
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: BYTE_LEVEL.encode(text, add_special_tokens=True), texts))
    assert found == [BYTE_LEVEL.encode(text, add_special_tokens=True) for text in texts]


def test_tokenizer_of_a_folder_is_loaded(tmp_path: Path) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    loaded = TextModel.load(str(tmp_path))
    assert loaded.encode("Hello world!", True) == BYTE_LEVEL.encode("Hello world!", True)
    assert loaded.wrapper.chat_template == BYTE_LEVEL.wrapper.chat_template


def test_folder_without_a_tokenizer_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        TextModel.load(str(tmp_path))


def test_operators_template_takes_the_models_place(tmp_path: Path) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    text = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(text)
    for given_as in (str(tmp_path / "own.jinja"), text):
        loaded = TextModel.load(str(tmp_path), chat_template=given_as)
        assert loaded.template.source == text
        assert render_chat(loaded, parse_messages([{"role": "user", "content": "hi"}])).text == "[user] hi"
    for wrong in ("{% for %}", str(tmp_path), str(tmp_path / "missing")):
        with pytest.raises(ConfigError, match="--chat-template"):
            TextModel.load(str(tmp_path), chat_template=wrong)


def test_truncation_of_a_tokenizer_file_does_not_cut_prompts() -> None:
    wrapped = byte_level_tokenizer()
    wrapped.backend_tokenizer.enable_truncation(3)
    assert len(TextModel(wrapped).encode("The quick brown fox", add_special_tokens=False)) > 3


def test_info_tells_the_configuration_and_no_path(tmp_path: Path) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    info = TextModel.load(str(tmp_path)).info()
    assert info["eos_token"] == "</s>"
    assert info["chat_template"]
    assert str(tmp_path) not in str(info)
