"""Models some of whose layers have a window: long rows hold that many of its blocks, and answer as live PEFT does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.model import base_model
from tests.kind_matrix import Found, mismatches
from tests.local_engine import Answer, LocalEngine
from tests.models_table import build_tiny, save_all_linear
from tests.oracle import logprobs_alone
from tests.tiers import mostly_nightly

WINDOW = 32  # of the tiny models
LONGEST = 192  # tokens: six windows
LIMITS: dict[str, Any] = {
    "block_size": 4, "max_model_len": LONGEST, "max_num_seqs": 6, "max_num_batched_tokens": 32, "max_loras": 2,
    "speculate": "off",
}  # fmt: skip
LEAST = WINDOW // 4 + 3 + 32 // 4  # blocks of its window, with which a row runs alone
BACKENDS = {"gemma3_text": "native", "gpt_oss": "native", "cohere2": "sdpa", "llama4_text": "native"}


def windowed_part(model: Any) -> tuple[int, int]:
    """The numbers of layers that see all tokens, and that have a window."""
    windows = base_model.observe(model, torch.device("cpu")).windows
    return windows.count(None), windows.count(WINDOW)


def layer_bytes(model: Any) -> int:
    """Bytes of a block in one layer."""
    shape = base_model.observe(model, torch.device("cpu")).kv_shape
    return shape.block_bytes(4) // len(shape.layers)


def wrong(live: dict[str | None, Any], rows: list[tuple[list[int], str | None]], answers: list[Answer]) -> list[str]:
    found = []
    for (prompt, name), answer in zip(rows, answers, strict=True):
        assert answer.error is None
        truth = logprobs_alone(live[name], prompt, answer.token_ids)[len(prompt) - 1 : -1]
        logprobs = [item.logprob for item in answer.logprobs if item is not None]
        found += mismatches(Found(answer.token_ids, logprobs), truth)
    return found


@pytest.mark.parametrize(
    ("architecture", "num_blocks", "num_windowed"),
    mostly_nightly(
        [(name, *counts) for name in BACKENDS for counts in ((LONGEST // 4 + 14, LEAST + 1), (70, 60))],
        ("gemma3_text", LONGEST // 4 + 14, LEAST + 1), ("llama4_text", 70, 60),
    ),
)  # fmt: skip
def test_long_rows_of_several_windows_are_those_of_live_peft(
    architecture: str, num_blocks: int, num_windowed: int, tmp_path: Path
) -> None:
    """Rows of up to 140 tokens in chunks of 32 at most, in pools that hold one of full length and few windows, or in
    larger ones: preempted, and again with prompts that are known.
    """
    model = build_tiny(architecture)
    model.save_pretrained(tmp_path / "model")
    live = {None: model} | {
        name: save_all_linear(copy.deepcopy(model), tmp_path / name, i) for i, name in enumerate("ab")
    }
    seeing_all, windowed = windowed_part(model)
    size = (seeing_all * num_blocks + windowed * num_windowed) * layer_bytes(model)
    folders = {name: tmp_path / name for name in "ab"}
    engine = LocalEngine(
        tmp_path / "model", folders, attention=BACKENDS[architecture], kv_cache_memory=str(size), **LIMITS
    )
    pool = [kind.num_blocks for kind in engine.engine.scheduler._blocks.kinds]
    assert pool[0] >= LONGEST // 4
    assert pool[0] * seeing_all + pool[1] * windowed <= seeing_all * num_blocks + windowed * num_windowed
    common = [(7 * j) % 70 + 20 for j in range(80)]
    rows = [(common[: 80 - 12 * (i % 3)] + [20 + i] * (5 + i), (None, "a", "b")[i // 2]) for i in range(6)]
    for turn in range(2):
        sampling = {"max_tokens": 50, "ignore_eos": True, "logprobs": 0}
        answers = engine.run([engine.request(prompt, name, **sampling) for prompt, name in rows])
        assert wrong(live, rows, answers) == []
        assert engine.engine.stats().num_preemptions > 0
        found = [answer.num_cached_tokens for answer in answers]
        assert turn == 0 or any(found)
    stats = engine.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_prompt_is_found_beyond_its_window(tmp_path: Path) -> None:
    model = build_tiny("gpt_oss")
    model.save_pretrained(tmp_path)
    engine = LocalEngine(tmp_path, **LIMITS)
    prompt = [(7 * j) % 70 + 20 for j in range(120)]
    for expected in (0, 116):
        (answer,) = engine.run([engine.request(prompt, max_tokens=40, ignore_eos=True, logprobs=0)])
        assert answer.num_cached_tokens == expected
        assert wrong({None: model}, [(prompt, None)], [answer]) == []


def test_pool_that_today_holds_no_row_of_full_length_holds_many_and_less_is_refused_in_words(tmp_path: Path) -> None:
    """Five of Gemma 3's six layers have a window."""
    model = build_tiny("gemma3_text")
    model.save_pretrained(tmp_path)
    least = (LONGEST // 4 + 5 * LEAST) * layer_bytes(model)
    assert least < 0.5 * LONGEST // 4 * 6 * layer_bytes(model)
    engine = LocalEngine(tmp_path, kv_cache_memory=str(least), **LIMITS)
    assert [kind.num_blocks for kind in engine.engine.scheduler._blocks.kinds] == [LONGEST // 4, LEAST]
    assert engine.parts.memory.kv_bytes == least
    (answer,) = engine.run([engine.request([25] * 150, max_tokens=42, ignore_eos=True, logprobs=0)])
    assert wrong({None: model}, [([25] * 150, None)], [answer]) == []
    with pytest.raises(ConfigError, match=f"give at least {least} bytes"):
        LocalEngine(tmp_path, kv_cache_memory=str(least - 1), **LIMITS)


def test_window_as_long_as_any_sequence_makes_no_second_kind(tmp_path: Path) -> None:
    model = build_tiny("gpt_oss")
    model.save_pretrained(tmp_path)
    assert LocalEngine(tmp_path, **{**LIMITS, "max_model_len": WINDOW}).parts.spec.windows == (None,)
    assert LocalEngine(tmp_path, **{**LIMITS, "max_model_len": WINDOW + 1}).parts.spec.windows == (None, WINDOW)


def test_window_of_some_layers_that_is_taken_for_a_narrower_one_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = base_model._kinds
    monkeypatch.setattr(base_model, "_kinds", lambda *given: ((None, 5), kinds(*given)[1]))
    build_tiny("gpt_oss").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"differ by"):
        LocalEngine(tmp_path, **LIMITS)
