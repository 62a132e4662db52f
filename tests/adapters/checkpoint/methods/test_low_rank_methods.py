"""Every low-rank method against PEFT: the delta of each module, and the logits of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from lora_serve.adapters.checkpoint.methods import METHODS
from tests.adapters.checkpoint.methods.peft_oracle import (
    assert_same_deltas,
    assert_same_logits,
    converted,
    gpt2,
    llama,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")

EVERY = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
PATTERNS = {
    "rank_pattern": {r"^model\.layers\.0\.self_attn\.k_proj": 5, "layers.1.*": 3, "q_proj": 1},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 3, "self_attn.*": 20},
}
CASES: dict[str, tuple[type[peft.PeftConfig], dict[str, Any], Any]] = {
    "loha": (peft.LoHaConfig, {"r": 3, "alpha": 5, "target_modules": EVERY}, llama),
    "loha of full rank": (peft.LoHaConfig, {"r": 6, "alpha": 5, "target_modules": EVERY}, llama),
    "loha with patterns": (peft.LoHaConfig, {"r": 2, "alpha": 7, "target_modules": EVERY} | PATTERNS, llama),
    "loha on all linear layers": (
        peft.LoHaConfig,
        {"r": 2, "rank_dropout": 0.1, "target_modules": "all-linear"},
        llama,
    ),
    "loha with effective convolutions": (
        peft.LoHaConfig,
        {"r": 2, "use_effective_conv2d": True, "target_modules": EVERY},
        llama,
    ),
    "lokr": (peft.LoKrConfig, {"r": 1, "alpha": 5, "target_modules": EVERY}, llama),
    "lokr of two whole matrices": (peft.LoKrConfig, {"r": 8, "alpha": 5, "target_modules": EVERY}, llama),
    "lokr decomposed twice": (peft.LoKrConfig, {"r": 1, "decompose_both": True, "target_modules": EVERY}, llama),
    "lokr of factor 4": (peft.LoKrConfig, {"r": 2, "decompose_factor": 4, "target_modules": EVERY}, llama),
    "lokr of factor 4 decomposed twice": (
        peft.LoKrConfig,
        {"r": 1, "decompose_factor": 4, "decompose_both": True, "target_modules": EVERY},
        llama,
    ),
    "lokr with a rank above a side": (
        peft.LoKrConfig,
        {"r": 10, "rank_dropout_scale": True, "target_modules": [*EVERY, "lm_head"]},
        llama,
    ),
    "lokr with patterns": (
        peft.LoKrConfig,
        {"r": 2, "alpha": 7, "decompose_both": True, "target_modules": EVERY} | PATTERNS,
        llama,
    ),
    "vera": (peft.VeraConfig, {"r": 6, "target_modules": EVERY}, llama),
    "vera of one shape": (peft.VeraConfig, {"r": 5, "d_initial": 0.7, "target_modules": ["k_proj", "v_proj"]}, llama),
    "vera on Conv1D": (peft.VeraConfig, {"r": 4, "target_modules": ["c_attn", "c_proj"]}, gpt2),
    "vera with another key": (
        peft.VeraConfig,
        {"r": 4, "projection_prng_key": 7, "target_modules": "all-linear"},
        llama,
    ),
    "adalora": (peft.AdaLoraConfig, {"total_step": 9, "lora_alpha": 5, "target_modules": EVERY}, llama),
    "adalora of another start rank": (
        peft.AdaLoraConfig,
        {"total_step": 9, "init_r": 3, "target_modules": EVERY, "use_rslora": True, "alpha_pattern": {"q_proj": 99}},
        llama,
    ),
    "adalora without alpha": (
        peft.AdaLoraConfig,
        {"total_step": 9, "init_r": 3, "lora_alpha": 0, "target_modules": EVERY},
        llama,
    ),
    "adalora on Conv1D": (peft.AdaLoraConfig, {"total_step": 9, "target_modules": ["c_attn", "c_fc"]}, gpt2),
}


@pytest.mark.parametrize(("config", "settings", "base"), CASES.values(), ids=CASES.keys())
def test_factors_and_logits_are_pefts(
    config: type[peft.PeftConfig], settings: dict[str, Any], base: Any, tmp_path: Path
) -> None:
    adapter = trained(config(task_type="CAUSAL_LM", **settings), tmp_path, base)
    table = converted(METHODS[adapter.config["peft_type"]], adapter)
    assert table.keys() == adapter.layers().keys()
    assert_same_deltas(table, adapter)
    assert_same_logits(table, adapter)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["loha", "lokr decomposed twice", "vera", "adalora"])
def test_half_precision_files_are_converted_without_a_further_loss(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config, settings, base = CASES[name]
    adapter = trained(config(task_type="CAUSAL_LM", **settings), tmp_path, base, dtype)
    assert {tensor.dtype for tensor in adapter.tensors.values()} == {dtype}
    assert_same_deltas(converted(METHODS[adapter.config["peft_type"]], adapter), adapter)
