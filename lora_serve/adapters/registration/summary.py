"""The facts about an adapter version that a registration notes in the catalog, for cards and requests."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lora_serve.adapters.catalog.entry import KEY, note_of
from lora_serve.adapters.checkpoint.artifact import Artifact
from lora_serve.core.adapter import AdapterTraits
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.model_spec import ModelSpec

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MAX_SHOWN = 100  # ignored settings, and characters of each, as the card is part of every listing


def traits_of(artifact: Artifact, spec: ModelSpec) -> AdapterTraits:
    """The traits that the floors above need."""
    bound = artifact.bound
    return AdapterTraits(
        bound.is_additive,
        artifact.config.invocation_tokens,
        spec.fingerprint,
        bound.vocab_size,
        artifact.added_tokens,
        bound.num_labels,
        artifact.ends.ids,
    )


def summary_of(
    artifact: Artifact, traits: AdapterTraits, result: SmokeTestResult, base_names: Iterable[str]
) -> dict[str, Any]:
    """The summary as JSON values. `base_names`: names of the served base model."""
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
        "probe": {"max_logit_change": round(result.logit_change, 6), "max_logit": round(result.logit_scale, 6)},
        "warnings": [*base_warnings(config.base_model, base_names), *token_warnings(artifact)],
        **({} if artifact.template is None else {KEY: note_of(artifact.template)}),
    }


def origin_of(sent: Artifact, spec: ModelSpec) -> dict[str, Any]:
    """The card's facts about the files that were sent, for an adapter that was converted to plain LoRA."""
    return {"init": sent.config.init, "digest": sent.digest, "r": sent.config.ranks.r, "base": spec.name}


def kinds_of(artifact: Artifact) -> list[str]:
    """The kinds of change that the adapter has besides, or instead of, plain LoRA, in PEFT's words."""
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


def base_warnings(base_model: str, base_names: Iterable[str]) -> list[str]:
    """A warning if the config names another base on a hub than the one that is served; its shapes agree, or it would
    be refused. A folder's name says nothing: it is the trainer's, or the operator's, own.
    """
    named, served = _last(base_model), [_last(name) for name in base_names if _is_hub_id(name)]
    if not _is_hub_id(base_model) or not served or named in served:
        return []
    return [f"Its config names the base model {named!r}, and this server serves {served[-1]!r}; their shapes agree."]


def token_warnings(artifact: Artifact) -> list[str]:
    """A warning for each special token of its chat template that is no token here: the model reads and writes it as
    ordinary text, so an answer may not end where the adapter ends it.
    """
    strange = {} if artifact.template is None else artifact.template.strange_tokens
    added = {token.content for token in artifact.added_tokens}
    return [
        f"Its chat template uses the {name} {text[:MAX_SHOWN]!r}, which is no token of the served tokenizer: it is "
        "read and written as ordinary text, and ends no answer."
        for name, text in strange.items()
        if text not in added and not (name == "eos_token" and artifact.ends.warnings)
    ] + [*artifact.ends.warnings, *([artifact.left_out] if artifact.left_out else [])]


def _is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name)) and not Path(name).is_dir()


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def _without_folder(name: str) -> str:
    """The name of a base: a hub id as it is, of a private path only the last part."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", "~", "file:")) else name
