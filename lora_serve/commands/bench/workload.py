"""The plan of a load: requests drawn from distributions or from a trace, and their times. The same seed gives the same
requests in all programs.

Lengths, tokens, adapters and times have a random stream each, so that two popularities send the same prompts at the
same times.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lora_serve.simulate.workload import TraceRow


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. `prompt`: token ids, or text; chat takes text only.

    `at`: seconds from the start; None: as soon as a user is free.
    """

    prompt: tuple[int, ...] | str
    adapter: str | None  # None: the base model
    output_tokens: int
    at: float | None = None
    num_prompt: int = 0  # tokens a text was meant to have; ids are counted

    @property
    def prompt_tokens(self) -> int:
        return self.num_prompt if isinstance(self.prompt, str) else len(self.prompt)


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a load. Closed loop: `concurrency` users, each sending its next request when the last one is
    answered.

    Open loop, for requests that have a time (all or none): each is sent at its time, whether or not earlier ones are
    answered; `concurrency` then caps how many are under way, None does not, and a request that waits for a place is
    late by the server's fault, not by the plan's: latencies count from the planned time.
    """

    requests: Iterable[PlannedRequest]  # iterated once per run; may be endless if `duration` is given
    concurrency: int | None = None
    duration: float | None = None  # seconds after which no more requests are sent; those under way are awaited
    cut_off: float | None = None  # seconds after which an unanswered request has failed
    warmup: tuple[PlannedRequest, ...] = ()  # sent before, as a closed loop, in no figure


Endpoint = Literal["completions", "chat"]
AdapterField = Literal["model", "adapter_id", "header", "llama-cpp"]
UsageReports = Literal["continuous", "final", "none"]


@dataclass(frozen=True, slots=True)
class Target:
    """A server that speaks OpenAI's HTTP API; `url` with or without a last `/v1`.

    adapter_field: how a request names its adapter. model: as its `model`; adapter_id: a field beside `model`;
    header: X-Adapter-Id; llama-cpp: `lora: [{"id": 3, "scale": 1.0}]`, ids from `adapter_ids`, or the name if it
    is a number, and adapter 0 with scale 0 for the base model, as an empty list means the server's default.
    usage: what is asked for in `stream_options`. continuous: a count in every chunk (lora_serve, vLLM), which makes
    token times exact; final: one count at the end; none: the field is not sent.
    """

    url: str
    model: str  # the base model's name
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    adapter_field: AdapterField = "model"
    adapter_ids: Mapping[str, int] = field(default_factory=dict)
    ignore_eos: bool = True
    usage: UsageReports = "continuous"
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # of every request; wins over the client's own fields
    response_formats: tuple[Mapping[str, Any], ...] = ()  # of the requests in turn; empty: the field is not sent
    headers: Mapping[str, str] = field(default_factory=dict)  # of every request, besides the client's own
    timeout: float = 3600.0  # seconds for one answer

    @property
    def root(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals at `rate` requests per second. Gaps have the mean 1 / rate and the variation coefficient burstiness **
    -0.5.

    burstiness: the gamma distribution's shape, as in vLLM's benchmark: 1 is a Poisson process, 0.25 comes in bursts,
    100 is almost regular.
    """

    rate: float
    burstiness: float = 1.0

    def times(self, generator: random.Random) -> Iterator[float]:
        """Yields seconds from the start, without end."""
        scale = 1.0 / (self.rate * self.burstiness)
        return itertools.accumulate(generator.gammavariate(self.burstiness, scale) for _ in itertools.count())


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


FIRST_TOKEN_ID = 3  # below are a tokenizer's special tokens, mostly

TRACE_BLOCK = 512  # tokens of one id of a Mooncake trace's blocks

PROMPT_LENGTHS = Lengths("uniform", 16, 256)

