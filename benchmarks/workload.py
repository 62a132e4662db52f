"""What is asked of both engines: the same prompts and the same adapters, in the same order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lora_serve.commands.bench.workload import FIRST_TOKEN_ID, POPULARITIES, ZIPF_EXPONENT, draw_adapters

__all__ = ["POPULARITIES", "ZIPF_EXPONENT", "Job", "Load", "Measured", "Sample", "make_jobs"]


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
    """`load.num_requests` jobs; prompts depend on the seed only. Popularities: `draw_adapters`."""
    generator = random.Random(load.seed)
    lengths = [generator.randint(load.min_prompt_tokens, load.max_prompt_tokens) for _ in range(load.num_requests)]
    prompts = [tuple(generator.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(length)) for length in lengths]
    names = draw_adapters(popularity, adapters, generator)
    return [Job(prompt, name) for prompt, name in zip(prompts, itertools.islice(names, len(prompts)), strict=True)]
