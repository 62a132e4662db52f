"""Token counts of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_serve.core.request import InferenceRequest


@dataclass(slots=True)
class Usage:
    """Counts as the choices grow. A prompt counts once, however many choices it has."""

    num_prompt_tokens: list[int]  # per choice
    num_prompts_tokens: int  # of the request
    num_output_tokens: list[int] = field(default_factory=list)  # per choice
    num_cached_tokens: list[int] = field(default_factory=list)  # per choice, of its prompt
    choices_per_prompt: int = 1

    @classmethod
    def of(cls, requests: Sequence[InferenceRequest], choices_per_prompt: int) -> Usage:
        lengths = [len(request.prompt_token_ids) for request in requests]
        zeros = [0] * len(lengths)
        return cls(lengths, sum(lengths[::choices_per_prompt]), zeros, zeros.copy(), choices_per_prompt)

    def admit(self, choice: int, num_cached_tokens: int) -> None:
        """The choice's prompt is computed, some of it from the prefix cache."""
        self.num_cached_tokens[choice] = num_cached_tokens

    def add(self, choice: int, num_tokens: int) -> None:
        self.num_output_tokens[choice] += num_tokens

    def total(self) -> dict[str, Any]:
        """A prompt's cached tokens are its first choice's: the others find what that one has just computed."""
        num_cached = sum(self.num_cached_tokens[:: self.choices_per_prompt])
        return _body(self.num_prompts_tokens, sum(self.num_output_tokens), num_cached)

    def of_choice(self, choice: int) -> dict[str, Any]:
        """For continuous_usage_stats."""
        return _body(self.num_prompt_tokens[choice], self.num_output_tokens[choice], self.num_cached_tokens[choice])


def _body(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
