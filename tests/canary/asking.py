"""The canaries at work: rounds of all questions over HTTP, each answer judged by whose log-probabilities it has."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import torch

from tests.canary.questions import BASE, NEW_TOKENS, Question

NEAR = 2e-3  # mean |difference| of log-probabilities of the right model; float32 on both sides
FAR = 20  # every other model is so many times further away
BUSY = (429, 503)  # what a server under overload may say to anybody


@dataclass
class Verdict:
    """What came of the questions so far."""

    num_right: int = 0
    num_refused: int = 0  # for want of room, where that is allowed
    faults: list[str] = field(default_factory=list)


class Canaries:
    """`keys`: API keys by tenant; without one, a tenant asks as anybody (authentication is off)."""

    def __init__(self, questions: Sequence[Question], keys: Mapping[str, str] | None = None) -> None:
        self.questions = questions
        self._keys = keys or {}

    def with_keys(self, keys: Mapping[str, str]) -> Canaries:
        """The same questions, each with its tenant's key."""
        return Canaries(self.questions, keys)

    async def round(self, url: str, verdict: Verdict, *, may_refuse: bool = False) -> None:
        """Every question once, all at the same time."""
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(url, connector=connector) as session:
            await asyncio.gather(*(self._ask(session, question, verdict, may_refuse) for question in self.questions))

    async def _ask(
        self, session: aiohttp.ClientSession, question: Question, verdict: Verdict, may_refuse: bool
    ) -> None:
        body = {
            "model": question.model, "prompt": question.prompt, "max_tokens": NEW_TOKENS, "temperature": 0,
            "logprobs": 1, "ignore_eos": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        try:
            async with session.post("/v1/completions", json=body, headers=self._headers(question.tenant)) as response:
                if may_refuse and response.status in BUSY:
                    verdict.num_refused += 1
                    return
                text = await response.text()
                answer = await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, OSError) as error:
            verdict.faults.append(f"{question.tenant} asking {question.model}: {error!r}")
            return
        fault = f"status {response.status}: {text[:300]}" if answer is None else judge(question, answer)
        if answer is not None and not fault and response.headers["X-Adapter-Id"] != question.model:
            fault = f"answered by {response.headers['X-Adapter-Id']}"
        if fault:
            verdict.faults.append(f"{question.tenant} asking {question.model}: {fault}")
        else:
            verdict.num_right += 1

    def _headers(self, tenant: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._keys[tenant]}"} if tenant in self._keys else {}


def judge(question: Question, answer: Mapping[str, Any]) -> str:
    """What is wrong with an answer; empty: it is that of the question's own model, and of no other by far."""
    shown = answer["choices"][0]["logprobs"]
    tokens = tuple(int(token.removeprefix("token_id:")) for token in shown["tokens"])
    if tokens != question.tokens:
        return f"tokens {tokens} instead of {question.tokens}"
    found = torch.tensor(shown["token_logprobs"])
    distances = {model: question.distance(model, found) for model in question.logprobs}
    own = distances.pop(question.model)
    nearest = min(distances, key=lambda model: distances[model])
    if own > NEAR:
        return f"log-probabilities are off by {own:.4f} (from {nearest}: {distances[nearest]:.4f})"
    if distances[nearest] < FAR * max(own, NEAR / FAR):
        return f"it may as well be of {nearest}"
    return ""


def base_question(questions: Sequence[Question]) -> Question:
    return next(question for question in questions if question.model == BASE)
