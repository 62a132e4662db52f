"""Requests drawn from distributions or from a trace. The same seed gives the same requests, whatever asks for them.

Lengths, tokens, adapters and times have a random stream each, so that two popularities send the same prompts at the
same times.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lora_serve.commands.bench.arrivals import Arrivals
from lora_serve.commands.bench.lengths import Lengths
from lora_serve.commands.bench.plan import PlannedRequest
from lora_serve.commands.bench.popularity import ZIPF_EXPONENT, draw_adapters
from lora_serve.simulate.traces import TraceRow

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
