"""The adapters of one request, as the caller named them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lora_serve.adapters.catalog.catalog import Catalog, Resolution
from lora_serve.adapters.catalog.entry import CatalogEntry, Route
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import InvalidRequestError
from lora_serve.core.request import AdapterUse

BASE_VERSION = "0"  # X-Adapter-Version of the base model
BASE_DIGEST = "base"  # X-Adapter-Digest of the base model


@dataclass(frozen=True, slots=True)
class AdapterMember:
    """One adapter whose deltas count `scale` times."""

    ref: AdapterRef
    scale: float = 1.0
    resolution: Resolution | None = field(default=None, compare=False)  # of the caller's name; None: nobody named it

    def canary_route(self, entries: Mapping[str, CatalogEntry]) -> Route | None:
        """The route that chose the version, if it has a canary and is the same in these entries, which are of now."""
        named = self.resolution
        if named is None or named.names_version or named.entry.route.canary is None:
            return None
        entry = entries.get(named.entry.name)
        return None if entry is None or entry.route != named.entry.route else entry.route


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters of one answer: y = W x + sum over members of scale * B A x. Without members the base model answers.

    Names, versions and digests have one element per adapter, in the caller's order.
    """

    members: tuple[AdapterMember, ...]
    base_name: str

    @property
    def is_composed(self) -> bool:
        """True unless this is the base model, or one adapter just as it was trained."""
        return len(self.members) > 1 or any(member.scale != 1.0 for member in self.members)

    @property
    def single(self) -> AdapterRef | None:
        """The only adapter, whose added tokens count. Adapters that add tokens are never composed."""
        return self.members[0].ref if len(self.members) == 1 else None

    @property
    def named(self) -> Resolution | None:
        """The meaning of the caller's name, if it named one adapter: with it come defaults and a chat template."""
        return self.members[0].resolution if len(self.members) == 1 else None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.ref.name for member in self.members) or (self.base_name,)

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(str(member.ref.version) for member in self.members) or (BASE_VERSION,)

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(member.ref.digest for member in self.members) or (BASE_DIGEST,)

    @property
    def model(self) -> str:
        """`model` of the answer: the names joined by "+"."""
        return "+".join(self.names)

    @property
    def label(self) -> str:
        """`a@1+b@2`, for the log."""
        return "+".join(f"{name}@{version}" for name, version in zip(self.names, self.versions, strict=True))

    def uses_in(self, prompt: Sequence[int]) -> tuple[AdapterUse, ...]:
        """The members that act in an answer to this prompt.

        Sorted by digest, as sums of floats depend on their order, and the answer must not depend on the caller's.
        """
        starts = [(member, member.ref.start_in(prompt)) for member in self.members]
        uses = [AdapterUse(member.ref, member.scale, start) for member, start in starts if start is not None]
        return tuple(sorted(uses, key=lambda use: use.ref.digest))

    def activity(self, prompts: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """`1` or `0` for each adapter, or for several prompts in how many of them the adapter acts: `1/2`.

        Empty if no adapter has invocation tokens: then all of them always act.
        """
        if not any(member.ref.traits.invocation_tokens for member in self.members):
            return ()
        total = "" if len(prompts) == 1 else f"/{len(prompts)}"
        counts = [sum(member.ref.start_in(prompt) is not None for prompt in prompts) for member in self.members]
        return tuple(f"{count}{total}" for count in counts)


# Kinds of an adapter's card that replace a weight instead of adding a delta, so that no sum with others is defined.
REPLACING_KINDS = ("use_dora", "bias", "modules_to_save", "target_parameters", "experts", "trainable_token_indices")


def check_composition(adapters: AdapterSet, catalog: Catalog, limits: AdapterConfig) -> None:
    """Raises InvalidRequestError if they cannot be composed or scaled, or could never be in memory together."""
    if not adapters.is_composed:
        return
    refs = [member.ref for member in adapters.members]
    _check_distinct(refs)
    for ref in refs:
        _check_additive(ref, catalog)
    if len(refs) > 1:
        _check_room(refs, limits)


def _check_distinct(refs: list[AdapterRef]) -> None:
    first: dict[str, AdapterRef] = {}
    for ref in refs:
        other = first.setdefault(ref.digest, ref)
        if other is not ref:
            raise _refused(
                f"`adapters` names {other.label!r} twice."
                if other.name == ref.name
                else f"`{ref.name}` and `{other.name}` are the same adapter: name one of them, with the scales added."
            )


def _check_additive(ref: AdapterRef, catalog: Catalog) -> None:
    if ref.traits.is_additive:
        return
    kinds = _kinds_of(ref, catalog)
    reasons = [kind for kind in kinds if kind in REPLACING_KINDS] or kinds
    raise _refused(
        f"The adapter `{ref.label}` cannot be composed or scaled, as it does more than add low-rank deltas "
        f"({', '.join(reasons)}); it can be used alone, with scale 1.0."
    )


def _kinds_of(ref: AdapterRef, catalog: Catalog) -> list[str]:
    """As its card shows them; empty if it was deleted just now."""
    entry = catalog.snapshot.entries.get(ref.name)
    versions = entry.versions if entry else ()
    return next((list(v.summary.get("kinds", ())) for v in versions if v.digest == ref.digest), [])


def _check_room(refs: list[AdapterRef], limits: AdapterConfig) -> None:
    if len(refs) > limits.max_loras:
        raise _refused(
            f"`adapters` names {len(refs)} adapters; the device holds at most {limits.max_loras} (--max-loras)."
        )
    if limits.max_cpu_loras is not None and len(refs) > limits.max_cpu_loras:
        raise _refused(
            f"`adapters` names {len(refs)} adapters; host memory holds {limits.max_cpu_loras} (--max-cpu-loras)."
        )
    num_bytes = sum(ref.num_bytes for ref in refs)
    for flag, allowed in (
        ("--adapter-memory", limits.adapter_memory),
        ("--adapter-host-memory", limits.adapter_host_memory),
    ):
        if allowed is not None and num_bytes > allowed:
            raise _refused(f"These adapters need {num_bytes} bytes together; {flag} allows {allowed}.")


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="adapters")
