"""Models all of whose layers have a window: long rows hold its blocks alone, and one that is too narrow is seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lora_serve.core.errors import ModelError
from lora_serve.model import base_model
from lora_serve.model.loading.observation import Observation, observe
from tests.kind_matrix import Found, mismatches
from tests.local_engine import LocalEngine
from tests.oracle import load_fresh, load_peft, logprobs_with_peft, save_adapter, save_tiny_model

WINDOWS = {
    "mistral": (6,), "starcoder2": (6,), "mixtral": (6,), "llama": (None,), "gemma2": (None, 6),
    "llama4_text": (None, 6),
}  # fmt: skip


@pytest.mark.parametrize("architecture", WINDOWS)
def test_window_is_the_widest_of_all_layers_and_none_if_one_sees_all(architecture: str, tmp_path: Path) -> None:
    found = observe(load_fresh(save_tiny_model(architecture, tmp_path)), torch.device("cpu"))
    assert base_model._kinds(found.windows, 99)[0] == WINDOWS[architecture]


@pytest.mark.parametrize(
    ("attention", "window", "num_rows", "length"), [("native", 13, 3, 31), ("sdpa", 13, 3, 31), ("native", 21, 8, 3)]
)
def test_long_rows_in_few_blocks_are_those_of_peft(
    attention: str, window: int, num_rows: int, length: int, tmp_path: Path
) -> None:
    """Three rows of 121 tokens together in 32 blocks of 4, of which one alone would fill 31; and rows that grow until
    some of them are preempted.
    """
    model = save_tiny_model("mistral", tmp_path / "model", sliding_window=window)
    folders = {name: save_adapter(model, tmp_path / name, seed=i) for i, name in enumerate("ab")}
    engine = LocalEngine(
        model,
        folders,
        block_size=4,
        kv_cache_memory="32KiB",
        max_model_len=124,
        attention=attention,
        speculate="off",
        max_num_seqs=8,
    )
    oracle = load_peft(model, folders)
    prompts = [[(7 * i + 3 * j) % 70 + 20 for j in range(length)] for i in range(num_rows)]
    rows = [(prompt, (None, "a", "b")[i % 3]) for i, prompt in enumerate(prompts)]
    answers = engine.run([engine.request(p, name, max_tokens=90, ignore_eos=True, logprobs=0) for p, name in rows])
    stats = engine.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks == 32
    assert (stats.num_preemptions > 0) == (num_rows > 3)
    for (prompt, name), answer in zip(rows, answers, strict=True):
        truth = logprobs_with_peft(oracle, name, prompt + answer.token_ids)[len(prompt) - 1 : -1]
        logprobs = [item.logprob for item in answer.logprobs if item is not None]
        assert mismatches(Found(answer.token_ids, logprobs), truth) == []


def test_window_narrower_than_what_a_layer_sees_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrowed(*arguments: object) -> Observation:
        return replace(observe(*arguments), windows=(5, 5))  # type: ignore[arg-type]

    monkeypatch.setattr(base_model, "observe", narrowed)
    model = save_tiny_model("mistral", tmp_path / "model", sliding_window=40)
    with pytest.raises(ModelError, match=r"small copy.*differ by"):
        LocalEngine(model)
