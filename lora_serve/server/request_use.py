"""What one answer uses, counted as its events pass: what its tokens are charged by, and what is metered of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lora_serve.core.messages import Timings
from lora_serve.core.request import InferenceRequest
from lora_serve.tenancy.usage.figures import UsageFigures


class RequestUse:
    """Tokens are counted as in the answer's `usage`: a prompt once, however many choices it has."""

    def __init__(self, requests: Sequence[InferenceRequest], clock: Callable[[], float] = time.monotonic) -> None:
        """`requests`: the choices of one prompt stand beside one another and share its tokens."""
        self._requests = requests
        self._clock = clock
        self._generated = 0
        self._cached = 0
        self._queue = self._load = self._compute = 0.0
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._started_prompts: set[int] = set()
        self._counted_prompts: set[int] = set()
        self._running: dict[int, float] = {}  # by choice: since when its prompt is computed

    @property
    def max_tokens(self) -> int:
        """How many it can use at most: the prompts, and for each choice what may be generated."""
        prompts = {self._first(number) for number in range(len(self._requests))}
        return self._length(prompts) + sum(r.sampling.max_tokens for r in self._requests if r.pooling is None)

    @property
    def num_tokens(self) -> int:
        """How many it used so far. A prompt counts as soon as its computation begins: whoever leaves just before the
        first token has had it computed, or most of it.
        """
        return self._length(self._started_prompts | self._counted_prompts) + self._generated

    def started(self, request_id: str) -> None:
        """The first tokens of a choice's prompt are in a step."""
        self._started_prompts.add(self._first(self._numbers[request_id]))

    def admitted(self, choice: int, timings: Timings, num_cached_tokens: int) -> None:
        """A choice's prompt is computed, so many tokens of it found in the prefix cache."""
        self._running[choice] = self._clock()
        self._queue += timings.queue
        self._load += timings.load
        self._compute += timings.prefill
        first = self._first(choice)
        if first not in self._counted_prompts:
            self._counted_prompts.add(first)
        if first == choice:
            self._cached += num_cached_tokens

    def generated(self, num_tokens: int) -> None:
        """Some choice got so many tokens."""
        self._generated += num_tokens

    def ended(self, choice: int) -> None:
        """A choice has its last token, or its vector."""
        if (since := self._running.pop(choice, None)) is not None:
            self._compute += self._clock() - since

    def figures(self) -> UsageFigures | None:
        """All of it, now that it has ended, however it did; None: no prompt was computed."""
        for choice in list(self._running):
            self.ended(choice)
        if not self._counted_prompts:
            return None
        return UsageFigures(
            1,
            self._length(self._counted_prompts),
            self._cached,
            self._generated,
            self._queue,
            self._load,
            self._compute,
        )

    def _length(self, prompts: set[int]) -> int:
        return sum(len(self._requests[number].prompt_token_ids) for number in prompts)

    def _first(self, choice: int) -> int:
        """The first choice of the same prompt."""
        prompt = self._requests[choice].prompt_token_ids
        while choice > 0 and self._requests[choice - 1].prompt_token_ids is prompt:
            choice -= 1
        return choice
