from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest

from lora_serve.adapters.checkpoint.methods import vera
from lora_serve.adapters.checkpoint.saved import projection
from tests.adapters.checkpoint.methods.peft_oracle import (
    assert_same_deltas,
    assert_same_logits,
    converted,
    gpt2,
    llama,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")

PLAN = vera.VeraPlan(vera.VeraConfig(r=4, projection_prng_key=0, save_projection=True), in_features=40, out_features=24)
SHAPES = {"vera_lambda_b": (12,), "vera_lambda_d": (4,), "vera_A": (4, 40), "vera_B": (24, 4)}


@pytest.mark.parametrize("key", [0, 1, 12345, 2**31 + 5, -3])
@pytest.mark.parametrize(("base", "targets"), [(llama, ["k_proj", "down_proj"]), (gpt2, ["c_attn"])])
def test_a_projection_that_was_not_saved_is_drawn_again_bit_for_bit(
    key: int, base: Any, targets: list[str], tmp_path: Path
) -> None:
    config = peft.VeraConfig(
        r=4, projection_prng_key=key, save_projection=False, target_modules=targets, task_type="CAUSAL_LM"
    )
    adapter = trained(config, tmp_path, base)
    assert not any("vera_A" in name for name in adapter.tensors)
    drawn = projection(vera.plan(vera.parse(adapter.config), adapter.linears()))
    layer = next(iter(adapter.layers().values()))
    np.testing.assert_array_equal(drawn["vera_A"], layer.vera_A["default"].numpy())
    np.testing.assert_array_equal(drawn["vera_B"], layer.vera_B["default"].numpy())
    table = converted(vera, adapter, drawn)
    assert_same_deltas(table, adapter)
    assert_same_logits(table, adapter)


def test_the_shared_matrices_belong_to_no_module() -> None:
    for name in ("base_model.vera_A", "base_model.vera_A.default"):
        match = vera.ROLES.match(name)
        assert match is not None
        assert match.groupdict() == {"module": None, "role": "vera_A"}
    assert vera.ROLES.match("base_model.model.model.layers.0.self_attn.q_proj.vera_A") is None


def test_a_smaller_layer_takes_its_part_of_the_shared_matrices() -> None:
    assert vera.bind(PLAN, "m", SHAPES, 24, 12) == 4


@pytest.mark.parametrize("role", SHAPES)
def test_a_missing_or_misshapen_tensor_is_named(role: str) -> None:
    missing = {other: shape for other, shape in SHAPES.items() if other != role}
    assert vera.bind(PLAN, "m", missing, 24, 12) == [f"{role} of m is missing"]
    reasons = vera.bind(PLAN, "m", SHAPES | {role: (5, 5)}, 24, 12)
    assert isinstance(reasons, list)
    assert [reason.split()[0] for reason in reasons] == [role]


def test_saved_matrices_that_the_config_says_are_not_saved_are_refused() -> None:
    plan = vera.VeraPlan(vera.VeraConfig(4, 0, save_projection=False), in_features=40, out_features=24)
    reasons = vera.bind(plan, "m", SHAPES, 24, 12)
    assert isinstance(reasons, list)
    assert "save_projection is false" in reasons[0]
