"""The text of one generated sequence: detokenised token by token, cut at stop strings and stop ids.

`Detokenizer` uses the prefix and read offsets of Hugging Face's text-generation-inference: it decodes a short window
that begins at an earlier clean boundary and shows what the window holds beyond what was shown already. A trailing
U+FFFD may be the first bytes of a character, so it is held back until the next tokens complete it.

`StopMatcher` runs one Knuth-Morris-Pratt automaton per stop string, so its result never depends on where the pieces
were cut: the stop string that is complete first ends the text, of several that end at the same character the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_serve.core.messages import FinishEvent, TokenEvent, TokenLogprobs
from lora_serve.core.request import FinishReason, InferenceRequest
from lora_serve.text.tokenizer import TextModel

REPLACEMENT = "\ufffd"
PROMPT_TAIL = 6  # prompt tokens decoded before the answer: some decoders strip the space of a text's first token
MAX_CHARACTER_BYTES = 4  # in UTF-8
MAX_PENDING = 8  # tokens held back at most: more than a character's bytes are simply not UTF-8


@dataclass(frozen=True, slots=True)
class StopRules:
    """Where the text ends, beside the model's own end-of-text tokens."""

    strings: tuple[str, ...] = ()
    include: bool = False  # show the stop string, or the stop token's text
    skip_special_tokens: bool = True
    shown: tuple[str, ...] = ()  # special tokens that are not skipped even so: a parser looks for them


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of a sequence's text. A token's text may come later than the token, never earlier."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # "stop" or "length" on the last piece
    stop_reason: int | str | None = None  # the stop id or stop string that ended it; None for end-of-text

    def __add__(self, other: Piece) -> Piece:
        return Piece(
            self.text + other.text,
            self.token_ids + other.token_ids,
            self.logprobs + other.logprobs,
            other.finish_reason,
            other.stop_reason,
        )


class OutputText:
    """The text of one sequence as it grows."""

    def __init__(
        self, text_model: TextModel, request: InferenceRequest, rules: StopRules, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._detokenizer = Detokenizer(text_model, request.prompt_token_ids, rules.skip_special_tokens, rules.shown)
        self._matcher = StopMatcher(rules.strings, rules.include)
        self._sampling = request.sampling
        self._include = rules.include
        # Whichever adapters answer: a token that ends nothing is only held until the next one comes.
        self._ends = frozenset(self._sampling.ends(eos_token_ids + request.fallback_eos_token_ids))
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
        return released + self._shown(event)

    def finish(self, event: FinishEvent) -> Piece:
        """The engine ended the sequence: all that was held back comes out."""
        if self._held is not None and event.stop_token_id == self._held.token_id and not self._include:
            piece, self._held = self._counted(self._held), None
        else:
            piece = self._release()
        if piece.finish_reason is not None:
            return piece
        text, matched = self._matcher.push(self._detokenizer.flush())
        if matched is not None:
            return piece + Piece(text, finish_reason=FinishReason.STOP, stop_reason=matched)
        stop_id = event.stop_token_id if event.stop_token_id in self._sampling.stop_token_ids else None
        return piece + Piece(text + self._matcher.flush(), finish_reason=event.reason.value, stop_reason=stop_id)

    def _release(self) -> Piece:
        held, self._held = self._held, None
        return Piece() if held is None else self._shown(held)

    def _shown(self, event: TokenEvent) -> Piece:
        counted = self._counted(event)
        text = self._detokenizer.push(event.token_id)
        if self._num_tokens <= self._sampling.min_tokens:
            return counted + Piece(text)
        text, matched = self._matcher.push(text)
        return counted + Piece(text, finish_reason=None if matched is None else FinishReason.STOP, stop_reason=matched)

    def _counted(self, event: TokenEvent) -> Piece:
        self._num_tokens += 1
        return Piece(token_ids=(event.token_id,), logprobs=() if event.logprobs is None else (event.logprobs,))


class Detokenizer:
    """Token ids -> text, one token at a time, as if the whole had been decoded at once."""

    def __init__(
        self,
        text_model: TextModel,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: Sequence[str] = (),
    ) -> None:
        self._text_model = text_model
        self._hidden = text_model.special_ids if skip_special_tokens else frozenset[int]()
        if shown:
            self._hidden = self._hidden.difference(map(text_model.token_id, shown))
        self._window: list[int] = []
        self._read = 0  # the window up to here is shown
        self._shown = ""  # the window's text that was shown
        self._is_open = False  # a token came
        tail = [number for number in prompt_token_ids[-4 * PROMPT_TAIL :] if number not in self._hidden]
        for length in range(PROMPT_TAIL, PROMPT_TAIL + MAX_CHARACTER_BYTES):
            self._begin_window(tail[-length:])
            if REPLACEMENT not in self._decode():  # else it may begin in the middle of a character
                break

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is certain now (often all of it, sometimes nothing)."""
        if token_id in self._hidden:
            return ""
        self._window.append(token_id)
        self._is_open = True
        text = self._decode()
        overdue = len(self._window) - self._read > MAX_PENDING
        certain = text.removesuffix(REPLACEMENT) if overdue else text.rstrip(REPLACEMENT)
        piece = self._beyond_shown(certain) if len(certain) >= len(self._shown) else ""
        if piece:
            self._shown = certain
        if certain == text and (piece or overdue):
            # Begin the window at the boundary before; tokens that decode to nothing are dropped.
            self._begin_window(self._window[self._read :] if piece else self._window[: self._read])
        elif overdue:
            self._begin_window(self._window[-MAX_CHARACTER_BYTES:])
        return piece

    def flush(self) -> str:
        """The sequence ended: return what was held back, incomplete characters as U+FFFD."""
        text = self._decode()
        piece = self._beyond_shown(text) if self._is_open and text != self._shown else ""
        self._begin_window(self._window)
        self._shown = text
        return piece

    def _beyond_shown(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # Byte-fallback decoders turn a whole run of bytes into U+FFFD once one of them is wrong.
        return self._text_model.decode(self._window[self._read :], skip_special_tokens=False)

    def _begin_window(self, token_ids: list[int]) -> None:
        """All of `token_ids` is shown, except for a character whose bytes may still come."""
        self._window = token_ids
        self._read = len(token_ids)
        self._shown = self._decode().removesuffix(REPLACEMENT)

    def _decode(self) -> str:
        return self._text_model.decode(self._window, skip_special_tokens=False)


class StopMatcher:
    """Holds back text that may still turn out to be the beginning of a stop string; a stop string is not shown.

    With `include` the stop string itself is shown (vLLM's include_stop_str_in_output).
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._failures = tuple(_failure_table(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)  # characters of each stop string matched at the end of the text
        self._held = ""
        self._include = include

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add `piece`. Returns the text to show now, and the stop string that ended it, which is the last push."""
        if not self._stops:
            return piece, None
        text = self._held + piece
        for index, character in enumerate(piece, start=len(self._held)):
            matched = self._advance(character)
            if matched is not None:
                self._held = ""
                return text[: index + 1 - (0 if self._include else len(matched))], matched
        shown = len(text) - max(self._states)
        self._held = text[shown:]
        return text[:shown], None

    def flush(self) -> str:
        """The text ended without a stop string: return what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        matched: str | None = None
        for number, stop in enumerate(self._stops):
            state = self._states[number]
            while state and stop[state] != character:
                state = self._failures[number][state - 1]
            state += stop[state] == character
            if state == len(stop) and (matched is None or len(stop) > len(matched)):
                matched = stop
            self._states[number] = state
        return matched


def _failure_table(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        length += stop[index] == stop[length]
        table[index] = length
    return tuple(table)
