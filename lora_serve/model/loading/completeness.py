"""Checks that a checkpoint's weights are those that its config.json describes; transformers draws missing ones at
random.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from lora_serve.core.errors import ModelError

MAX_LAYERS = 4096
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def check_num_layers(model: str, hf_config: Any) -> None:
    """Raises ModelError for an impossible number of layers."""
    layers = getattr(hf_config.get_text_config(), "num_hidden_layers", 1)
    if not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        raise ModelError(f"--model {model}: num_hidden_layers of config.json is {layers!r}, not 1 to {MAX_LAYERS}")


def shape_that_differs(model: str, build: Callable[[], nn.Module]) -> str:
    """Names the first weight of a folder whose shape differs from that in the module of `build`; else empty."""
    with torch.device("meta"):
        wanted = {name: list(tensor.shape) for name, tensor in build().state_dict().items()}
    for file in sorted(Path(model).glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                shape = list(stored.get_slice(name).get_shape())
                if wanted.get(name, shape) != shape:
                    return f"{name} is {shape} in the weights and {wanted[name]} by config.json"
    return ""


def check_no_more_layers(model: str, module: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raises ModelError for weights named like the model's, with a layer number that the model does not have."""
    kinds = {_NUMBER.sub("#", name) for name in module.state_dict()}
    numbered = [name for name in info["unexpected_keys"] if _NUMBER.search(name)]
    beyond = sorted(name for name in numbered if _NUMBER.sub("#", name) in kinds)
    if beyond:
        raise ModelError(
            f"--model {model}: config.json does not fit the weights: they hold {beyond[0]}{_others(beyond)}, which is "
            "more than config.json speaks of (num_hidden_layers?)"
        )


def check_nothing_missing(model: str, missing: Iterable[str]) -> None:
    """Raises ModelError for weights that the checkpoint lacks."""
    lacking = sorted(missing)
    if lacking:
        raise ModelError(
            f"--model {model}: config.json does not fit the weights: they lack {lacking[0]}{_others(lacking)}"
        )


def _others(names: list[Any]) -> str:
    return f" (and {len(names) - 1} others)" if len(names) > 1 else ""
