"""Token counts of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lora_serve.core.request import GenerateRequest


@dataclass(slots=True)
class Usage:
    """Counts as the choices grow. A prompt counts once, however many choices it has."""

    num_prompt_tokens: list[int]  # per choice
    num_prompts_tokens: int  # of the request
    num_output_tokens: list[int] = field(default_factory=list)  # per choice

    @classmethod
    def of(cls, requests: Sequence[GenerateRequest], choices_per_prompt: int) -> Usage:
        lengths = [len(request.prompt_token_ids) for request in requests]
        return cls(lengths, sum(lengths[::choices_per_prompt]), [0] * len(lengths))

    def add(self, choice: int, num_tokens: int) -> None:
        self.num_output_tokens[choice] += num_tokens

    def total(self) -> dict[str, int]:
        return _body(self.num_prompts_tokens, sum(self.num_output_tokens))

    def of_choice(self, choice: int) -> dict[str, int]:
        """For continuous_usage_stats."""
        return _body(self.num_prompt_tokens[choice], self.num_output_tokens[choice])


def _body(num_prompt_tokens: int, num_output_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
    }
