"""The metered figures, which only grow, the keys that they are summed by, and the use of one answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_serve.core.messages import PromptEvent
    from lora_serve.core.request import InferenceRequest


@dataclass(frozen=True, slots=True)
class UsageKey:
    """The tenant, key and adapter of a use. Names and versions of several adapters together are joined by "+"."""

    tenant: str
    adapter: str  # the base model's name for the base model
    version: str
    digest: str
    key: str = ""  # id of the API key; empty: nobody's request (residency), or authentication is off


@dataclass(frozen=True, slots=True)
class UsageFigures:
    """Sums. Seconds are of sequences, so that two that ran side by side for a second count two."""

    requests: int = 0  # answers whose prompt was computed
    prompt_tokens: int = 0  # as `usage` in the answer has them
    cached_tokens: int = 0  # of those, found in the prefix cache
    generated_tokens: int = 0
    queue_seconds: float = 0.0
    load_seconds: float = 0.0  # waiting for adapters
    compute_seconds: float = 0.0  # from the first scheduled chunk of the prompt to the last token
    residency_byte_seconds: float = 0.0  # of the adapter on the device

    def plus(self, other: UsageFigures) -> UsageFigures:
        return UsageFigures(*(mine + more for mine, more in zip(astuple(self), astuple(other), strict=True)))


FIGURES = tuple(field.name for field in fields(UsageFigures))
KEY_FIELDS = tuple(field.name for field in fields(UsageKey))

Batch = dict[tuple[int, UsageKey], UsageFigures]  # by the bucket's first Unix second, and key
UsageRow = tuple[int, UsageKey, UsageFigures]


def add_to(batch: Batch, bucket: int, key: UsageKey, figures: UsageFigures) -> None:
    """Count figures in a batch."""
    known = batch.get((bucket, key))
    batch[bucket, key] = figures if known is None else known.plus(figures)


def coarser(batch: Batch, max_rows: int) -> Batch:
    """The same sums in fewer rows: those of an hour as one, or of a day; then without the API keys, then without the
    adapters' versions, and at last all of a tenant. Its tokens and seconds stay its own, whatever it comes to.
    """
    hour, day = 3600, 86_400
    for seconds, rename in (
        (hour, lambda key: key),
        (day, lambda key: key),
        (day, lambda key: replace(key, key="")),
        (day, lambda key: replace(key, key="", version="", digest="")),
        (day, lambda key: UsageKey(key.tenant, "", "", "")),
    ):
        made: Batch = {}
        for (bucket, key), figures in batch.items():
            add_to(made, bucket - bucket % seconds, rename(key), figures)
        batch = made
        if len(batch) <= max_rows:
            break
    return batch


class AnswerUse:
    """The tokens and seconds of one answer, counted as the events of its rows come: shown in its `usage`, charged to
    quotas and metered. A prompt counts once, however many choices it has.
    """

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
        self._choices = {request.request_id: choice for choice, request in enumerate(requests)}
        self._started_prompts: set[int] = set()  # a prompt has the number of its first choice
        self._seconds: dict[int, list[float]] = {}  # by choice with a prompt: in the queue, loading adapters, computing
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
        return self._length(self._started_prompts | self._computed_prompts()) + sum(self._num_generated)

    def started(self, request_id: str) -> None:
        """The first tokens of a choice's prompt are in a step."""
        self._started_prompts.add(self._prompt_of(self._choices[request_id]))

    def prompt_computed(self, choice: int, event: PromptEvent) -> None:
        """A choice's prompt is computed, some of its tokens were found in the prefix cache."""
        timings = event.timings
        self._running[choice] = self._clock()
        self._num_cached[choice] = event.num_cached_tokens
        self._seconds[choice] = [timings.queue, timings.load, timings.prefill]

    def generated(self, choice: int, num_tokens: int) -> None:
        """A choice got more tokens."""
        self._num_generated[choice] += num_tokens

    def ended(self, choice: int) -> None:
        """A choice has its last token, or its vector."""
        if (since := self._running.pop(choice, None)) is not None:
            self._seconds[choice][2] += self._clock() - since

    def lost(self, choice: int) -> None:
        """All that a choice used is lost with its engine, and nobody has seen any of it."""
        self._num_generated[choice] = self._num_cached[choice] = 0
        self._running.pop(choice, None)
        self._seconds.pop(choice, None)

    def all_lost(self) -> None:
        """The same for the whole answer."""
        self._started_prompts.clear()
        for choice in range(len(self._requests)):
            self.lost(choice)

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
        if not self._seconds:
            return None
        num_prompt_tokens = self._length(self._computed_prompts())
        num_cached = sum(self._num_cached[:: self._step])
        seconds = map(sum, zip(*self._seconds.values(), strict=True))
        return UsageFigures(1, num_prompt_tokens, num_cached, sum(self._num_generated), *seconds)

    def _computed_prompts(self) -> set[int]:
        return set(map(self._prompt_of, self._seconds))

    def _length(self, choices: Sequence[int] | set[int]) -> int:
        return sum(len(self._requests[choice].prompt_token_ids) for choice in choices)

    def _prompt_of(self, choice: int) -> int:
        return choice - choice % self._step
