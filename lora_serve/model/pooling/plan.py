"""The task of a checkpoint, and how its hidden states become one vector, as sentence-transformers describes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils.hub import cached_file

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.request import Task
from lora_serve.model.loading.frozen_model import read_model_config

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
    "SiLU": F.silu,
}
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
_HEADLESS = ("Model", "ForMaskedLM", "ForPreTraining")


@dataclass(frozen=True, slots=True)
class Dense:
    """y = activation(x W^T + bias)."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


def normalize(x: Tensor) -> Tensor:
    """x / |x|."""
    return F.normalize(x, p=2, dim=-1)


AfterPooling = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The modules after the transformers model."""

    pooling: str  # "cls", "mean", "max" or "last"
    steps: tuple[AfterPooling, ...]
    max_length: int | None  # tokens


def read_modules(model: str) -> SentenceModules | None:
    """The modules of a folder or hub id; None: it has none, or is a cross-encoder, which is an ordinary classifier.

    Raises ModelError.
    """
    listing = _read(model, "modules.json")
    if listing is None or (_read(model, "config_sentence_transformers.json") or {}).get("model_type") == "CrossEncoder":
        return None
    pooling, steps = None, list[AfterPooling]()
    for module in listing:
        kind, path = str(module["type"]).rpartition(".")[2], str(module["path"])
        if kind == "Transformer":
            _require(path == "", model, f"its Transformer module must lie in the folder itself, not in {path!r}")
        elif kind == "Pooling" and pooling is None and not steps:
            pooling = _pooling(model, _read(model, f"{path}/config.json") or {})
        elif kind == "Dense" and pooling is not None:
            steps.append(_dense(model, path))
        elif kind == "Normalize" and pooling is not None:
            steps.append(normalize)
        else:
            raise ModelError(f"--model {model}: the sentence-transformers module {module['type']!r} is not supported")
    _require(pooling is not None, model, "its modules.json names no Pooling module")
    limit = (_read(model, "sentence_bert_config.json") or {}).get("max_seq_length")
    return SentenceModules(pooling or "", tuple(steps), limit)


def _pooling(model: str, config: Mapping[str, Any]) -> str:
    """The pooling mode: older files have a flag per mode, newer ones name it."""
    named = config.get("pooling_mode")
    flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
    modes = [named] if isinstance(named, str) else flags
    known = [_MODES.get(mode, _MODES.get(f"pooling_mode_{mode}", mode)) for mode in modes]
    known = ["last" if mode == "lasttoken" else mode for mode in known]
    is_known = len(known) == 1 and known[0] in _MODES.values()
    _require(is_known, model, f"its pooling {', '.join(map(str, modes))} is not one of cls, mean, max, last")
    includes = config.get("include_prompt", True)
    _require(includes is True, model, f"its pooling has include_prompt {includes}")
    return str(known[0])


def _dense(model: str, path: str) -> Dense:
    config = _read(model, f"{path}/config.json") or {}
    name = str(config.get("activation_function", "")).rpartition(".")[2]
    _require(name in _ACTIVATIONS, model, f"the activation {name!r} of {path} is not one of {', '.join(_ACTIVATIONS)}")
    reads = config.get("module_input_name", "sentence_embedding")
    _require(reads == "sentence_embedding", model, f"{path} reads {reads}, not the pooled vector")
    file = _find(model, f"{path}/model.safetensors")
    if file is None:
        raise ModelError(f"--model {model}: {path}/model.safetensors is missing; other formats are not read")
    tensors = load_file(file)
    _require(tensors.keys() <= {"linear.weight", "linear.bias"}, model, f"{path} holds more than one linear layer")
    return Dense(tensors["linear.weight"], tensors.get("linear.bias"), _ACTIVATIONS[name])


def _require(condition: bool, model: str, reason: str) -> None:
    if not condition:
        raise ModelError(f"--model {model}: {reason}")


def _read(model: str, name: str) -> Any:
    file = _find(model, name)
    if file is None:
        return None
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"--model {model}: {name} is no JSON: {error}") from error


def _find(model: str, name: str) -> Path | None:
    """A file of a folder or of a hub repository; None: it is not there."""
    folder = Path(model)
    if folder.exists():  # a GGUF file has none beside it
        file = folder / name
        return file if file.is_file() else None
    found = cached_file(
        model,
        name,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """From hidden states to an answer."""

    task: Task  # EMBED or CLASSIFY
    pooling: str  # which tokens: "cls" (the first), "last", "mean" or "max"; with CLASSIFY as the head wants it
    steps: tuple[AfterPooling, ...] = ()  # after pooling
    max_length: int | None = None  # tokens; None: as many as the model has positions

    @property
    def is_normalized(self) -> bool:
        return self.steps[-1:] == (normalize,)


def plan_pooling(config: ModelConfig) -> PoolingPlan | None:
    """The plan for a pooling model; None: the model generates. Raises ConfigError and ModelError."""
    hf_config = read_model_config(config)
    modules = read_modules(config.model) if config.task in ("auto", "pooling", Task.EMBED) else None
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
    return PoolingPlan(task, default if config.pooling == "auto" else config.pooling, (normalize,))


def _task(asked: str, hf_config: Any, *, has_modules: bool) -> Task:
    if asked not in ("auto", "pooling"):
        return Task(asked)
    if has_modules:
        return Task.EMBED
    (architecture,) = (getattr(hf_config, "architectures", None) or [""])[:1]
    if architecture.endswith("ForSequenceClassification"):
        return Task.CLASSIFY
    if asked == "pooling":
        return Task.EMBED
    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or (not architecture and _is_decoder(hf_config)):
        return Task.GENERATE
    return Task.EMBED if architecture.endswith(_HEADLESS) or not architecture else Task.GENERATE


def _is_decoder(hf_config: Any) -> bool:
    """BERT and its kin have classes for both, and are encoders."""
    kind = hf_config.model_type
    generates = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return generates and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _head_pooling(hf_config: Any) -> str:
    if _is_decoder(hf_config):
        return "last"
    return str(getattr(hf_config, "classifier_pooling", "cls"))  # ModernBERT says it, the others take the first token
