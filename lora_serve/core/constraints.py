"""The seam between the engine and the code that knows grammars (`text/grammars/matcher.py`, or a fake in tests)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_serve.core.batch import AllowedTokens
from lora_serve.core.errors import LoraServeError
from lora_serve.core.request import TokenGrammar
from lora_serve.core.stats import ConstraintStats


class TokenConstraint(AllowedTokens, Protocol):
    """The state of one sequence within its grammar. The engine's thread calls everything but `wait`."""

    @property
    def is_over(self) -> bool:
        """True if the output is complete and nothing but the end can follow."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in the tokens that came next, the end of the text among them.

        Raises LoraServeError if the sequence cannot go on, for instance because the grammar became too complex.
        """

    def forced(self) -> tuple[int, ...]:
        """The tokens that the grammar leaves no choice about, in the tokenizer's own spelling; empty: there is one."""

    def after(self, draft: Sequence[int]) -> tuple[AllowedTokens, ...]:
        """The tokens that may come after each of the first tokens of a draft; the state stays as it is.

        As many as may be guessed: up to a token that the grammar does not allow, completes the output or forces others.
        Each is asked once at most, before the next `advance`.
        """


@dataclass(frozen=True, slots=True)
class GrammarCompiled:
    """The end of one compilation, for the engine's mailbox; exactly one of `constraint` and `error` is given."""

    request_id: str
    constraint: TokenConstraint | None
    error: LoraServeError | None = None


class Constraints(Protocol):
    """Compiles grammars and works out masks, on threads of its own. The engine's thread calls it."""

    def compile(self, request_id: str, tenant: str, grammar: TokenGrammar) -> None:
        """Begins to compile; the end is posted as `GrammarCompiled`. What one tenant's request leaves behind for the
        next, no other tenant's finds.
        """

    def start(self, waited_for: Sequence[AllowedTokens]) -> None:
        """Begins to work out what may come next, of the sequences that a step samples for; returns at once."""

    def stats(self) -> ConstraintStats:
        """The figures since the start."""
