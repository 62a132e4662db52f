"""Text that spells a control token, or that the tokenizer would change, is written as it is, by ordinary tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import AddedToken as OwnToken
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lora_serve.core.adapter import AddedToken
from lora_serve.core.request import TokenGrammar
from lora_serve.text.tokenizer import TextModel
from tests.text.grammars.bench import DEMO, EOS, Bench, regex

ADDED = (
    AddedToken(2048, "<tool_call>"),
    AddedToken(2049, "<|tool|>", is_special=True),
    AddedToken(2050, "[CALLS]", is_special=True),
    AddedToken(2051, "servus"),
    AddedToken(2052, "salve", lstrip=True, rstrip=True, normalized=True),
    AddedToken(2053, "grüezi"),  # which the tokenizer decodes to another text
)
TEXTS = (
    "Köln <tool_call> x",
    "<|tool|>",
    "a[CALLS]<|user|><|end|>b",
    "<|end_of_text|>",
    "grüezi servus",
    "hi salve you",
    "Cafe\u0301 ﬁ \u212b",  # composed, these would be other texts
    "<|us",
    "<|tool|",
)


@pytest.fixture(scope="module")
def text() -> TextModel:
    return TextModel.load(str(DEMO))


@pytest.fixture(scope="module")
def bench(text: TextModel) -> Iterator[Bench]:
    bench = Bench(lambda: text, 2048)
    yield bench
    bench.constraints.close()


def written(
    bench: Bench, text: TextModel, grammar: TokenGrammar, eos: tuple[int, ...], seed: int = 0
) -> tuple[str, int]:
    """An answer as a caller gets it, without special tokens, and how many of its tokens were forced."""
    draw = random.Random(seed)
    constraint = bench.compiled(grammar)
    tokens: list[int] = []
    num_forced = 0
    while not constraint.is_over:
        forced = constraint.forced()
        num_forced += len(forced)
        new = forced or (draw.choice(bench.allowed(constraint)),)
        constraint.advance(new)
        tokens += new
        assert len(tokens) < 2000
    assert not text.special_ids.intersection(tokens[:-1])
    return text.decode(tokens), num_forced


def schema_grammar(schema: Any, added: tuple[AddedToken, ...] = ()) -> TokenGrammar:
    found: str = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
    return TokenGrammar(found, added)


@pytest.mark.parametrize("value", TEXTS)
@pytest.mark.parametrize("added", [(), ADDED], ids=["base", "adapter"])
def test_text_of_control_tokens_is_written_by_ordinary_tokens(
    bench: Bench, text: TextModel, value: str, added: tuple[AddedToken, ...]
) -> None:
    schema = {"type": "object", "properties": {value: {"enum": [value, f"{value}!"]}}, "required": [value],
              "additionalProperties": False}  # fmt: skip
    answer, num_forced = written(bench, text.with_added(added), schema_grammar(schema, added), EOS)
    jsonschema.validate(json.loads(answer), schema)
    assert num_forced > 0
    answer, _ = written(bench, text.with_added(added), TokenGrammar(f"start: {json.dumps(value)}", added), EOS)
    assert answer == value


@given(
    pieces=st.lists(st.sampled_from([*TEXTS, " ", "é", "e\u0301", "x", '"', "<", "|>"]), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
def test_any_schema_with_such_text_is_satisfied(bench: Bench, text: TextModel, pieces: list[str], seed: int) -> None:
    value = "".join(pieces)
    schema = {"type": "array", "items": {"enum": [value, 7, [value, pieces[0]]]}, "minItems": 1, "maxItems": 2}
    answer, _ = written(bench, text.with_added(ADDED), schema_grammar(schema, ADDED), EOS, seed)
    jsonschema.validate(json.loads(answer), schema)


def test_no_control_token_may_come_within_a_text(bench: Bench, text: TextModel) -> None:
    constraint = bench.compiled(schema_grammar({"type": "string"}, ADDED))
    constraint.advance(text.encode('"', add_special_tokens=False))
    allowed = set(bench.allowed(constraint))
    assert not allowed & (text.with_added(ADDED).special_ids | {2048})
    assert {2051, 2052} <= allowed


def test_control_token_that_a_grammar_names_is_that_token(bench: Bench) -> None:
    constraint = bench.compiled(TokenGrammar('start: <[2048]> "<tool_call>" <[5]> "x"', ADDED))
    assert bench.allowed(constraint) == [2048]
    tokens = list(constraint.forced())
    constraint.advance(tokens)
    while not constraint.is_over:
        new = constraint.forced() or bench.allowed(constraint)[:1]
        constraint.advance(new)
        tokens += new
    assert tokens[0] == 2048
    assert (tokens.count(2048), tokens.count(5)) == (1, 1)


def sentence_pieces(kind: str) -> TextModel:
    """Control tokens in the plain vocabulary, bytes for what it cannot spell, and a blank before the text."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *'abc</s>[]"',
        "▁a",
        "<s",
        "[X]",
        "▁▁",
    ]
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "a"), ("<", "s"), ("<s", ">"), ("▁", "▁")]
    if kind == "BPE":
        tokenizer = Tokenizer(models.BPE(numbers, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    else:
        tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in numbers], 0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.NFKC(), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([OwnToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([OwnToken("▁▁", normalized=False)])
    return TextModel(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>"))


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_control_tokens_of_the_plain_vocabulary_are_not_spelled(kind: str) -> None:
    text = sentence_pieces(kind)
    bench = Bench(lambda: text, text.vocab_size, eos=(2,))
    blanks = text.token_id("▁▁")
    assert blanks is not None
    assert text.token_text(blanks) == "  "
    for value in ("a  b", "a <s> b", "</s>", "c<unk>", "Köln e\u0301", "[X]"):
        constraint = bench.compiled(TokenGrammar(f"start: {json.dumps(value, ensure_ascii=False)}"))
        tokens: list[int] = []
        while not constraint.is_over:
            new = constraint.forced() or tuple(bench.allowed(constraint)[-1:])
            constraint.advance(new)
            tokens += new
        assert not text.special_ids.intersection(tokens[:-1])
        assert text.decode([blanks, *tokens]).strip() == value.strip()
        assert (blanks in tokens) is ("  " in value)
    bench.constraints.close()


def test_tokenizer_that_puts_a_blank_before_the_text_puts_none_into_an_answer(text: TextModel) -> None:
    state = json.loads(text.serialized())
    state["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    own = TextModel(
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="<|end|>")
    )
    bench = Bench(lambda: own, 2048)
    answer, _ = written(bench, own, TokenGrammar(regex("(fox|dog)s and the quick brown fox")), EOS)
    assert answer in ("foxs and the quick brown fox", "dogs and the quick brown fox")
    bench.constraints.close()


def test_text_that_a_tokenizer_of_words_takes_for_a_control_token_is_spelled_otherwise() -> None:
    pieces = ["<unk>", "</s>", *(chr(byte) for byte in range(33, 127))]
    words = Tokenizer(
        models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>", continuing_subword_prefix="")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.Fuse()
    words.add_special_tokens(["<unk>", "</s>"])
    text = TextModel(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>"))
    bench = Bench(lambda: text, len(pieces), eos=(1,))
    answer, _ = written(bench, text, TokenGrammar('start: "ab</s>c" | "ab<unk>"'), (1,))
    assert answer in ("ab</s>c", "ab<unk>")
    bench.constraints.close()
