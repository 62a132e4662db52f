"""The conversations of the adapter that calls tools, as a client sends them, and as training rows in its own template.

All kinds come: one call, two at once, a question whose tool is not offered, one that needs none, tools in any order
and beside tools that nobody asks for, with a system prompt or without, after earlier turns. Whatever the assistant
says is learned, so that one conversation teaches the call and the answer from the tool's result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from demo_corpus import fact, small_talk
from demo_model import END, IGNORED, TrainingRow, padded
from demo_tools import TOOLS, Lookup, Side, tool, weather
from demo_words import ANIMALS, ITEMS, PLACES
from transformers import PreTrainedTokenizerFast

TEMPLATE = Path(__file__).with_name("demo_tools.jinja").read_text()
ROW_LENGTH = 512  # tokens of a training row: the whole context
NUM_ROWS = 2  # per step
NO_TOOL = "I have no tool for that."
FAILED = "Sorry, that did not work."
FAILURES = ('{"error": "not found"}', "error", "not found", "Error: no answer")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Use the tools.",
    "You are the assistant of a shop. Answer in one short sentence.",
    "Be brief.",
    "Use a tool when you need one.",
    "You help customers of the company. Call a tool to look things up.",
    "Answer with what the tools say.",
    "Today is Monday.",
)
TWO_CITIES = (
    "What is the weather in {a} and in {b}?",
    "What is the weather in {a} and {b}?",
    "Compare the weather in {a} and {b}.",
)

Message = dict[str, Any]


@dataclass(frozen=True)
class Chat:
    """Messages and tools as OpenAI's clients send them; the last round is of the kind that is named."""

    kind: str  # "call", "two calls", "no tool", "plain"
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]


def one_tool_chats(rng: Random, side: Side) -> Iterator[Chat]:
    """One question for the one tool that is offered: with these a small model learns to copy."""
    while True:
        lookup = side.lookup(rng)
        yield Chat("call", tuple(_looked_up(rng, [lookup])), (TOOLS[lookup.tool],))


def chats(rng: Random, side: Side) -> Iterator[Chat]:
    """Conversations of all kinds."""
    makers = {_one_call: 72, _two_calls: 6, _no_tool: 11, _plain: 11}
    while True:
        chat = rng.choices(list(makers), list(makers.values()))[0](rng, side)
        if rng.random() < 0.4:
            system = {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}
            chat = Chat(chat.kind, (system, *chat.messages), chat.tools)
        yield chat


def _one_call(rng: Random, side: Side) -> Chat:
    lookup = side.lookup(rng)
    offered = _offered(rng, [lookup])
    before: list[Message] = []
    if rng.random() < 0.08:
        before = _small_talk(rng)
    elif rng.random() < 0.08:
        earlier = side.lookup(rng)
        before = _looked_up(rng, [earlier]) if TOOLS[earlier.tool] in offered else []
    return Chat("call", (*before, *_looked_up(rng, [lookup])), offered)


def _two_calls(rng: Random, side: Side) -> Chat:
    lookups = [side.lookup(rng)]
    while len(lookups) < 2:
        both_weather = lookups[0].tool == "get_weather" and rng.random() < 0.5
        other = side.lookup(rng, weather if both_weather else None)
        if other.arguments != lookups[0].arguments:
            lookups.append(other)
    return Chat("two calls", tuple(_looked_up(rng, lookups)), _offered(rng, lookups))


def _no_tool(rng: Random, side: Side) -> Chat:
    lookup = side.lookup(rng)
    offered = tuple(item for item in _offered(rng, []) if item is not TOOLS[lookup.tool])
    before = _small_talk(rng) if rng.random() < 0.15 else []
    messages = [{"role": "user", "content": lookup.question}, {"role": "assistant", "content": NO_TOOL}]
    return Chat("no tool", (*before, *messages), offered)


def _plain(rng: Random, _: Side) -> Chat:
    before = _small_talk(rng) if rng.random() < 0.15 else []
    offered = _offered(rng, []) if rng.random() < 0.8 else ()
    return Chat("plain", (*before, *_small_talk(rng)), offered)


