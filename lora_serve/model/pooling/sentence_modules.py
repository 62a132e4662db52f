"""What a sentence-transformers folder does with a model's hidden states, read from its modules.json.

Format: https://sbert.net/docs/sentence_transformer/usage/custom_models.html. Its own package is not needed: the files
name a transformers model, how tokens are pooled, and linear layers after that. What is not known is refused.
"""

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
from transformers.utils.hub import cached_file

from lora_serve.core.errors import ModelError

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
_HARMLESS = {"include_prompt": True}  # what it must be


@dataclass(frozen=True, slots=True)
class Dense:
    """y = activation(x W^T + bias)."""

    weight: Tensor  # [out, in]
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(F.linear(x, self.weight, self.bias))


class Normalize:
    """x / |x|."""

    def __call__(self, x: Tensor) -> Tensor:
        return F.normalize(x, p=2, dim=-1)


Step = Dense | Normalize


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The modules after the transformers model."""

    pooling: str  # "cls", "mean", "max" or "last"
    steps: tuple[Step, ...]
    max_length: int | None  # tokens


def read_modules(model: str) -> SentenceModules | None:
    """Of a folder or hub id; None: it has none, or is a cross-encoder, which is an ordinary classifier.

    Raises ModelError in words.
    """
    listing = _read(model, "modules.json")
    if listing is None or (_read(model, "config_sentence_transformers.json") or {}).get("model_type") == "CrossEncoder":
        return None
    pooling, steps = None, list[Step]()
    for module in listing:
        kind, path = str(module["type"]).rpartition(".")[2], str(module["path"])
        if kind == "Transformer":
            _require(path == "", model, f"its Transformer module must lie in the folder itself, not in {path!r}")
        elif kind == "Pooling" and pooling is None and not steps:
            pooling = _pooling(model, _read(model, f"{path}/config.json") or {})
        elif kind == "Dense" and pooling is not None:
            steps.append(_dense(model, path))
        elif kind == "Normalize" and pooling is not None:
            steps.append(Normalize())
        else:
            raise ModelError(f"--model {model}: the sentence-transformers module {module['type']!r} is not supported")
    _require(pooling is not None, model, "its modules.json names no Pooling module")
    limit = (_read(model, "sentence_bert_config.json") or {}).get("max_seq_length")
    return SentenceModules(pooling or "", tuple(steps), limit)


def _pooling(model: str, config: Mapping[str, Any]) -> str:
    """Older files have a flag per mode, newer ones name it."""
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [key for key, value in config.items() if _is_mode(key) and value]
    known = [_MODES.get(mode, _MODES.get(f"pooling_mode_{mode}", mode)) for mode in modes]
    known = ["last" if mode == "lasttoken" else mode for mode in known]
    is_known = len(known) == 1 and known[0] in _MODES.values()
    _require(is_known, model, f"its pooling {', '.join(map(str, modes))} is not one of cls, mean, max, last")
    for key, needed in _HARMLESS.items():
        _require(config.get(key, needed) == needed, model, f"its pooling has {key} {config.get(key)}")
    return str(known[0])


def _is_mode(key: str) -> bool:
    return key.startswith("pooling_mode_")


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
    if folder.is_dir():
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