OUTPUT_LENGTHS = Lengths("fixed", 64)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in a fixed order, the same at each iteration; endless without `num_requests`.

    A trace gives lengths and, without `arrivals`, times, `speed` times as fast; it is run through again when it ends.
    Its conversations, where it tells them, keep their adapter, and equal blocks of prompts hold equal tokens.
    """

    num_requests: int | None
    vocab_size: int
    prompt_lengths: Lengths = PROMPT_LENGTHS
    output_lengths: Lengths = OUTPUT_LENGTHS
    popularity: str = "base"
    adapters: tuple[str, ...] = ()
    zipf: float = ZIPF_EXPONENT
    arrivals: Arrivals | None = None
    trace: tuple[TraceRow, ...] = ()
    speed: float = 1.0
    words: tuple[str, ...] = ()  # prompts are texts made of these instead of ids
    max_model_len: int | None = None  # longer requests are cut, the prompt first
    seed: int = 0

    def __iter__(self) -> Iterator[PlannedRequest]:
        names = draw_adapters(self.popularity, self.adapters, self._stream("adapters"), self.zipf)
        of_conversation: dict[int, str | None] = {}
        requests = zip(self._lengths(), self._times(), names, strict=False)
        for index, ((num_prompt, num_output), at, name) in enumerate(itertools.islice(requests, self.num_requests)):
            blocks = self.trace[index % len(self.trace)].blocks if self.trace else ()
            if blocks:  # the first block may be everybody's system prompt
                name = of_conversation.setdefault(blocks[min(1, len(blocks) - 1)], name)  # noqa: PLW2901
            prompt = self._prompt(index, num_prompt, blocks)
            yield PlannedRequest(prompt, name, num_output, at, num_prompt)

    def warmup(self, count: int) -> tuple[PlannedRequest, ...]:
        """Warm-up requests: other prompts of the same lengths, without times, for every adapter in turn."""
        popularity = "base" if self.popularity == "base" else "distinct"
        others = replace(
            self, num_requests=count, popularity=popularity, arrivals=None, trace=(), seed=-1 - self.seed
        )  # fmt: skip
        return tuple(others)

    def _stream(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")

    def _lengths(self) -> Iterator[tuple[int, int]]:
        generator = self._stream("lengths")
        for row in itertools.cycle(self.trace) if self.trace else itertools.repeat(None):
            if row is not None:
                yield self._cut(row.num_prompt, row.num_output)
            else:
                yield self._cut(self.prompt_lengths.draw(generator), self.output_lengths.draw(generator))

    def _cut(self, num_prompt: int, num_output: int) -> tuple[int, int]:
        if self.max_model_len is None:
            return num_prompt, num_output
        num_output = min(num_output, self.max_model_len - 1)
        return min(num_prompt, self.max_model_len - num_output), num_output

    def _times(self) -> Iterator[float | None]:
        if self.arrivals is not None:
            return iter(self.arrivals.times(self._stream("times")))
        recorded = [row.time for row in self.trace if row.time is not None]
        return self._recorded(recorded) if recorded else itertools.repeat(None)

    def _recorded(self, times: list[float]) -> Iterator[float]:
        span = (times[-1] - times[0]) * len(times) / max(1, len(times) - 1) or 1.0
        for lap in itertools.count():
            yield from ((time - times[0] + lap * span) / self.speed for time in times)

    def _prompt(self, index: int, length: int, blocks: tuple[int, ...]) -> tuple[int, ...] | str:
        shared = [self._tokens(f"block {block}", TRACE_BLOCK) for block in blocks]
        ids = list(itertools.chain.from_iterable(shared))[:length]
        ids += self._tokens(f"prompt {index}", length - len(ids))
        return " ".join(self.words[token] for token in ids) if self.words else tuple(ids)

    def _tokens(self, name: str, count: int) -> list[int]:
        """A prompt's token ids, or indices into `words`."""
        low, high = (0, len(self.words)) if self.words else (FIRST_TOKEN_ID, self.vocab_size)
        generator = self._stream(name)
        return [low + int(generator.random() * (high - low)) for _ in range(count)]
