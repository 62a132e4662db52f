"""Adapters of every dtype on a base of every dtype: as near to the exact answer as PEFT, or nearer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.local_engine import LocalEngine
from tests.oracle import load_plain, peft_may_warn, save_tiny_model
from tests.peft_kinds import save_kind

KINDS = (
    "plain",
    "bfloat16",
    "float16",
    "dora",
    "save_norms",
    "save_lm_head",
    "embedding",
    "trainable_tokens",
    "rslora",
)
LENGTH = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("dtypes") / "model")


def logprobs_by_peft(model: Path, folder: Path, prompt: list[int], dtype: torch.dtype, *, widened: bool) -> Any:
    """log p of each prompt token but the first. `widened`: the rounded base, computed in float32: the exact answer."""
    import peft

    base = load_plain(model, dtype)
    with peft_may_warn():
        found = peft.PeftModel.from_pretrained(base.float() if widened else base, folder).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        logprobs = found(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    return logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("kernel", ["loop", "native"])
def test_on_a_bfloat16_base_no_answer_is_further_from_the_truth_than_pefts(
    model: Path, tmp_path: Path, kernel: str
) -> None:
    folders = {kind: save_kind(kind, "llama", model, tmp_path / kind) for kind in KINDS}
    engine = LocalEngine(
        model, folders, dtype="bfloat16", block_size=4, max_num_batched_tokens=96, kv_cache_memory="400KiB",
        lora_kernel=kernel,
    )  # fmt: skip
    prompt = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    answers = engine.run([engine.request(prompt, kind, max_tokens=1, prompt_logprobs=0) for kind in KINDS])
    for kind, answer in zip(KINDS, answers, strict=True):
        assert answer.error is None
        assert answer.prompt_logprobs is not None
        found = torch.tensor([item.logprob for item in answer.prompt_logprobs if item is not None])
        truth = logprobs_by_peft(model, folders[kind], prompt, torch.bfloat16, widened=True)
        peft = logprobs_by_peft(model, folders[kind], prompt, torch.bfloat16, widened=False)
        ours, theirs = (found - truth).abs().mean(), (peft - truth).abs().mean()
        assert ours <= 1.5 * theirs, kind
        assert ours < 0.1, kind


@pytest.mark.parametrize("kind", ["plain", "bfloat16", "float16"])
def test_on_a_float32_base_scale_is_not_rounded_into_narrow_weights(model: Path, tmp_path: Path, kind: str) -> None:
    folder = save_kind(kind, "llama", model, tmp_path / kind)
    engine = LocalEngine(model, {kind: folder}, block_size=4, kv_cache_memory="400KiB")
    prompt = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(2)).tolist()
    (answer,) = engine.run([engine.request(prompt, kind, max_tokens=1, prompt_logprobs=0)])
    assert answer.prompt_logprobs is not None
    found = torch.tensor([item.logprob for item in answer.prompt_logprobs if item is not None])
    truth = logprobs_by_peft(model, folder, prompt, torch.float32, widened=False)
    assert (found - truth).abs().max() < 1e-4
