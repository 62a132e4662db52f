"""Prompts whose greedy answers are known for every adapter, as one engine alone gave them, to judge others by."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.fleet.site import BASE, Site, engine_flags
from lora_serve.commands.bench.load import run_load
from lora_serve.commands.bench.report import RequestRecord
from lora_serve.commands.bench.workload import Plan, PlannedRequest, Target

Kind = Literal["right", "wrong", "cut", "lost"]
Prompt = tuple[int, ...]
USABLE_TOKENS = (100, 2000)  # of the demo's vocabulary; special tokens are below


@dataclass(frozen=True)
class KnownAnswers:
    """The texts of `num_tokens` tokens by adapter and prompt."""

    texts: Mapping[tuple[str, Prompt], str]
    num_tokens: int

    def requests(self, seed: int) -> Iterator[PlannedRequest]:
        """Without end: any prompt with any adapter."""
        pairs, generator = list(self.texts), random.Random(seed)
        while True:
            adapter, prompt = generator.choice(pairs)
            yield PlannedRequest(prompt, adapter, self.num_tokens)

    def judge(self, record: RequestRecord, request: PlannedRequest) -> Kind:
        """Right or wrong; cut: an error after some tokens, those before it right; lost: an error before any token."""
        assert request.adapter is not None
        assert isinstance(request.prompt, tuple)
        known = self.texts[request.adapter, request.prompt]
        if record.error is None:
            return "right" if (record.text, record.output_tokens) == (known, self.num_tokens) else "wrong"
        if not known.startswith(record.text):
            return "wrong"
        return "cut" if record.output_tokens or record.text else "lost"


def ask_one_engine(site: Site, num_prompts: int, num_tokens: int) -> KnownAnswers:
    """Register the site's adapters, and ask each of them everything."""
    low, high = USABLE_TOKENS
    generator = random.Random(17)
    prompts = [tuple(generator.randrange(low, high) for _ in range(12 + 9 * number)) for number in range(num_prompts)]
    pairs = list(itertools.product(site.adapters, prompts))
    with site.server("alone", engine_flags("thread", 1), *site.modules) as server:
        requests = [PlannedRequest(prompt, adapter, num_tokens) for adapter, prompt in pairs]
        result = asyncio.run(run_load(Target(server.url, BASE), Plan(requests, 8)))
    if result.failed:
        raise RuntimeError(f"one engine alone failed: {result.failed[0].error}: {result.failed[0].detail}")
    texts = {pair: record.text for pair, record in zip(pairs, result.records, strict=True)}
    check_distinct(texts)
    return KnownAnswers(texts, num_tokens)


def check_distinct(texts: Mapping[tuple[str, Prompt], str]) -> None:
    """Raises ValueError where another adapter's answer, or another prompt's, would pass for right too often."""
    most = Counter(texts.values()).most_common(1)[0][1]
    if most > max(2, len(texts) // 50):
        raise ValueError(f"{most} of {len(texts)} answers are alike: a wrong adapter would not be seen")


class Asked:
    """A plan's requests, kept by their index, so that records can be judged; no more once `goes_on` says no."""

    def __init__(self, requests: Iterator[PlannedRequest], goes_on: Callable[[], bool] = lambda: True) -> None:
        self._requests = requests
        self._goes_on = goes_on
        self.sent: list[PlannedRequest] = []

    def __iter__(self) -> Iterator[PlannedRequest]:
        for request in itertools.takewhile(lambda _: self._goes_on(), self._requests):
            self.sent.append(request)
            yield request

    def judged(self, known: KnownAnswers, records: Sequence[RequestRecord]) -> list[tuple[Kind, RequestRecord]]:
        return [(known.judge(record, self.sent[record.index]), record) for record in records]
