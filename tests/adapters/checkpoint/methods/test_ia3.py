from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest

from lora_serve.adapters.checkpoint.methods import GAIN_METHODS, ia3
from tests.adapters.checkpoint.methods.peft_oracle import Adapter, assert_same_logits, by_module, gpt2, llama, trained

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")

CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "attention and feed-forward": ({"target_modules": ["k_proj", "v_proj", "down_proj"]}, llama),
    "no feed-forward": ({"target_modules": ["k_proj", "down_proj"], "feedforward_modules": []}, llama),
    "an ending without a dot": ({"target_modules": r".*(up|down)_proj", "feedforward_modules": ["wn_proj"]}, llama),
    "regex": ({"target_modules": r".*\.(k|up)_proj", "feedforward_modules": r".*\.0\.mlp\..*"}, llama),
    "regex for part of a path": ({"target_modules": r".*\.(k|up)_proj", "feedforward_modules": r"mlp\..*"}, llama),
    "Conv1D with biases": ({"target_modules": ["c_attn", "mlp.c_proj"], "feedforward_modules": ["mlp.c_proj"]}, gpt2),
}


def gains(adapter: Adapter) -> dict[str, ia3.Gains]:
    method, linears, table = GAIN_METHODS["IA3"], adapter.linears(), {}
    plan = method.plan(method.parse(adapter.config), linears)
    for module, roles in by_module(method, adapter).items():
        shapes = {role: array.shape for role, array in roles.items()}
        assert method.bind(plan, module, shapes, linears[module].in_features, linears[module].out_features) == 0
        table[module] = method.gains(plan, module, roles)
    return table


@pytest.mark.parametrize(("settings", "base"), CASES.values(), ids=CASES.keys())
def test_gains_give_pefts_logits(settings: dict[str, Any], base: Any, tmp_path: Path) -> None:
    settings = {"feedforward_modules": ["down_proj"]} | settings
    adapter = trained(peft.IA3Config(task_type="CAUSAL_LM", **settings), tmp_path, base)
    table = gains(adapter)
    assert table.keys() == adapter.layers().keys()
    assert {module for module, gain in table.items() if gain.input is not None} == {
        module for module, layer in adapter.layers().items() if layer.is_feedforward
    }
    assert_same_logits(table, adapter)


@pytest.mark.parametrize(("module", "asked"), [("down_proj", [1, 40]), ("k_proj", [12, 1])])
def test_a_gain_on_the_wrong_side_does_not_fit(module: str, asked: list[int]) -> None:
    plan = frozenset(["down_proj"])
    reasons = ia3.bind(plan, module, {"ia3_l": (*reversed(asked),)}, 40, 12)
    assert reasons == [
        f"ia3_l of {module} has shape {asked[::-1]}, but the config and the base model's layer ask for {asked}"
    ]
