"""Grammars over one vocabulary, compiled and asked as the engine does it."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

import lora_serve
from lora_serve.core.constraints import GrammarCompiled
from lora_serve.core.request import TokenGrammar
from lora_serve.core.setting_groups.http import GrammarConfig
from lora_serve.text.grammars.matcher import GrammarConstraint, GrammarConstraints
from lora_serve.text.grammars.vocabulary import Vocabularies
from lora_serve.text.tokenizer import TextModel

DEMO = Path(lora_serve.__file__).parent / "demo_data" / "model"
EOS = (2, 3)


def regex(pattern: str) -> str:
    found: str = LLMatcher.grammar_from_regex(pattern)
    return found


class Bench:
    """Grammars of one vocabulary; `compiled` waits for the message."""

    def __init__(
        self, load: Callable[[], TextModel], vocab_size: int, eos: tuple[int, ...] = EOS, **limits: int
    ) -> None:
        self.mail: queue.SimpleQueue[GrammarCompiled] = queue.SimpleQueue()
        self.constraints = GrammarConstraints(
            Vocabularies(load, vocab_size, eos), GrammarConfig(**limits), self.mail.put
        )

    def ended(self, grammar: TokenGrammar | str, tenant: str = "acme") -> GrammarCompiled:
        given = TokenGrammar(grammar) if isinstance(grammar, str) else grammar
        self.constraints.compile("r", tenant, given)
        return self.mail.get(timeout=60)

    def compiled(self, grammar: TokenGrammar | str, tenant: str = "acme") -> GrammarConstraint:
        message = self.ended(grammar, tenant)
        assert message.error is None, message.error
        assert isinstance(message.constraint, GrammarConstraint)
        return message.constraint

    def allowed(self, constraint: GrammarConstraint) -> list[int]:
        self.constraints.start([constraint])
        mask = np.frombuffer(constraint.wait(), np.uint8)
        return [int(token) for token in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]
