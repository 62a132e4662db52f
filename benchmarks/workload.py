"""What is asked of both engines: the same prompts and the same adapters, in the same order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

POPULARITIES = ("base", "identical", "uniform", "skewed")
ZIPF_EXPONENT = 1.1


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: `concurrency` users, each sending its next request when the last one is answered."""

    num_requests: int = 64
    concurrency: int = 16
    min_prompt_tokens: int = 16
    max_prompt_tokens: int = 256
    output_tokens: int = 64
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    prompt: tuple[int, ...]
    adapter: str | None  # None: the base model


@dataclass(frozen=True, slots=True)
class Sample:
    """How one request went. Times are seconds."""

    first_token: float  # from sending it
    gaps: tuple[float, ...]  # between tokens
    token_ids: tuple[int, ...]
    index: int = 0  # of its job

    @property
    def num_tokens(self) -> int:
        return 1 + len(self.gaps)


@dataclass(frozen=True, slots=True)
class Measured:
    """One pass over all jobs."""

    seconds: float
    samples: tuple[Sample, ...]  # in the jobs' order
    num_failed: int = 0


def make_jobs(load: Load, popularity: str, adapters: Sequence[str], vocab_size: int) -> list[Job]:
    """`load.num_requests` jobs; prompts depend on the seed only.

    base: no adapter; identical: the first adapter for all; uniform: each consecutive `len(adapters)` jobs name
    every adapter once in a shuffled order, so a full batch of that many rows holds that many different adapters;
    skewed: each job by itself, the adapter of rank k with a probability that falls with k ** 1.1 (Zipf).
    """
    generator = random.Random(load.seed)
    lengths = [generator.randint(load.min_prompt_tokens, load.max_prompt_tokens) for _ in range(load.num_requests)]
    prompts = [tuple(generator.randrange(3, vocab_size) for _ in range(length)) for length in lengths]
    names = _names(popularity, adapters, load.num_requests, generator)
    return [Job(prompt, name) for prompt, name in zip(prompts, names, strict=True)]


def _names(popularity: str, adapters: Sequence[str], count: int, generator: random.Random) -> list[str | None]:
    if popularity == "base":
        return [None] * count
    if popularity == "identical":
        return [adapters[0]] * count
    if popularity == "skewed":
        weights = [rank**-ZIPF_EXPONENT for rank in range(1, len(adapters) + 1)]
        return list(generator.choices(adapters, weights, k=count))
    if popularity != "uniform":
        raise ValueError(f"popularity {popularity!r} is none of {', '.join(POPULARITIES)}")
    names: list[str | None] = []
    while len(names) < count:
        names += generator.sample(list(adapters), len(adapters))
    return names[:count]
