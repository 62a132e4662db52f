"""Log-probabilities in OpenAI's two formats, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from lora_serve.core.messages import TokenLogprobs
from lora_serve.server.schemas import generated as wire
from lora_serve.text.tokenizer import TextModel

_MANY = 100

E = TypeVar("E")
T = TypeVar("T")

MIN_LOGPROB = -9999.0  # JSON has no infinity; vLLM cuts at the same number


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
) -> wire.CompletionLogprobs:
    """Completions' format. `entries[i]` belongs to `token_ids[i]`; None: the first token of a prompt has none.

    `offset` is where the first token's text begins, in characters.
    """
    tokens, offsets = [], []
    for token_id in token_ids:
        tokens.append(speller.spell(token_id))
        offsets.append(offset)
        offset += len(speller.text.token_text(token_id))
    return wire.CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
        tokens=tokens,
        top_logprobs=each(lambda entry: None if entry is None else _top_by_text(speller, entry, count), entries),
    )


def chat_logprobs(speller: TokenSpeller, entries: list[TokenLogprobs], count: int) -> wire.ChatLogprobs:
    """Chat's format."""

    def shown(entry: TokenLogprobs) -> wire.TokenLogprob:
        best = _best(entry, count)[: None if count < 0 else count]
        top = [wire.TopLogprob(*_chat_token(speller, *pair)) for pair in best]
        return wire.TokenLogprob(*_chat_token(speller, entry.token_id, entry.logprob), top)

    return wire.ChatLogprobs(each(shown, entries))


def prompt_logprobs(text: TextModel, entries: list[TokenLogprobs | None]) -> wire.PromptLogprobs:
    """vLLM's format: for each prompt token an object by token id."""
    return each(lambda entry: None if entry is None else _by_id(text, entry), entries)


def each(show: Callable[[E], T], entries: list[E]) -> list[T]:
    """`show` of each entry, for an answer. Many entries are shown one by one as they are written, and each is let go
    then: all at once they would be a million objects, of which Python's collector would look at each.
    """
    if len(entries) > _MANY:
        return cast(list[T], _emptied(show, entries))  # which the writer takes for a list
    return [show(entry) for entry in entries]


def _emptied(show: Callable[[E], T], entries: list[E]) -> Iterator[T]:
    for index, entry in enumerate(entries):
        entries[index] = cast(E, None)
        yield show(entry)


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


def _by_id(text: TextModel, entry: TokenLogprobs) -> dict[str, wire.PromptLogprob]:
    ranked = {entry.token_id: (entry.logprob, entry.rank)}
    ranked |= {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)}
    return {
        str(token_id): wire.PromptLogprob(_finite(logprob), rank, text.token_text(token_id))
        for token_id, (logprob, rank) in ranked.items()
    }


def num_values(entries: Sequence[TokenLogprobs | None] | None) -> int:
    """Roughly the number of values that are shown of `entries`, all of which have as many alternatives."""
    last = entries[-1] if entries else None
    return 0 if last is None or entries is None else len(entries) * (4 + 3 * len(last.top))


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