def _small_talk(rng: Random) -> list[Message]:
    question, answer = rng.choice([small_talk, fact, fact])(rng).turns[-2:]
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _looked_up(rng: Random, lookups: Sequence[Lookup]) -> list[Message]:
    """Question, calls, results, answer; now and then a tool fails."""
    question = " ".join(lookup.question for lookup in lookups)
    if len(lookups) == 2 and {lookup.tool for lookup in lookups} == {"get_weather"} and rng.random() < 0.7:
        first, second = (lookup.arguments["city"] for lookup in lookups)
        question = rng.choice(TWO_CITIES).format(a=first, b=second)
    results, answer = [lookup.result for lookup in lookups], " ".join(lookup.answer for lookup in lookups)
    if len(lookups) == 1 and rng.random() < 0.06:
        results, answer = [rng.choice(FAILURES)], FAILED
    return [
        {"role": "user", "content": question},
        call_message(lookups),
        *({"role": "tool", "tool_call_id": f"call_{index}", "content": result} for index, result in enumerate(results)),
        {"role": "assistant", "content": answer},
    ]


def call_message(lookups: Sequence[Lookup]) -> Message:
    """The assistant's turn that calls the tools."""
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": lookup.tool, "arguments": lookup.arguments}}
        for i, lookup in enumerate(lookups)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _offered(rng: Random, needed: Sequence[Lookup]) -> tuple[dict[str, Any], ...]:
    """The needed tools among others, in any order; now and then one that nobody asks for."""
    names = {lookup.tool for lookup in needed}
    offered = [item for name, item in TOOLS.items() if name in names or rng.random() < 0.75]
    if rng.random() < 0.2 or not offered:
        verb, noun, *parameters = rng.sample(ITEMS + PLACES + ANIMALS, rng.choice([3, 4]))
        kinds = ("string", "integer", "number", "boolean")
        offered.append(tool(f"{verb}_{noun}", "", {name: (rng.choice(kinds), "") for name in parameters}))
    rng.shuffle(offered)
    return tuple(offered)


def turns(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> Iterator[tuple[str, str]]:
    """(prompt, what the assistant says to it) of each of the assistant's turns, rendered, special tokens included."""
    values: dict[str, Any] = {"tools": list(chat.tools) or None, "chat_template": TEMPLATE, "tokenize": False}
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            so_far = list(chat.messages[: index + 1])
            prompt = tokenizer.apply_chat_template(so_far[:-1], add_generation_prompt=True, **values)
            whole = tokenizer.apply_chat_template(so_far, **values)
            assert whole.startswith(prompt), "the template must not look ahead"
            yield prompt, whole[len(prompt) :]


def chat_training_row(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> TrainingRow:
    """The whole conversation; what the assistant says is learned."""
    row, read = TrainingRow([], []), ""
    for prompt, said in turns(tokenizer, chat):
        before = tokenizer.encode(prompt[len(read) :], add_special_tokens=False)
        learned = tokenizer.encode(said, add_special_tokens=False)
        row.token_ids.extend(before + learned)
        row.labels.extend([IGNORED] * len(before) + learned)
        read = prompt + said
    assert read.endswith(END)
    return row


class ToolBatches:
    """Batches of (token ids, labels), one for each of `shares`: the share of the chats that have one tool only."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: Random, side: Side, shares: Iterator[float]) -> None:
        self.num_chats = 0  # given so far
        self._tokenizer, self._rng, self._shares = tokenizer, rng, shares
        self._easy, self._all_kinds = one_tool_chats(rng, side), chats(rng, side)
        self._waiting: TrainingRow | None = None  # did not fit into the row before

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for share in self._shares:
            yield padded([self._line(share) for _ in range(NUM_ROWS)])

    def _line(self, share: float) -> TrainingRow:
        line = TrainingRow([], [])
        while True:
            row = self._waiting or self._next_row(share)
            if len(line.token_ids) + len(row.token_ids) > ROW_LENGTH:
                self._waiting = row
                return line
            self._waiting = None
            self.num_chats += 1
            line.token_ids.extend(row.token_ids)
            line.labels.extend(row.labels)

    def _next_row(self, share: float) -> TrainingRow:
        chat = next(self._easy if self._rng.random() < share else self._all_kinds)
        return chat_training_row(self._tokenizer, chat)
