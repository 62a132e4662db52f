"""How many tokens prompts and answers have: `128`, `16-256`, `normal:200,50`, `lognormal:200,0.8`."""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts. fixed: `first`; uniform: every number from `first` to `second`; normal: mean and
    deviation; lognormal: the median, and the deviation of the natural logarithm. Never less than 1.
    """

    kind: Literal["fixed", "uniform", "normal", "lognormal"]
    first: float
    second: float = 0.0

    def draw(self, generator: random.Random) -> int:
        match self.kind:
            case "fixed":
                return int(self.first)
            case "uniform":
                return generator.randint(int(self.first), int(self.second))
            case "normal":
                return max(1, round(generator.gauss(self.first, self.second)))
            case "lognormal":
                return max(1, round(generator.lognormvariate(math.log(self.first), self.second)))


def parse_lengths(text: str) -> Lengths:
    """Parses the flag's text. Raises ArgumentTypeError."""
    kind, colon, numbers = text.partition(":")
    try:
        if colon and kind in ("normal", "lognormal"):
            first, second = map(float, numbers.split(","))
            found = Lengths("normal" if kind == "normal" else "lognormal", first, second)
        elif "-" in text:
            low, high = map(int, text.split("-"))
            found = Lengths("uniform", low, high)
        else:
            found = Lengths("fixed", int(text))
    except ValueError:
        found = Lengths("fixed", 0)
    is_right = (
        1 <= found.first < 1e7 and 0 <= found.second < 1e7 and (found.kind != "uniform" or found.second >= found.first)
    )
    if not is_right:
        raise argparse.ArgumentTypeError(
            f"expected tokens as 128, 16-256, normal:MEAN,DEVIATION or lognormal:MEDIAN,SIGMA (got {text[:60]!r})"
        )
    return found
