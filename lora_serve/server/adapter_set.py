"""The adapters of one request, as the caller named them, and what they mean for one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lora_serve.adapters.catalog.resolution import Resolution
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.request import AdapterUse, InferenceRequest


@dataclass(frozen=True, slots=True)
class AdapterMember:
    """One adapter whose deltas count `scale` times."""

    ref: AdapterRef
    scale: float = 1.0
    resolution: Resolution | None = field(default=None, compare=False)  # of the caller's name; None: nobody named it


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """What answers: y = W x + sum over members of scale * B A x. Empty: the base model alone."""

    members: tuple[AdapterMember, ...] = ()

    @property
    def is_composed(self) -> bool:
        """Whether it is more than one adapter just as it was trained."""
        return len(self.members) > 1 or any(member.scale != 1.0 for member in self.members)

    @property
    def has_activated(self) -> bool:
        """Whether a member acts only where its invocation tokens are."""
        return any(member.ref.traits.invocation_tokens for member in self.members)

    @property
    def vocabulary_of(self) -> AdapterRef | None:
        """Whose tokens count; None: the base's. Adapters with a vocabulary of their own are never composed."""
        return self.members[0].ref if len(self.members) == 1 else None

    def model_name(self, base_name: str) -> str:
        """`model` of the answer: the members' names joined by "+"."""
        return "+".join(member.ref.name for member in self.members) or base_name

    def uses_in(self, prompt: Sequence[int]) -> tuple[AdapterUse, ...]:
        """The members that act in an answer to this prompt.

        By digest, as sums of floats depend on their order, and the answer must not depend on the caller's.
        """
        starts = [(member, member.ref.start_in(prompt)) for member in self.members]
        uses = [AdapterUse(member.ref, member.scale, start) for member, start in starts if start is not None]
        return tuple(sorted(uses, key=lambda use: use.ref.digest))

    def active_in(self, requests: Sequence[InferenceRequest]) -> tuple[int, ...]:
        """In how many of these requests each member acts."""
        return tuple(sum(member.ref in request.refs for request in requests) for member in self.members)
