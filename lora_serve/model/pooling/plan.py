"""What a checkpoint is for: its task, and how its hidden states become one vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError
from lora_serve.core.request import Task
from lora_serve.model.loading.frozen_model import read_model_config
from lora_serve.model.pooling.sentence_modules import Normalize, Step, read_modules

_HEADLESS = ("Model", "ForMaskedLM", "ForPreTraining")


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """From hidden states to an answer."""

    task: Task  # EMBED or CLASSIFY
    pooling: str  # which tokens: "cls" (the first), "last", "mean" or "max"; with CLASSIFY as the head wants it
    steps: tuple[Step, ...] = ()  # after pooling
    max_length: int | None = None  # tokens; None: as many as the model has positions

    @property
    def is_normalized(self) -> bool:
        return bool(self.steps) and isinstance(self.steps[-1], Normalize)


def plan_pooling(config: ModelConfig) -> PoolingPlan | None:
    """None: the model generates. Raises ConfigError and ModelError.

    A sentence-transformers folder says all of it. Of other models an embedding is the mean of an encoder's tokens
    (sentence-transformers' own rule for them) or a decoder's last token, divided by its length as vLLM does.
    """
    hf_config = read_model_config(config)
    modules = read_modules(config.model) if config.task in ("auto", Task.EMBED) else None
    task = _task(config.task, hf_config, has_modules=modules is not None)
    if task is not Task.EMBED and config.pooling != "auto":
        raise ConfigError(f"--pooling {config.pooling}: only goes with --task embed (the task is {task})")
    if task is Task.GENERATE:
        return None
    if task is Task.CLASSIFY:
        return PoolingPlan(task, _head_pooling(hf_config))
    if modules is not None:
        pooling = modules.pooling if config.pooling == "auto" else config.pooling
        return PoolingPlan(task, pooling, modules.steps, modules.max_length)
    default = "last" if _is_decoder(hf_config) else "mean"
    return PoolingPlan(task, default if config.pooling == "auto" else config.pooling, (Normalize(),))


def _task(asked: str, hf_config: Any, *, has_modules: bool) -> Task:
    if asked != "auto":
        return Task(asked)
    if has_modules:
        return Task.EMBED
    (architecture,) = (getattr(hf_config, "architectures", None) or [""])[:1]
    if architecture.endswith("ForSequenceClassification"):
        return Task.CLASSIFY
    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or (not architecture and _is_decoder(hf_config)):
        return Task.GENERATE
    return Task.EMBED if architecture.endswith(_HEADLESS) or not architecture else Task.GENERATE


def _is_decoder(hf_config: Any) -> bool:
    """BERT and its kin have classes for both, and are encoders."""
    kind = hf_config.model_type
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _head_pooling(hf_config: Any) -> str:
    if _is_decoder(hf_config):
        return "last"
    return str(getattr(hf_config, "classifier_pooling", "cls"))  # ModernBERT says it, the others take the first token
