"""What the clients of a soak do: the traffic of a rolling update on one server, schemas, tools, and hanging up."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from benchmarks.reliability.storms import hang_up
from benchmarks.soak.guest import Guest
from benchmarks.soak.written import call_fault, call_question, json_fault, json_question
from tests.canary.questions import BASE
from tests.canary.races import PROMPTS, question
from tests.rolling.ledger import Ledger
from tests.rolling.round_robin import Reply
from tests.rolling.traffic import Traffic, Work

CHAT = "/v1/chat/completions"
SEEDS = 2  # texts repeat, so that what speculation learns of answers, some 25 MB at most, is full after minutes
FORMS = ((json_question, json_fault), (call_question, call_fault))


@dataclass
class Break:
    """An engine was killed; `until`: the server had all its engines again."""

    since: float
    until: float = math.inf


@dataclass
class SoakTraffic(Traffic):
    """One server: it knows of a change as soon as that is answered. A stream may fail while an engine is away, with an
    error that says to try again, and what it had written is right.
    """

    ledger: Ledger = field(default_factory=lambda: Ledger(lag=0.0))
    askers: int = 2
    rests: tuple[float, float] = (0.0, 0.02)
    breaks: list[Break] = field(default_factory=list)
    num_written: int = 0  # of the answers: JSON and calls
    num_cut: int = 0
    num_left: int = 0
    num_guests: int = 0

    def requests(self) -> list[Work]:
        return [*super().requests(), self._ask_for_all, self._ask_for_a_form]

    def acts(self) -> list[Work]:
        return [self._change]

    def other_acts(self) -> list[Work]:
        return [self._guest, self._hang_up]

    async def _guest(self, _: str, generator: random.Random) -> None:
        await Guest(self, next(self._numbers)).live(generator)
        self.num_guests += 1

    async def _ask_for_all(self, tenant: str, generator: random.Random) -> None:
        """All prompts in one request, whose rows run beside each other: each answer is in its prompt's place."""
        name = self._name(tenant, generator)
        reply = await self._answer(tenant, question(name, 0) | {"prompt": PROMPTS})
        if reply is None:
            return
        answer = json.loads(reply.body)
        self.num_answers += len(PROMPTS) - 1
        for number, choice in enumerate(answer["choices"]):
            self._compare(name, number, reply, choice["logprobs"]["tokens"])
        if [choice["index"] for choice in answer["choices"]] != list(range(len(PROMPTS))):
            self.wrong.append(f"{name}: the choices are not those of {len(PROMPTS)} prompts: {answer}")
        self.ledger.tokens[tenant] += answer["usage"]["total_tokens"]

    # -- answers of a form -----------------------------------------------------------------------------------------

    async def _ask_for_a_form(self, tenant: str, generator: random.Random) -> None:
        question, fault_of = generator.choice(FORMS)
        name = self._name(tenant, generator)
        reply = await self._answer(tenant, question(name, generator.randrange(SEEDS)), CHAT)
        if reply is None:
            return
        answer, digest = json.loads(reply.body), reply.headers["X-Adapter-Digest"]
        self.num_written += 1
        self.ledger.tokens[tenant] += answer["usage"]["total_tokens"]
        if fault := fault_of(answer):
            self.wrong.append(f"{name} ({digest}), asked for a form: {fault}")
        if name != BASE and not self.ledger.may_mean(name, digest, reply.began, reply.ended):
            self.wrong.append(f"{name} did not mean {digest} then")

    # -- what breaks -----------------------------------------------------------------------------------------------

    def _failed_within(self, tenant: str, name: str, number: int, reply: Reply, events: Sequence[Any]) -> None:
        self.num_cut += 1
        self.in_doubt.add(tenant)
        error = events[-1]["error"]
        shown = [token for event in events[:-1] for one in event["choices"] for token in one["logprobs"]["tokens"]]
        if shown:
            self._compare(name, number, reply, shown, is_whole=False)
        if error["code"] != "engine_restarted" or "again" not in error["message"]:
            self.wrong.append(f"a stream of {name} failed and does not say to try again: {error}")
        if not any(one.since <= reply.ended and reply.began <= one.until for one in self.breaks):
            self.wrong.append(f"a stream of {name} failed, and nothing was broken: {error}")

    async def _hang_up(self, _: str, generator: random.Random) -> None:
        """The admin leaves a request to the base model, so that no tenant's tokens are counted."""
        await hang_up(urlsplit(self.client.urls[0]).port or 0, generator, BASE, self.admin)
        self.num_left += 1
