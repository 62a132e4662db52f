"""The rules by which adapters may act in one answer together."""

from __future__ import annotations

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import InvalidRequestError
from lora_serve.server.adapter_set import AdapterSet

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
