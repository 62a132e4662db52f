"""In fused layers a row's numbers are the same bits alone, beside fifteen others, and however its prompt is cut: in
float32 and in bfloat16, and on processors with fewer instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.core.request import InferenceRequest
from tests.local_engine import Answer, LocalEngine
from tests.model.fusion.test_fuse import OWN_SHAPES
from tests.oracle import round_adapter, save_adapter, save_tiny_model
from tests.tiers import mostly_nightly

LENGTHS = (45, 3, 70, 1, 33, 12, 64, 2, 40, 5, 26, 130, 7, 18, 31, 9)
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
# A float32 weight that is embedding and output head in one is left to torch's own product, whose bits depend on rows.
SHAPE["tie_word_embeddings"] = False
# Widths at which torch's own activations see a row's numbers as whole vectors; see docs/decisions/row-alone.md.
WIDTHS = {"deepseek_v3": {"n_routed_experts": 32}, "gemma4_text": {"hidden_size_per_layer_input": 32}}
NAMES: tuple[str | dict[str, float] | None, ...] = (None, "a", "b", {"b": 2.0, "c": 0.5})
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "stablelm", "qwen3_moe", "gpt_oss", "deepseek_v3", "gemma4_text")


# By day the plainest, and one of windows, soft caps and norms around each block.
@pytest.fixture(scope="module", params=mostly_nightly(FAMILIES, "llama", "gemma2"))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    root = tmp_path_factory.mktemp(request.param)
    own = {**OWN_SHAPES.get(request.param, {}), **SHAPE, **WIDTHS.get(request.param, {})}
    model = save_tiny_model(request.param, root / "model", **own)
    # PEFT finds DeepSeek's experts by the names of its dense layers; deltas of experts cannot be composed.
    targets = {"target_modules": r".*self_attn.*proj.*"} if request.param == "deepseek_v3" else {}
    return model, save_adapters(model, root, **targets)


def save_adapters(model: Path, root: Path, **settings: Any) -> dict[str, Path]:
    """One in float32, and two in bfloat16; layers that share their inputs have scales of their own."""
    alphas = {"k_proj": 3, "up_proj": 20}
    folders = {
        name: save_adapter(model, root / name, seed=i, r=3 + 15 * i, alpha_pattern=alphas, **settings)
        for i, name in enumerate("abc")
    }
    for name in "bc":
        round_adapter(folders[name])
    return folders


def engine_of(folders: tuple[Path, dict[str, Path]], budget: int, dtype: str, stored: str = "auto") -> LocalEngine:
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": 16, "block_size": 4, "kv_cache_memory": "4MiB"}
    return LocalEngine(*folders, max_loras=4, enable_prefix_caching=False, dtype=dtype, kv_cache_dtype=stored, **limits)


def requests(engine: LocalEngine) -> list[InferenceRequest]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in LENGTHS]
    sampling = {"max_tokens": 6, "logprobs": 2, "prompt_logprobs": 1, "ignore_eos": True}
    return [engine.request(prompt, NAMES[i % 4], **sampling) for i, prompt in enumerate(prompts)]


def numbers(answer: Answer) -> tuple[object, ...]:
    """Everything that was computed of a row, not rounded."""
    assert answer.error is None
    return answer.token_ids, answer.logprobs, answer.prompt_logprobs


def assert_rows_are_alone(
    folders: tuple[Path, dict[str, Path]], dtype: str, budgets: Sequence[int], stored: str = "auto"
) -> None:
    alone = engine_of(folders, 512, dtype, stored)
    wanted = [numbers(alone.run([request])[0]) for request in requests(alone)]
    for budget in budgets:
        together = engine_of(folders, budget, dtype, stored)
        found = [numbers(answer) for answer in together.run(requests(together))]
        assert together.max_adapters_in_batch == 3
        assert found == wanted


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_of_a_row_are_the_same_bits_alone_and_in_any_batch_and_chunks(
    folders: tuple[Path, dict[str, Path]], dtype: str
) -> None:
    assert_rows_are_alone(folders, dtype, (512, 64, 23, 16))


@pytest.mark.parametrize(("dtype", "stored"), [("float32", "int8"), ("bfloat16", "fp8_e4m3")])
def test_numbers_of_a_row_are_the_same_bits_where_the_cache_has_one_byte_a_number(
    folders: tuple[Path, dict[str, Path]], dtype: str, stored: str
) -> None:
    assert_rows_are_alone(folders, dtype, (64, 16), stored)
