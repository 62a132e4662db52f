"""What was acknowledged, and what each name may therefore have meant at a time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LAG = 5.0  # seconds until the other server knows of a change: two are promised, the machine may be busy


@dataclass
class Meaning:
    """A digest (None: there is no such id), from when it was sent until it was answered; the canary's beside it."""

    digest: str | None
    sent: float
    answered: float = math.inf
    canary: str | None = None

    @property
    def digests(self) -> set[str | None]:
        """Those that may answer."""
        return {self.digest} if self.canary is None else {self.digest, self.canary}


@dataclass
class Key:
    """A key's secret; when its end was sent, and answered."""

    secret: str
    id: str
    tenant: str
    made: float
    end_sent: float = math.inf
    ended: float = math.inf


@dataclass
class Ledger:
    """The whole of what clients were told. `lag`: seconds until every server knows of a change."""

    lag: float = LAG
    names: dict[str, list[Meaning]] = field(default_factory=dict)
    versions: dict[str, dict[int, str]] = field(default_factory=dict)  # by id: digests by number
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)  # by id: fields of its card
    aliases: dict[str, str] = field(default_factory=dict)
    quotas: dict[str, dict[str, int] | None] = field(default_factory=dict)  # by tenant; None: deleted
    keys: list[Key] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)  # by tenant, of whole answers
    acts: dict[str, str] = field(default_factory=dict)  # by request id: what was done

    def means(self, name: str, digest: str | None, now: float, canary: str | None = None) -> Meaning:
        """Note that an act is sent that gives the name this meaning, and this canary or none."""
        meaning = Meaning(digest, now, canary=canary)
        self.names.setdefault(name, []).append(meaning)
        return meaning

    def may_mean(self, name: str, digest: str | None, began: float, ended: float) -> bool:
        """True if the name may have had this meaning between two moments."""
        past = self.names.get(name) or [Meaning(None, -math.inf, -math.inf)]
        first = [Meaning(None, -math.inf, -math.inf)] if past[0].digest is not None else []
        known = [*first, *past]
        for meaning, later in zip(known, [*known[1:], Meaning(None, math.inf)], strict=True):
            if digest in meaning.digests and meaning.sent <= ended and began <= later.answered + self.lag:
                return True
        return False

    def now(self, name: str) -> str | None:
        """The digest that the name means, its canary aside; None: it means nothing."""
        past = self.names.get(name)
        return past[-1].digest if past else None

    def canary(self, name: str) -> str | None:
        """The digest of the name's canary; None: it has none."""
        past = self.names.get(name)
        return past[-1].canary if past else None
