"""A tokenizer with the tokens that an adapter adds: as transformers' own `add_tokens` makes it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from tokenizers import AddedToken as TokenizersAddedToken
from transformers import PreTrainedTokenizerFast

from lora_serve.core.adapter import AddedToken
from lora_serve.text.chat import ChatMessage, render_chat
from lora_serve.text.output import Detokenizer
from lora_serve.text.tokenizer import TextModel
from tests.text.tiny_tokenizer import byte_fallback_tokenizer, byte_level_tokenizer

TEXTS = ("a <ticket> b", "<ticket><ticket>", "Hello<ticket> world  <mute>  x", "<tick et>", "ticket <TICKET>", "")
KINDS = (byte_level_tokenizer, byte_fallback_tokenizer)


def grown(make: Callable[[], PreTrainedTokenizerFast]) -> tuple[TextModel, TextModel, PreTrainedTokenizerFast]:
    """The base, its view with two tokens more, and what a trainer's `add_tokens` makes of the same tokenizer."""
    base = make()
    trained = copy.deepcopy(base)
    trained.add_tokens(["<ticket>"])
    trained.add_tokens(
        [TokenizersAddedToken("<mute>", special=True, lstrip=True, normalized=False)], special_tokens=True
    )
    tokens = tuple(
        AddedToken(number, t.content, t.special, t.single_word, t.lstrip, t.rstrip, t.normalized)
        for number, t in sorted(trained.added_tokens_decoder.items())
        if number >= len(base)
    )
    assert [token.content for token in tokens] == ["<ticket>", "<mute>"]
    text = TextModel(base)
    return text, text.with_added(tokens), trained


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_view_encodes_and_decodes_as_the_trainers_tokenizer(
    make: Callable[[], PreTrainedTokenizerFast], text: str
) -> None:
    _, view, trained = grown(make)
    for special in (True, False):
        assert list(view.encode(text, special)) == trained.encode(text, add_special_tokens=special)
    ids = view.encode(text, False)
    for skip in (True, False):
        assert view.decode(ids, skip) == trained.backend_tokenizer.decode(list(ids), skip_special_tokens=skip)


@pytest.mark.parametrize("make", KINDS)
def test_the_base_does_not_learn_the_tokens_of_a_view(make: Callable[[], PreTrainedTokenizerFast]) -> None:
    base, view, _ = grown(make)
    plain = TextModel(make())
    for text in TEXTS:
        assert base.encode(text, True) == plain.encode(text, True)
    assert len(view.encode("<ticket>", False)) < len(base.encode("<ticket>", False))
    assert base.vocab_size + 2 == view.vocab_size


def test_a_view_is_made_once_and_none_for_no_tokens() -> None:
    base, view, _ = grown(byte_level_tokenizer)
    tokens = (AddedToken(base.vocab_size, "<a>"),)
    assert base.with_added(tokens) is base.with_added((AddedToken(base.vocab_size, "<a>"),))
    assert base.with_added(()) is base
    assert base.with_added(tokens) is not view


def test_a_view_shows_new_tokens_in_streams_and_hides_special_ones() -> None:
    _, view, _ = grown(byte_level_tokenizer)
    ids = view.encode("Hi<ticket> you<mute>", False)
    detokenizer = Detokenizer(view)
    assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == "Hi<ticket> you"
    assert view.token_text(ids[-1]) == "<mute>"
    assert view.token_bytes(ids[-1]) == b"<mute>"
    assert view.special_ids > {ids[-1]}


def test_a_chat_of_a_view_finds_new_tokens_in_messages() -> None:
    base, view, _ = grown(byte_level_tokenizer)
    rendered = render_chat(view, (ChatMessage("user", "see <ticket>"),))
    assert rendered == render_chat(base, (ChatMessage("user", "see <ticket>"),))
    assert base.vocab_size in view.encode_chat(rendered, False)
