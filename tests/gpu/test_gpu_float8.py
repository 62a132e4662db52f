"""FP8 on CUDA: torch's product is the reference's function, a token has the same bits alone, models are served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_serve.model.loading.float8 import multiplies_float8, quantized, reference_product, scaled_product
from tests.float8_packer import save_dequantized, save_float8
from tests.local_engine import LocalEngine
from tests.oracle import load_alone, logprobs_alone, save_adapter, save_tiny_model

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = ((32, 48), (4096, 6144), (14336, 4096))
COUNTS = (1, 2, 7, 16, 64, 65, 300)
FAR, FAR_IN_THE_MEAN = 1.0, 0.15  # as of the CPU's tests, and bfloat16's rounding


@pytest.fixture(autouse=True)
def _only_where_the_gpu_has_it() -> None:
    if not multiplies_float8(CUDA):
        pytest.skip("this GPU has no product of FP8")


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_product_is_the_references_and_a_token_has_the_same_bits_alone(shape: tuple[int, int]) -> None:
    num_inputs, num_outputs = shape
    weight, scale = quantized(torch.randn(num_outputs, num_inputs, device=CUDA))
    x = torch.randn(max(COUNTS), num_inputs, device=CUDA, dtype=torch.bfloat16)
    whole = scaled_product(x, weight, scale)
    expected = reference_product(x, weight, scale)
    assert (whole - expected).norm() < 5e-3 * expected.norm()
    for count in COUNTS:
        assert torch.equal(scaled_product(x[:count], weight, scale), whole[:count]), count


@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": False, "compile_layers": False, "fuse_layers": False}])
def test_model_in_fp8_is_near_peft_over_the_dequantised_one(settings: dict[str, bool], tmp_path: Path) -> None:
    plain = save_tiny_model("llama", tmp_path / "source")
    model = save_float8(plain, tmp_path / "model", dtype=torch.bfloat16)
    adapters = {
        "lora": save_adapter(plain, tmp_path / "lora"),
        "dora": save_adapter(plain, tmp_path / "d", use_dora=True),
    }
    engine = LocalEngine(model, adapters, device="cuda", dtype="bfloat16", kv_cache_memory="8MiB", **settings)
    prompts = {name: [(7 * i + 5 * j) % 90 + 3 for j in range(40)] for i, name in enumerate(adapters)}
    answers = engine.run([engine.request(prompt, name, prompt_logprobs=0) for name, prompt in prompts.items()])
    dequantized = save_dequantized(model, tmp_path / "dequantized")
    for (name, prompt), answer in zip(prompts.items(), answers, strict=True):
        assert answer.error is None
        assert answer.prompt_logprobs is not None
        found = torch.tensor([item.logprob for item in answer.prompt_logprobs if item is not None])
        truth = logprobs_alone(load_alone(dequantized, adapters[name]), prompt)[:-1]
        differences = (found - truth.gather(1, torch.tensor(prompt)[1:, None])[:, 0]).abs()
        assert differences.max() < FAR
        assert differences.mean() < FAR_IN_THE_MEAN
