"""Grammars without a library: one set of tokens after another, and the checks that a real matcher would not make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from lora_serve.core.batch import AllowedTokens
from lora_serve.core.constraints import GrammarCompiled
from lora_serve.core.errors import InvalidRequestError, LoraServeError
from lora_serve.core.request import TokenGrammar
from lora_serve.core.stats import ConstraintStats

TOO_COMPLEX = -1  # among a step's tokens: whatever comes there, the grammar fails
_MASK_BYTES = 256


def grammar(*steps: Sequence[int]) -> TokenGrammar:
    """One token of each step, in order; a step of one token is forced."""
    return TokenGrammar(json.dumps([sorted(step) for step in steps]))


def steps_of(text: str) -> list[list[int]]:
    found: list[list[int]] = json.loads(text)
    return found


def chosen(wish: int, allowed: Sequence[int]) -> int:
    """The token that the fake runner gives where it would have liked another."""
    return wish if wish in allowed else sorted(allowed)[wish % len(allowed)]


def tokens_in(mask: bytes) -> list[int]:
    return [8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]


def mask_of(tokens: Sequence[int]) -> bytes:
    mask = bytearray(_MASK_BYTES)
    for token in tokens:
        if token != TOO_COMPLEX:
            mask[token // 8] |= 1 << token % 8
    return bytes(mask)


@dataclass
class FakeConstraint:
    """See `TokenConstraint`."""

    steps: list[list[int]]
    can_force: bool = True
    taken: list[int] = field(default_factory=list)
    is_begun: bool = False

    @property
    def is_over(self) -> bool:
        return len(self.taken) == len(self.steps)

    def wait(self) -> bytes:
        assert self.is_begun, "the step did not begin the mask"
        return mask_of(self.steps[len(self.taken)])

    def advance(self, token_ids: Sequence[int]) -> None:
        self.is_begun = False
        for token in token_ids:
            allowed = self.steps[len(self.taken)]
            if TOO_COMPLEX in allowed:
                raise InvalidRequestError("the grammar is too complex here")
            assert token in allowed, "a token that may not come, or the same one twice"
            self.taken.append(token)

    def after(self, draft: Sequence[int]) -> tuple[FakeConstraint, ...]:
        found: list[FakeConstraint] = []
        state = FakeConstraint(self.steps, self.can_force, list(self.taken))
        for token in draft:
            if token not in self.steps[len(state.taken)]:
                break
            state = FakeConstraint(self.steps, self.can_force, [*state.taken, token])
            if state.is_over or state.forced():
                break
            found.append(state)
        return tuple(found)

    def forced(self) -> tuple[int, ...]:
        if not self.can_force:
            return ()
        found: list[int] = []
        for step in self.steps[len(self.taken) :]:
            if len(step) > 1:
                break
            found += step
        return tuple(found)


@dataclass
class FakeConstraints:
    """See `Constraints`. A grammar is compiled when a test says so."""

    can_force: bool = True
    compiling: dict[str, TokenGrammar] = field(default_factory=dict)  # by request id
    tenants: dict[str, str] = field(default_factory=dict)
    made: dict[str, FakeConstraint] = field(default_factory=dict)
    num_started: int = 0

    def compile(self, request_id: str, tenant: str, grammar: TokenGrammar) -> None:
        self.compiling[request_id] = grammar
        self.tenants[request_id] = tenant

    def finished(self, request_id: str, error: LoraServeError | None = None) -> GrammarCompiled:
        """The message that a thread would post."""
        steps = steps_of(self.compiling.pop(request_id).text)
        if error is not None:
            return GrammarCompiled(request_id, None, error)
        self.made[request_id] = FakeConstraint(steps, self.can_force)
        return GrammarCompiled(request_id, self.made[request_id])

    def start(self, waited_for: Sequence[AllowedTokens]) -> None:
        self.num_started += len(waited_for)
        for one in waited_for:
            assert isinstance(one, FakeConstraint)
            one.is_begun = True

    def stats(self) -> ConstraintStats:
        return ConstraintStats(num_masks=self.num_started)
