"""In bfloat16 the start tells roundings, which send tokens to other experts, from models that compute otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama4 import modeling_llama4

from lora_serve.core.errors import ModelError
from lora_serve.model import build as building
from lora_serve.model import exactness
from lora_serve.model.base_model import BaseModel
from tests.local_engine import LocalEngine
from tests.models_table import build_tiny
from tests.oracle import save_tiny_model

LIMITS = {"block_size": 4, "kv_cache_memory": "1MiB"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Here its log-probabilities differ by 0.66, as one token is sent to the other group of experts."""
    return save_tiny_model("deepseek_v3", tmp_path_factory.mktemp("choices") / "model")


def refusal(model: Path, dtype: str = "bfloat16") -> str | None:
    try:
        LocalEngine(model, dtype=dtype, **LIMITS)
    except ModelError as error:
        return str(error)
    return None


def test_roundings_that_change_experts_of_a_token_are_no_reason_to_refuse(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(model) is None
    route = modeling_deepseek_v3.DeepseekV3TopkRouter.forward

    def route_one_elsewhere(self: Any, hidden_states: torch.Tensor) -> Any:
        logits, weights, experts = route(self, hidden_states)
        if experts.shape[0] == sum(lengths[1] for lengths in exactness.SHORT):  # the second step of the probe
            experts[0] = (experts[0] + 1) % self.num_experts
        return logits, weights, experts

    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3TopkRouter, "forward", route_one_elsewhere)
    assert refusal(model) is None
    monkeypatch.setattr(building.ExpertChoices, "are_known", False)
    assert "differ by" in (refusal(model) or "")


def test_attention_that_differs_is_refused_at_the_models_own_experts_too(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = BaseModel._attend_rows

    def attend_sharper(self: BaseModel, layer: int, *tensors: Any) -> torch.Tensor:
        *others, settings = tensors
        return attend(self, layer, *others, replace(settings, scale=settings.scale * 20))

    monkeypatch.setattr(BaseModel, "_attend_rows", attend_sharper)
    assert "differ by" in (refusal(model) or "")


def test_routers_that_choose_otherwise_in_packed_rows_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their weights stay right: given the right experts, nothing else would tell."""
    route = modeling_deepseek_v3.DeepseekV3TopkRouter.forward

    def route_packed(self: Any, hidden_states: torch.Tensor) -> Any:
        logits, weights, experts = route(self, hidden_states)
        is_packed = hidden_states.shape[0] == 1
        return logits, weights, (experts + 1) % self.num_experts if is_packed else experts

    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3TopkRouter, "forward", route_packed)
    assert "routers choose other experts" in (refusal(model) or "")
    assert "differ by" in (refusal(model, "float32") or "")


@pytest.mark.parametrize("wrong", [False, True])
def test_scores_of_a_router_that_names_no_experts_are_given_too(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4: some tokens of this model go to other experts by a rounding; `wrong`: each packed one does."""
    build_tiny("llama4").save_pretrained(tmp_path / "model")
    route, probe = modeling_llama4.Llama4Router.forward, exactness.probe_tokens(128)

    def route_packed(self: Any, hidden_states: torch.Tensor) -> Any:
        scores, logits = route(self, hidden_states)
        is_packed = len(hidden_states) != len(probe) * max(map(len, probe))
        return scores.roll(1, -1) if wrong and is_packed else scores, logits

    monkeypatch.setattr(modeling_llama4.Llama4Router, "forward", route_packed)
    found = refusal(tmp_path / "model") or ""
    assert ("routers choose other experts" in found) == wrong, found
