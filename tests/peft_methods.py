"""Every method that PEFT registers, and settings with which LoRA trains in another way, made by PEFT for one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.config import MontecloraConfig

from tests.kind_matrix import LIMITS, NUM_BLOCKS, block_bytes, judge
from tests.local_engine import LocalEngine, refusal
from tests.oracle import load_fresh, peft_may_warn, save_tiny_model

_LAYERS = {"target_modules": ["q_proj", "v_proj"]}
_TOKENS = {"num_virtual_tokens": 4}
_TRIED: Sequence[Mapping[str, Any]] = (  # settings, of which a method gets the first that it can be made with
    _LAYERS, {**_LAYERS, "r": 4}, _TOKENS, {}, {**_LAYERS, "total_step": 10}, {**_LAYERS, "block_size": 8},
    {**_LAYERS, "n_frequency": 10}, {**_LAYERS, "vector_length": 4, "num_vectors": 8, "topk": 2},
    {"adapter_layers": 1, "adapter_len": 4}, {**_LAYERS, "variant": "road_1", "group_size": 16},
)  # fmt: skip
_IA3: Mapping[str, Any] = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
_IN_LORA: Mapping[str, Mapping[str, Any]] = {
    "VeLoRA (`velora_config`)": {"velora_config": peft.VeloraConfig(num_groups=4)},
    "MonteCLoRA (`monteclora_config`)": {"monteclora_config": MontecloraConfig()},
    'MiCA (`init_lora_weights="mica"`)': {"init_lora_weights": "mica"},
    "`trainable_token_indices` of embedding and output head": {
        "trainable_token_indices": {"embed_tokens": [5, 9, 33], "lm_head": [40, 7]}
    },
    "block-diagonal LoRA (`use_bdlora`)": {"use_bdlora": peft.BdLoraConfig(nblocks=2)},
    "`layer_replication`": {"layer_replication": [[0, 2], [0, 2]]},
}


def method_names() -> list[str]:
    """LoRA in other ways, then the methods by their names in a config."""
    return [*_IN_LORA, *sorted(str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING)]


def method_verdicts(folder: Path) -> dict[str, str]:
    """By method: "exact", "refused: why", "not applicable: why" or "WRONG: where"."""
    model, found, folders = save_tiny_model("llama", folder / "model"), dict[str, str](), dict[str, Path]()
    limits = {**LIMITS, "kv_cache_memory": str(NUM_BLOCKS * block_bytes(load_fresh(model)))}
    doorman = LocalEngine(model, {}, max_loras=1, **limits)
    for name in method_names():
        place = folder / str(len(found) + len(folders))
        if (problem := _save(name, model, place)) is not None:
            found[name] = f"not applicable: PEFT itself cannot make it for this model ({problem})"
        elif (reason := refusal(doorman, place)) is not None:
            found[name] = f"refused: {reason}"
        else:
            folders[name] = place
    found |= judge(model, folders, limits)
    return {name: found[name] for name in method_names()}


def _save(name: str, model: Path, folder: Path) -> str | None:
    """Trains the method at random and saves it; returns PEFT's error if it cannot be made."""
    torch.manual_seed(len(name))
    problem = ""
    for config in _configs(name):
        try:
            with peft_may_warn():
                made: Any = peft.get_peft_model(load_fresh(model), config())
                for parameter in made.parameters():
                    if parameter.requires_grad and parameter.is_floating_point():
                        parameter.data += torch.randn(parameter.shape) * 0.15
                made.save_pretrained(folder)
        except Exception as error:  # PEFT raises many kinds
            problem = problem or f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        else:
            return None
    return problem


def _configs(name: str) -> list[Any]:
    if name in _IN_LORA:
        return [lambda: peft.LoraConfig(r=4, task_type="CAUSAL_LM", **_LAYERS, **_IN_LORA[name])]
    made = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(name)]
    tried = (_IA3,) if name == "IA3" else _TRIED
    return [partial(made, task_type="CAUSAL_LM", **settings) for settings in tried]
