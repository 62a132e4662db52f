"""One choice of a completion: what has come and was not given out yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lora_serve.core.messages import TokenLogprobs
from lora_serve.core.request import FinishReason
from lora_serve.server.openai.answer import Admitted, Piece
from lora_serve.server.openai.logprobs import TokenSpeller, completion_logprobs, num_values, prompt_logprobs
from lora_serve.server.openai.prompts import EncodedPrompt


@dataclass(slots=True)
class CompletionChoice:
    """Collects events; `take` gives what is new. With `echo` the prompt comes first, as if it were generated."""

    speller: TokenSpeller
    prompt: EncodedPrompt
    logprobs: int | None
    show_prompt_logprobs: bool
    echo: bool
    hide_answer: bool  # max_tokens: 0
    prompt_entries: list[TokenLogprobs | None] | None = None
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenLogprobs | None] = field(default_factory=list)
    num_characters: int = 0  # of the tokens given out
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, event: Admitted | Piece) -> None:
        if isinstance(event, Admitted):
            self._add_prompt(event)
            return
        self.finish_reason, self.stop_reason = event.finish_reason, event.stop_reason
        if self.hide_answer:
            self.finish_reason = event.finish_reason and FinishReason.LENGTH.value
            return
        self._extend(event.text, event.token_ids, event.logprobs)

    @property
    def has_news(self) -> bool:
        """Whether a chunk is worth sending: text, an end, or logprobs of a token whose text is held back."""
        return bool(self.finish_reason or self.entries or any(self.text))

    @property
    def num_values(self) -> int:
        """Roughly, that are to be shown; eight characters of text count as one."""
        return num_values(self.prompt_entries) + num_values(self.entries) + sum(map(len, self.text)) // 8

    def take_prompt_logprobs(self) -> Any:
        """Once; None if they were not asked for."""
        return None if self.prompt_entries is None else prompt_logprobs(self.speller.text, self.prompt_entries)

    def take(self) -> dict[str, Any]:
        """The part of the choice since the last call."""
        part = {
            "text": "".join(self.text),
            "logprobs": self._take_logprobs(),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        self.text, self.token_ids, self.entries = [], [], []
        return part

    def _add_prompt(self, event: Admitted) -> None:
        if self.show_prompt_logprobs and event.prompt_logprobs is not None:
            self.prompt_entries = list(event.prompt_logprobs)
        if self.echo:
            self._extend(self.prompt.text, self.prompt.token_ids, event.prompt_logprobs or ())

    def _extend(self, text: str, token_ids: tuple[int, ...], entries: tuple[TokenLogprobs | None, ...]) -> None:
        self.text.append(text)
        if self.logprobs is not None:
            self.token_ids.extend(token_ids)
            self.entries.extend(entries)

    def _take_logprobs(self) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        body = completion_logprobs(self.speller, self.token_ids, self.entries, self.logprobs, self.num_characters)
        self.num_characters += sum(len(self.speller.text.token_text(token_id)) for token_id in self.token_ids)
        return body
