"""Experts, latent attention and layers in one call: what is fused of their forms, what is left, and the bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.mixtral import modeling_mixtral

from lora_serve.model.experts import is_experts
from lora_serve.model.fusion.kinds import experts
from lora_serve.model.fusion.kinds.decoder_layer import FusedDecoderLayer
from lora_serve.model.fusion.kinds.latent_layer import NativeLatentAttention
from tests.local_engine import LocalEngine
from tests.model.fusion.test_fuse import (
    DTYPES,
    FUSED,
    LIMITS,
    OWN_SHAPES,
    SHAPE,
    assert_is_plain_transformers,
    fused_kinds,
    run,
)
from tests.oracle import save_adapter, save_tiny_model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("architecture", "kind"), [("qwen3", FusedDecoderLayer), ("deepseek_v3", NativeLatentAttention)]
)
def test_layer_in_one_call_gives_the_bits_of_its_parts(
    architecture: str, kind: type[Any], dtype: str, tmp_path: Path
) -> None:
    """A step whose adapters change a norm runs by parts: its other rows must not see it."""
    model = save_tiny_model(architecture, tmp_path / "model", **OWN_SHAPES.get(architecture, SHAPE))
    targets = {"target_modules": r".*self_attn.*proj.*"}
    folders = {name: save_adapter(model, tmp_path / name, seed=i, **targets) for i, name in enumerate("ab")}
    whole, parts = (LocalEngine(model, folders, max_loras=2, dtype=dtype, **LIMITS) for _ in range(2))
    in_one = [m for m in parts.parts.runner._model.module.modules() if isinstance(vars(m).get("forward"), kind)]
    assert len(in_one) == 2
    for module in in_one:
        module.forward = vars(module)["forward"].by_parts
    names = [None, "a", "b", None]
    assert [a.logprobs for a in run(whole, names)] == [a.logprobs for a in run(parts, names)]


@pytest.mark.parametrize("own", [{"q_lora_rank": None}, {"rope_interleave": False}, {"v_head_dim": 24}])
def test_latent_attention_in_its_other_forms_is_fused(own: dict[str, Any], tmp_path: Path) -> None:
    model = save_tiny_model("deepseek_v3", tmp_path / "model", **{**OWN_SHAPES["deepseek_v3"], **own})
    engine = LocalEngine(model, **LIMITS)
    assert fused_kinds(engine)["Attention"] == 2
    assert_is_plain_transformers(model, run(engine, [None] * 4))


def _gate_of_halves_exchanged(self: Any, both: torch.Tensor) -> torch.Tensor:
    up, gate = both.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def _gate_with_a_limit(self: Any, both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return self.act_fn(gate.clamp(max=1e3)) * up


@pytest.mark.parametrize("gate", [_gate_of_halves_exchanged, _gate_with_a_limit])
def test_experts_of_another_gate_are_left_as_they_are(
    gate: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_mixtral.MixtralExperts, "_apply_gate", gate)
    engine = LocalEngine(save_tiny_model("mixtral", tmp_path / "model", **SHAPE), **LIMITS)
    assert fused_kinds(engine) == {k: n for k, n in FUSED["mixtral"].items() if k != "Experts"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_a_wrong_gate_are_not_taken(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_computes", lambda module, gate, kernels: gate.activation == "gelu_tanh")
    engine = LocalEngine(save_tiny_model("mixtral", tmp_path / "model", **SHAPE), dtype=dtype, **LIMITS)
    assert fused_kinds(engine) == {k: n for k, n in FUSED["mixtral"].items() if k != "Experts"}


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_experts_are_held_once(dtype: str, tmp_path: Path) -> None:
    engine = LocalEngine(save_tiny_model("mixtral", tmp_path / "model", **SHAPE), dtype=dtype, **LIMITS)
    parts = [part for part in engine.parts.runner._model.module.modules() if is_experts(part)]
    assert len(parts) == 2
    for part in parts:
        assert not list(part.parameters())
        assert part.gate_up_proj.dense().shape == part.gate_up_proj.shape
