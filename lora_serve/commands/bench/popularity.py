"""Chooses each request's adapter: Punica's four cases (Chen et al., MLSys 2024), and none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

POPULARITIES = ("base", "identical", "uniform", "skewed", "distinct")
ZIPF_EXPONENT = 1.1


def draw_adapters(
    popularity: str, adapters: Sequence[str], generator: random.Random, zipf: float = ZIPF_EXPONENT
) -> Iterator[str | None]:
    """Yields adapter ids without end. Raises ValueError for an unknown popularity, or for no adapter where one is
    needed.

    base: none; identical: the first for all; uniform: each consecutive `len(adapters)` requests name every adapter
    once in a shuffled order, so a full batch of that many rows holds that many different adapters; skewed: each
    request by itself, the adapter of rank k with a probability that falls with k ** zipf; distinct: in turn, so no two
    of `len(adapters)` requests in a row share one.
    """
    if popularity not in POPULARITIES:
        raise ValueError(f"popularity {popularity!r} is none of {', '.join(POPULARITIES)}")
    if popularity == "base":
        return itertools.repeat(None)
    if not adapters:
        raise ValueError(f"popularity {popularity!r} needs adapters")
    if popularity == "identical":
        return itertools.repeat(adapters[0])
    if popularity == "distinct":
        return itertools.cycle(adapters)
    if popularity == "skewed":
        return _skewed(adapters, generator, zipf)
    return itertools.chain.from_iterable(generator.sample(adapters, len(adapters)) for _ in itertools.count())


def _skewed(adapters: Sequence[str], generator: random.Random, zipf: float) -> Iterator[str]:
    weights = list(itertools.accumulate(rank**-zipf for rank in range(1, len(adapters) + 1)))
    while True:
        yield generator.choices(adapters, cum_weights=weights)[0]
