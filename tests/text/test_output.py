"""Token events -> pieces of text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.core.messages import FinishEvent, TokenEvent
from lora_serve.core.request import FinishReason, InferenceRequest, SamplingParams
from lora_serve.text.output import OutputText, Piece, StopRules
from lora_serve.text.tokenizer import TextModel
from tests.text.tiny_tokenizer import byte_level_tokenizer

TEXT = TextModel(byte_level_tokenizer())
END = TEXT.wrapper.convert_tokens_to_ids("<|end|>")


def run(token_ids: Any, rules: StopRules | None = None, end: FinishEvent | None = None, **sampling: Any) -> list[Piece]:
    """Pieces until one has a finish_reason."""
    request = InferenceRequest("r", (1,), SamplingParams(**sampling))
    answer = OutputText(TEXT, request, rules or StopRules(), (END,))
    pieces = []
    for token_id in token_ids:
        pieces.append(answer.token(TokenEvent("r", token_id, None)))
        if pieces[-1].finish_reason is not None:
            return pieces
    return [*pieces, answer.finish(end or FinishEvent("r", FinishReason.LENGTH))]


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def ids(text: str) -> tuple[int, ...]:
    return TEXT.encode(text, add_special_tokens=False)


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_every_token_is_counted_once_and_the_text_is_a_beginning_of_the_whole(text: str, stops: list[str]) -> None:
    pieces = run(ids(text), StopRules(tuple(stops)))
    counted = [token_id for piece in pieces for token_id in piece.token_ids]
    assert tuple(counted) == ids(text)[: len(counted)]
    assert text.startswith(text_of(pieces))
    assert not any(stop in text_of(pieces) for stop in stops)
    assert (pieces[-1].finish_reason == "length") == (not any(stop in text for stop in stops))


def test_stop_string_that_the_last_token_completes_wins_over_the_length() -> None:
    last = run(ids("abcSTOP"), StopRules(("STOP",)))[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "STOP")


def test_stop_string_in_the_flushed_rest_of_the_text_is_found() -> None:
    token_ids = [*ids("abc"), *ids("é")[:1]]
    token_ids = [*ids("abc"), TEXT.wrapper.convert_tokens_to_ids("Ã")]
    last = run(token_ids, StopRules(("\ufffd",)))[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "\ufffd")


@pytest.mark.parametrize("include", [False, True])
def test_token_that_ends_the_text_is_shown_only_if_asked_for(include: bool) -> None:
    rules = StopRules(include=include, skip_special_tokens=False)
    pieces = run([*ids("abc"), END], rules, FinishEvent("r", FinishReason.STOP, END))
    assert text_of(pieces) == ("abc<|end|>" if include else "abc")
    assert pieces[-1].finish_reason == "stop"
    assert sum(len(piece.token_ids) for piece in pieces) == len(ids("abc")) + 1


def test_end_token_that_did_not_end_the_text_is_shown_after_all() -> None:
    """Before min_tokens it is an ordinary token."""
    pieces = run([*ids("a"), END, *ids("b")], StopRules(skip_special_tokens=False))
    assert text_of(pieces) == "a<|end|>b"


def test_stop_id_is_the_reason_and_the_models_own_end_is_none() -> None:
    stop_id = ids("x")[0]
    by_stop = run(ids("abx"), None, FinishEvent("r", FinishReason.STOP, stop_id), stop_token_ids=(stop_id,))
    assert (text_of(by_stop), by_stop[-1].stop_reason) == ("ab", stop_id)
    assert run([END], None, FinishEvent("r", FinishReason.STOP, END))[-1].stop_reason is None
