"""Answers of completions and chats, and their log-probabilities. A field that may be UNSET is left out then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from msgspec import UNSET, Struct, UnsetType

from lora_serve.core.messages import TokenLogprobs
from lora_serve.server.answers import emptied
from lora_serve.text.tokenizer import TextModel

_MANY = 100
E = TypeVar("E")
T = TypeVar("T")
MIN_LOGPROB = -9999.0  # JSON has no infinity; vLLM cuts at the same number


class CachedTokens(Struct):
    cached_tokens: int


class ReasoningTokens(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class PromptLogprob(Struct):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionPart(Struct):
    """One choice, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET  # of a whole choice


class AnswerHead(Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str


class Completion(AnswerHead, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionPart]
    usage: Usage


class CompletionChunk(AnswerHead, kw_only=True):
    """One event of a stream; the last one with `usage` has no choices."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionPart]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]


class FunctionCall(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class Message(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET  # the same, under the newer name
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(Struct, kw_only=True):
    token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatCompletion(AnswerHead, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatPart(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET  # with `return_token_ids`


class ChatChunk(AnswerHead, kw_only=True):
    """One event of a stream; the last one with `usage` has no choices."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatPart]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class TokenSpeller:
    """Writes tokens as their text, or as `token_id:N`."""

    text: TextModel
    as_ids: bool
    shows_bytes: bool = True  # false: null in their place

    def spell(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self.as_ids else self.text.token_text(token_id)


def completion_logprobs(
    speller: TokenSpeller,
    token_ids: Sequence[int],
    entries: list[TokenLogprobs | None],
    count: int,
    offset: int,
) -> CompletionLogprobs:
    """Completions' format. `entries[i]` belongs to `token_ids[i]`; None: the first token of a prompt has none.

    `offset` is where the first token's text begins, in characters.
    """
    tokens, offsets = [], []
    for token_id in token_ids:
        tokens.append(speller.spell(token_id))
        offsets.append(offset)
        offset += len(speller.text.token_text(token_id))
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
        tokens=tokens,
        top_logprobs=each(lambda entry: None if entry is None else _top_by_text(speller, entry, count), entries),
    )


def chat_logprobs(speller: TokenSpeller, entries: list[TokenLogprobs], count: int) -> ChatLogprobs:
    """Chat's format."""

    def shown(entry: TokenLogprobs) -> TokenLogprob:
        best = _best(entry, count)[: None if count < 0 else count]
        top = [TopLogprob(*_chat_token(speller, *pair)) for pair in best]
        return TokenLogprob(*_chat_token(speller, entry.token_id, entry.logprob), top)

    return ChatLogprobs(each(shown, entries))


def prompt_logprobs(text: TextModel, entries: list[TokenLogprobs | None]) -> PromptLogprobs:
    """vLLM's format: for each prompt token an object by token id."""
    return each(lambda entry: None if entry is None else _by_id(text, entry), entries)


def each(show: Callable[[E], T], entries: list[E]) -> list[T]:
    """`show` of each entry, for an answer. Many entries are shown one by one as they are written, and each is let go
    then: all at once they would be a million objects, of which Python's collector would look at each.
    """
    if len(entries) > _MANY:
        return cast(list[T], map(show, emptied(entries)))  # which the writer takes for a list
    return [show(entry) for entry in entries]


def _top_by_text(speller: TokenSpeller, entry: TokenLogprobs, count: int) -> dict[str, float]:
    """The chosen token and the best ones; of several that are spelled alike the best."""
    top: dict[str, float] = {}
    for token_id, logprob in _best(entry, count):
        text = speller.spell(token_id)
        top[text] = max(_finite(logprob), top.get(text, MIN_LOGPROB))
    return top


def _best(entry: TokenLogprobs, count: int) -> list[tuple[int, float]]:
    """The chosen token first, as in vLLM, then the `count` best ones without it; -1: all there are."""
    top = entry.top if count < 0 else entry.top[:count]
    return [(entry.token_id, entry.logprob), *(pair for pair in top if pair[0] != entry.token_id)]


def _chat_token(speller: TokenSpeller, token_id: int, logprob: float) -> tuple[str, float, list[int] | None]:
    raw = list(speller.text.token_bytes(token_id)) if speller.shows_bytes else None
    return speller.spell(token_id), _finite(logprob), raw


def _by_id(text: TextModel, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
    ranked = {entry.token_id: (entry.logprob, entry.rank)}
    ranked |= {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)}
    return {
        str(token_id): PromptLogprob(_finite(logprob), rank, text.token_text(token_id))
        for token_id, (logprob, rank) in ranked.items()
    }


def num_values(entries: Sequence[TokenLogprobs | None] | None) -> int:
    """Roughly the number of values that are shown of `entries`, all of which have as many alternatives."""
    last = entries[-1] if entries else None
    return 0 if last is None or entries is None else len(entries) * (4 + 3 * len(last.top))


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
