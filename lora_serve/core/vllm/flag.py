"""One flag of vLLM, with the use that is made of it here."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


class Takes(enum.Enum):
    """The values behind a flag."""

    SWITCH = "none: --x or --no-x"
    ONE = "one"
    MANY = "one or more"


class Fate(enum.Enum):
    """The ends that a flag comes to."""

    MEANT = "does the same"  # under the name of a setting of ours
    IGNORED = "accepted, and means nothing here"
    REFUSED = "refused, as answers would change"


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """A flag that is no setting of this server under the same name."""

    name: str
    fate: Fate
    why: str  # of MEANT: what is different, if anything
    takes: Takes = Takes.ONE
    short: str = ""
    harmless: tuple[str, ...] = ()  # values of a refused flag that say what is so here anyway
    setting: str = ""  # with MEANT: the flag of ours; with REFUSED: the one that takes the value instead
    values: Mapping[str, str] = field(default_factory=dict)  # with MEANT: vLLM's value -> ours; empty: as it is
    read: Callable[[str], str] | None = None  # in place of `values`; raises ValueError in words
    ignored: Callable[[str], str] | None = None  # with MEANT: names what means nothing in a value, and why; else ""

    @property
    def dest(self) -> str:
        """The name of its value among parsed arguments, which no setting has."""
        return "vllm:" + self.name
