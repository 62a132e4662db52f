"""K and V of one byte a number: what is stored, and its bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_serve.model.kv_cache import KVShape
from lora_serve.model.kv_format import FORMATS, PLAIN, KVFormat
from tests.local_engine import LocalEngine
from tests.oracle import save_tiny_model

CODED: list[KVFormat] = [form for form in FORMATS.values() if form is not PLAIN]


def rows_of(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[30, 2, size]: of all magnitudes, with zeros, some of them nothing else."""
    torch.manual_seed(0)
    numbers = torch.randn(30, 2, size) * torch.logspace(-20, 20, 30)[:, None, None]
    numbers *= torch.logspace(-5, 0, size)
    numbers[3], numbers[4, :, 0] = 0, 0
    return numbers.to(dtype)


@pytest.mark.parametrize("form", CODED, ids=lambda form: form.name)
@pytest.mark.parametrize("size", [7, 64])
def test_a_number_is_off_by_half_a_step_at_most(form: KVFormat, size: int) -> None:
    numbers = rows_of(size)
    found = form.decode(form.encode(numbers, torch.float32), size, torch.float32)
    largest = numbers.abs().amax(-1, keepdim=True)
    step = largest / 127 if form.name == "int8" else (numbers.abs() / 8).maximum(largest / 448 / 64)
    assert ((found - numbers).abs() <= 0.501 * step).all()
    assert torch.equal(found[3], numbers[3])


@pytest.mark.parametrize("form", CODED, ids=lambda form: form.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_with_what_is_no_number_is_none_at_all(form: KVFormat, bad: float) -> None:
    numbers = rows_of(16)
    numbers[5, 1, 9] = bad
    found = form.decode(form.encode(numbers, torch.float32), 16, torch.float32)
    assert found[5, 1].isnan().all()
    assert found[:5].isfinite().all()


def test_blocks_have_their_true_bytes() -> None:
    plain = KVShape.alike(3, 2, 64, torch.bfloat16)
    assert plain.block_bytes(16) == 2 * 16 * 3 * 2 * 64 * 2
    for form in CODED:
        assert replace(plain, form=form).block_bytes(16) == 2 * 16 * 3 * 2 * 68


@pytest.mark.parametrize("form", CODED, ids=lambda form: form.name)
def test_answers_are_the_same_bits_with_drafts_and_from_known_blocks(form: KVFormat, tmp_path: Path) -> None:
    model, found = save_tiny_model("llama", tmp_path), []
    for mode in ("auto", "off"):
        limits = {"block_size": 4, "kv_cache_memory": "1MiB", "kv_cache_dtype": form.name, "speculate": mode}
        engine = LocalEngine(model, **limits)
        for num_cached in (0, 20):
            request = engine.request([5, 6, 7, 8] * 6, max_tokens=24, ignore_eos=True, logprobs=0)
            (answer,) = engine.run([request])
            assert answer.num_cached_tokens == num_cached
            found.append((answer.token_ids, answer.logprobs))
        assert (engine.engine.stats().speculation.num_accepted > 0) == (mode == "auto")
    assert found == found[:1] * 4
