"""Token events of one sequence -> pieces of text, cut at stop strings and stop ids."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.core.messages import FinishEvent, Timings, TokenEvent, TokenLogprobs
from lora_serve.core.request import FinishReason, InferenceRequest
from lora_serve.text.detokenizer import Detokenizer
from lora_serve.text.stop import StopMatcher
from lora_serve.text.tokenizer import TextModel


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prompt is computed; the first thing that comes of a sequence."""

    timings: Timings
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    num_cached_tokens: int = 0
    fell_back: bool | None = None  # whether the fallback answers; None: the request has none
    model: str = ""  # who answers


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of an answer. A token's text may come later than the token, never earlier."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # "stop" or "length" on the last piece
    stop_reason: int | str | None = None  # the stop id or stop string that ended it; None for end-of-text


@dataclass(frozen=True, slots=True)
class StopRules:
    """Where the text ends, beside the model's own end-of-text tokens."""

    strings: tuple[str, ...] = ()
    include: bool = False  # show the stop string, or the stop token's text
    skip_special_tokens: bool = True


class Answer:
    """The text of one sequence as it grows."""

    def __init__(
        self, text: TextModel, request: InferenceRequest, rules: StopRules, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._detokenizer = Detokenizer(text, request.prompt_token_ids, rules.skip_special_tokens)
        self._matcher = StopMatcher(rules.strings, rules.include)
        self._sampling = request.sampling
        self._include = rules.include
        ends = self._sampling.stop_token_ids + (() if self._sampling.ignore_eos else eos_token_ids)
        self._ends = frozenset(ends)
        self._held: TokenEvent | None = None  # may be the token that ends the sequence, which is not shown
        self._num_tokens = 0

    def token(self, event: TokenEvent) -> Piece:
        """Add a token. A piece with a finish_reason is the last: a stop string is complete."""
        released = self._release()
        if released.finish_reason is not None:
            return released
        if event.token_id in self._ends:
            self._held = event
            return released
        return _joined(released, self._shown(event))

    def finish(self, event: FinishEvent) -> Piece:
        """The engine ended the sequence: whatever was held back comes out."""
        piece = Piece()
        if self._held is not None and event.stop_token_id == self._held.token_id and not self._include:
            piece, self._held = self._counted(self._held), None
        else:
            piece = self._release()
        if piece.finish_reason is not None:
            return piece
        result = self._matcher.push(self._detokenizer.flush())
        if result.matched is not None:
            return _joined(piece, Piece(result.text, finish_reason=FinishReason.STOP, stop_reason=result.matched))
        stop_id = event.stop_token_id if event.stop_token_id in self._sampling.stop_token_ids else None
        return _joined(
            piece, Piece(result.text + self._matcher.flush(), finish_reason=event.reason.value, stop_reason=stop_id)
        )

    def _release(self) -> Piece:
        held, self._held = self._held, None
        return Piece() if held is None else self._shown(held)

    def _shown(self, event: TokenEvent) -> Piece:
        counted = self._counted(event)
        text = self._detokenizer.push(event.token_id)
        if self._num_tokens <= self._sampling.min_tokens:
            return _joined(counted, Piece(text))
        result = self._matcher.push(text)
        if result.matched is None:
            return _joined(counted, Piece(result.text))
        return _joined(counted, Piece(result.text, finish_reason=FinishReason.STOP, stop_reason=result.matched))

    def _counted(self, event: TokenEvent) -> Piece:
        self._num_tokens += 1
        return Piece(token_ids=(event.token_id,), logprobs=() if event.logprobs is None else (event.logprobs,))


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(
        first.text + second.text,
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        second.finish_reason,
        second.stop_reason,
    )
