"""Mixtures of experts on CUDA: products grouped by expert, and adapters of experts, in captured steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_serve.model.expert_products import OPERATORS
from tests.local_engine import LocalEngine
from tests.oracle import save_adapter, save_tiny_model

pytestmark = pytest.mark.gpu
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("num_tokens", [1, 16, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_products_are_the_formula_and_a_tokens_own(dtype: torch.dtype, num_tokens: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(num_tokens, 256).cuda().to(dtype), (torch.randn(32, 200, 256) / 16).cuda().to(dtype)
    experts = torch.rand(num_tokens, 32).topk(4).indices.cuda()

    def products(x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = OPERATORS.multiply_pairs(x, weight, *OPERATORS.sort_pairs(experts.flatten(), 32), 4)
        return found.view(len(x), 4, 200)

    found = products(x, experts)
    wanted = torch.einsum("tkoi,ti->tko", weight.double()[experts], x.double())
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert torch.allclose(found.double(), wanted, atol=tolerance, rtol=tolerance)
    for token in {0, num_tokens // 2, num_tokens - 1}:
        assert torch.equal(products(x[token : token + 1], experts[token : token + 1])[0], found[token])


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_steps_with_experts_are_captured_and_say_what_the_cpu_says(architecture: str, tmp_path: Path) -> None:
    model = save_tiny_model(architecture, tmp_path / "model")
    adapters = {n: save_adapter(model, tmp_path / n, seed=i, target_parameters=EXPERTS) for i, n in enumerate("ab")}
    found = []
    for device in ("cuda", "cpu"):
        engine = LocalEngine(model, adapters, device=device, dtype="float32", kv_cache_memory="4MiB", swap_space="1MiB")
        requests = [engine.request([5 + i, 6, 7], name, max_tokens=6) for i, name in enumerate(("a", None, "b", "a"))]
        found.append([(answer.token_ids, answer.error) for answer in engine.run(requests)])
        graphs = engine.parts.runner._graphs  # type: ignore[union-attr]
        assert graphs is None or (graphs._captured and not graphs._failed)
    assert found[0] == found[1]
