"""What a registration notes of an adapter version, for its card and for those who resolve it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from lora_serve.adapters.checkpoint.artifact import Artifact
from lora_serve.core.adapter import AdapterTraits
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.model_spec import ModelSpec

MAX_SHOWN = 100  # settings without effect, and characters of each: the card goes into the catalog and every listing


def traits_of(artifact: Artifact, spec: ModelSpec) -> AdapterTraits:
    """What the doors must know of it."""
    bound = artifact.bound
    return AdapterTraits(
        bound.is_additive,
        artifact.config.invocation_tokens,
        spec.fingerprint,
        bound.vocab_size,
        artifact.added_tokens,
        bound.num_labels,
    )


def summary_of(
    artifact: Artifact, traits: AdapterTraits, tested: SmokeTestResult, base_names: Iterable[str]
) -> dict[str, Any]:
    """JSON values. `base_names`: what the served base model is called."""
    config, bound = artifact.config, artifact.bound
    return {
        "peft_type": config.peft_type,
        "r": config.ranks.r,
        "lora_alpha": config.ranks.alpha,
        "use_rslora": config.ranks.use_rslora,
        "kinds": kinds_of(artifact),
        "targets": sorted({module.rpartition(".")[2] for module in bound.modules}),
        "num_modules": len(bound.modules),
        "dtypes": sorted({tensor.dtype for tensor in artifact.tensors.values()}),
        "base_model": _without_folder(config.base_model),
        "ignored_settings": [key[:MAX_SHOWN] for key in config.ignored[:MAX_SHOWN]],
        "traits": dataclasses.asdict(traits),
        "probe": {"max_logit_change": round(tested.logit_change, 6), "max_logit": round(tested.logit_scale, 6)},
        "warnings": base_warnings(artifact, base_names),
    }


def origin_of(sent: Artifact, spec: ModelSpec) -> dict[str, Any]:
    """What the card of an adapter that was rewritten as plain LoRA says of the files that were sent."""
    return {"init": sent.config.init, "digest": sent.digest, "r": sent.config.ranks.r, "base": spec.name}


def kinds_of(artifact: Artifact) -> list[str]:
    """What it is besides, or instead of, plain LoRA, in PEFT's words."""
    config, bound = artifact.config, artifact.bound
    kinds = {
        config.peft_type.lower(): config.peft_type != "LORA",
        "use_dora": config.use_dora,
        "lora_bias": config.lora_bias,
        "bias": config.bias != "none",
        "modules_to_save": bool(bound.parameters),
        "target_parameters": bool(config.target_parameters),
        "experts": bool(bound.deltas) and not config.target_parameters,
        "trainable_token_indices": bool(bound.tokens),
        "resized_vocabulary": bool(bound.vocab_size),
        "added_tokens": bool(artifact.added_tokens),
        "alora_invocation_tokens": bool(config.invocation_tokens),
        "embeddings": bool(bound.embeddings),
    }
    return [kind for kind, is_there in kinds.items() if is_there]


def base_warnings(artifact: Artifact, base_names: Iterable[str]) -> list[str]:
    """The config's name for its base is a matter of the trainer's disk, so another name is no reason to refuse."""
    named, served = _last(artifact.config.base_model), [_last(name) for name in base_names if name]
    if not named or named in served:
        return []
    return [f"Its config names the base model {named!r}, and this server serves {served[-1]!r}; their shapes agree."]


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _without_folder(name: str) -> str:
    """A hub id as it is; of a path only its last part, as where the trainer's disk has it is nobody's business."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", "~", "file:")) else name
