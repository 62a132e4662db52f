"""The tokens and seconds that one answer uses: shown in its `usage`, charged to quotas and metered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lora_serve.core.messages import PromptEvent
from lora_serve.core.request import InferenceRequest
from lora_serve.tenancy.usage.figures import UsageFigures


class AnswerUse:
    """Counts as the events of an answer's rows come. A prompt counts once, however many choices it has."""

    def __init__(
        self,
        requests: Sequence[InferenceRequest],
        choices_per_prompt: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`requests`: one per choice; those of one prompt stand beside one another."""
        self._requests = requests
        self._step = choices_per_prompt
        self._clock = clock
        self._num_cached = [0] * len(requests)  # per choice, of its prompt
        self._num_generated = [0] * len(requests)  # per choice
        self._seconds = [0.0, 0.0, 0.0]  # in the queue, loading adapters, computing
        self._choices = {request.request_id: choice for choice, request in enumerate(requests)}
        self._started_prompts: set[int] = set()  # a prompt has the number of its first choice
        self._computed_prompts: set[int] = set()
        self._running: dict[int, float] = {}  # by choice: since when its prompt is computed

    @property
    def max_tokens(self) -> int:
        """The most tokens that the answer can use: its prompts, and for each choice what may be generated."""
        prompts = set(range(0, len(self._requests), self._step))
        return self._length(prompts) + sum(r.sampling.max_tokens for r in self._requests if r.pooling is None)

    @property
    def num_tokens(self) -> int:
        """The tokens used so far. A prompt counts as soon as its computation begins: whoever leaves just before the
        first token has had it computed, or most of it.
        """
        return self._length(self._started_prompts | self._computed_prompts) + sum(self._num_generated)

    def started(self, request_id: str) -> None:
        """The first tokens of a choice's prompt are in a step."""
        self._started_prompts.add(self._prompt_of(self._choices[request_id]))

    def prompt_computed(self, choice: int, event: PromptEvent) -> None:
        """A choice's prompt is computed, some of its tokens were found in the prefix cache."""
        timings = event.timings
        self._running[choice] = self._clock()
        self._num_cached[choice] = event.num_cached_tokens
        for part, seconds in enumerate((timings.queue, timings.load, timings.prefill)):
            self._seconds[part] += seconds
        self._computed_prompts.add(self._prompt_of(choice))

    def generated(self, choice: int, num_tokens: int) -> None:
        """A choice got more tokens."""
        self._num_generated[choice] += num_tokens

    def ended(self, choice: int) -> None:
        """A choice has its last token, or its vector."""
        if (since := self._running.pop(choice, None)) is not None:
            self._seconds[2] += self._clock() - since

    def counts(self, choice: int | None = None) -> tuple[int, int, int]:
        """Prompt tokens, generated tokens and cached prompt tokens of one choice, or of the answer.

        The answer's cached tokens are those of first choices: the others find what the first has just computed.
        """
        if choice is None:
            prompts = range(0, len(self._requests), self._step)
            return self._length(prompts), sum(self._num_generated), sum(self._num_cached[:: self._step])
        return self._length((choice,)), self._num_generated[choice], self._num_cached[choice]

    def figures(self) -> UsageFigures | None:
        """All of it, once the answer has ended in whatever way; None if no prompt was computed."""
        for choice in list(self._running):
            self.ended(choice)
        if not self._computed_prompts:
            return None
        num_prompt_tokens = self._length(self._computed_prompts)
        num_cached = sum(self._num_cached[:: self._step])
        return UsageFigures(1, num_prompt_tokens, num_cached, sum(self._num_generated), *self._seconds)

    def _length(self, choices: Sequence[int] | set[int]) -> int:
        return sum(len(self._requests[choice].prompt_token_ids) for choice in choices)

    def _prompt_of(self, choice: int) -> int:
        return choice - choice % self._step
