"""Calls read back from the events of a parser, and random answers under a format's grammar."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lora_serve.text.tool_calls.base import (
    CallArguments,
    CallStarted,
    ContentText,
    Tool,
    ToolCallFormat,
    ToolCallParser,
)

WEATHER = Tool(
    "get_weather",
    "The weather of a place.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
ROUTE = Tool(
    "find-route",
    "A way through places.",
    {
        "type": "object",
        "properties": {
            "by": {"$ref": "#/$defs/vehicle"},
            "places": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
            "options": {
                "type": "object",
                "properties": {"toll": {"type": "boolean"}, "limit": {"type": ["number", "null"], "minimum": 0}},
                "required": ["limit"],
                "additionalProperties": False,
            },
        },
        "required": ["by", "places", "options"],
        "additionalProperties": False,
        "$defs": {"vehicle": {"type": "string", "enum": ["car", "bike", 'the "train"']}},
    },
)
NOW = Tool("now", "The time.", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, ROUTE, NOW)


@dataclass
class Call:
    """A call put together from its events."""

    name: str
    arguments: str = ""


@dataclass
class Answer:
    """An answer put together from the events of a parser. `content` of neighbouring pieces is one text."""

    content: str = ""
    calls: list[Call] = field(default_factory=list)
    order: list[str | int] = field(default_factory=list)  # texts between calls, and the calls' numbers

    def add(self, event: ContentText | CallStarted | CallArguments) -> None:
        if isinstance(event, CallStarted):
            assert event.index == len(self.calls), "calls are numbered in their order"
            self.calls.append(Call(event.name))
            self.order.append(event.index)
            return
        assert event.text, "no piece is empty"
        if isinstance(event, CallArguments):
            assert event.index == len(self.calls) - 1, "arguments belong to the call that was started last"
            self.calls[event.index].arguments += event.text
            return
        self.content += event.text
        if self.order and isinstance(self.order[-1], str):
            self.order[-1] += event.text
        else:
            self.order.append(event.text)


def parsed(parser: ToolCallParser, pieces: Iterable[str]) -> Answer:
    """The answer that a parser reads from pieces of text."""
    answer = Answer()
    for piece in pieces:
        for event in parser.feed(piece):
            answer.add(event)
    for event in parser.finish():
        answer.add(event)
    return answer


def pieces_of(text: str, cuts: Iterable[int]) -> Iterator[str]:
    """The text cut at places, each taken modulo its length."""
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    for start, end in pairwise(places):
        yield text[start:end]


@cache
def byte_tokenizer(special: tuple[str, ...] = (), plain: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer of single bytes, with some markers as special and others as plain added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("</s>", *special)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    return tokenizer


def token_ids(tokenizer: Tokenizer, markers: Sequence[str]) -> Mapping[str, int]:
    """The ids of those markers that are single tokens."""
    return {text: number for text in markers if (number := tokenizer.token_to_id(text)) is not None}


def accepts(grammar: str, tokenizer: Tokenizer, text: str) -> bool:
    """The grammar allows the whole text, in the tokenizer's tokens, and that it ends there."""
    own = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>"))
    matcher = LLMatcher(own, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.get_error(), (matcher.get_error(), grammar)
    tokens = tokenizer.encode(text).ids
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def walks(
    form: ToolCallFormat, tools: Sequence[Tool], tokenizer: Tokenizer, count: int, *, parallel: bool
) -> list[str]:
    """Random answers under a format's grammar: each token is drawn from those that are allowed."""
    text = form.grammar(tools, parallel=parallel, token_ids=token_ids(tokenizer, form.markers))
    own = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id("</s>"))
    first = LLMatcher(own, LLMatcher.grammar_from_lark(text))
    assert not first.get_error(), (first.get_error(), text)
    draw = random.Random(0)
    return [_walk(first.deep_copy(), tokenizer, draw) for _ in range(count)]


def _walk(matcher: LLMatcher, tokenizer: Tokenizer, draw: random.Random) -> str:
    chosen: list[int] = []
    end = tokenizer.token_to_id("</s>")
    closing = [
        number for text in ('"', "'", "<", "`", "]", ")", "}") if (number := tokenizer.token_to_id(text)) is not None
    ]
    while not matcher.is_stopped():
        assert len(chosen) < 4000, "the walk does not end"
        mask = matcher.compute_bitmask()
        allowed = [number for number in range(tokenizer.get_vocab_size()) if mask[number // 8] >> number % 8 & 1]
        assert allowed, tokenizer.decode(chosen, skip_special_tokens=False)
        if end in allowed and (draw.random() < 0.3 or len(chosen) > 1000):
            break
        ends = [number for number in closing if number in allowed]
        token = draw.choice(ends if ends and draw.random() < 0.3 else allowed)
        if token == end:
            break
        assert matcher.consume_token(token), matcher.get_error()
        chosen.append(token)
    return tokenizer.decode(chosen, skip_special_tokens=False)
