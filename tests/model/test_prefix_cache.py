"""Prefix caching with real K and V: found blocks answer as computed ones do, whoever computed them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.core.batch import Batch, RowOutput, SlotRef
from lora_serve.core.errors import NumericalError
from tests.kind_matrix import Found, mismatches
from tests.loading import load_adapter
from tests.local_engine import Answer, LocalEngine
from tests.oracle import load_alone, load_fresh, logprobs_alone, save_tiny_model
from tests.peft_kinds import INVOCATION, save_kind

BLOCK = 4
LIMITS: dict[str, Any] = {
    "block_size": BLOCK,
    "max_loras": 3,
    "kv_cache_memory": "400KiB",
    "max_num_seqs": 4,
    "max_model_len": 96,
    "speculate": "off",  # tokens that are run are counted
}
ARCHITECTURES = ("llama", "mistral", "gemma2", "gpt2", "qwen3_moe")
START = 27  # of the invocation tokens, inside a block


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(20, 90, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


ACTIVATING = [*tokens(START), *INVOCATION, *tokens(9, seed=1)]


def ask(engine: LocalEngine, prompt: list[int], adapter: str | None = None, **fields: Any) -> Answer:
    request = engine.request(prompt, adapter, max_tokens=6, ignore_eos=True, logprobs=1)
    return engine.run([replace(request, **fields)])[0]


def assert_right(oracle: Any, prompt: list[int], answer: Answer) -> None:
    assert answer.error is None
    truth = logprobs_alone(oracle, prompt, answer.token_ids)[len(prompt) - 1 : -1]
    logprobs = [item.logprob for item in answer.logprobs if item is not None]
    assert mismatches(Found(answer.token_ids, logprobs), truth) == []


def num_tokens_run(engine: LocalEngine) -> int:
    return sum(batch.num_tokens for batch in engine.engine.stats().recent_batches)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "llama4_text"])
def test_known_prompt_is_answered_the_same_from_its_tail_alone(architecture: str, tmp_path: Path) -> None:
    engine = LocalEngine(save_tiny_model(architecture, tmp_path), **LIMITS)
    prompt = tokens(41)
    cold = ask(engine, prompt)
    before = num_tokens_run(engine)
    warm = ask(engine, prompt)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 40)
    assert num_tokens_run(engine) - before == 1 + 5, "the tail, and the answer but for its last token"
    assert warm.token_ids == cold.token_ids
    assert_right(load_fresh(tmp_path), prompt, warm)
    branched = [*prompt[:30], *tokens(9, seed=3)]
    answer = ask(engine, branched)
    assert answer.num_cached_tokens == 28
    assert_right(load_fresh(tmp_path), branched, answer)
    assert ask(engine, prompt, tenant="another").num_cached_tokens == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activated_adapter_and_base_share_blocks_and_each_equals_peft(architecture: str, tmp_path: Path) -> None:
    model = save_tiny_model(architecture, tmp_path / "model")
    folder = save_kind("activated", architecture, model, tmp_path / "activated")
    plain, peft = load_fresh(model), load_alone(model, folder)
    for first, second in ((None, "activated"), ("activated", None)):
        engine = LocalEngine(model, {"activated": folder}, **LIMITS)
        ask(engine, ACTIVATING, first)
        answer = ask(engine, ACTIVATING, second)
        assert answer.num_cached_tokens == START // BLOCK * BLOCK
        assert_right(peft if second else plain, ACTIVATING, answer)
        again = ask(engine, ACTIVATING, first)
        assert again.num_cached_tokens == (len(ACTIVATING) - 1) // BLOCK * BLOCK
        assert_right(peft if first else plain, ACTIVATING, again)


def test_adapters_read_their_own_blocks_only(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    folders = {name: save_kind("plain", "llama", model, tmp_path / name, seed=i) for i, name in enumerate("ab")}
    engine = LocalEngine(model, folders, **LIMITS)
    oracles = {None: load_fresh(model), **{name: load_alone(model, folder) for name, folder in folders.items()}}
    prompt = tokens(33)
    for expected in (0, 32):
        for name, oracle in oracles.items():
            answer = ask(engine, prompt, name)
            assert answer.num_cached_tokens == expected
            assert_right(oracle, prompt, answer)


def test_row_that_is_not_a_number_leaves_no_block_that_can_be_found(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model")
    folder = save_kind("plain", "llama", model, tmp_path / "a")
    engine = LocalEngine(model, {"a": folder}, max_num_batched_tokens=16, **LIMITS)
    prompt, other = tokens(41), tokens(12, seed=5)
    ask(engine, other, "a")
    (info,) = engine.engine.residency.slots.infos()
    slot = SlotRef(info.index, info.generation, info.digest)
    slots = engine.parts.runner._slots
    weights = slots.delta(slots.module_index["model.layers.0.self_attn.v_proj"], slot.index)
    assert weights is not None
    with torch.inference_mode():
        weights.a.fill_(float("nan"))
    assert isinstance(ask(engine, prompt, "a").error, NumericalError)
    ref = engine.refs["a"]
    engine.parts.runner.load_slot(slot, engine.parts.fold(load_adapter(folder, ref, engine.parts.spec)))
    answer = ask(engine, prompt, "a")
    assert answer.num_cached_tokens == 0
    assert_right(load_alone(model, folder), prompt, answer)
    assert ask(engine, other, "a").num_cached_tokens == 8


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_k_and_v_before_an_activated_adapters_start_are_the_bases(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"sliding_window": 128} if architecture in ("mistral", "gemma2") else {}  # rows give nothing back then
    model = save_tiny_model(architecture, tmp_path / "model", **wide)
    folder = save_kind("activated", architecture, model, tmp_path / "activated")
    engine = LocalEngine(model, {"activated": folder}, enable_prefix_caching=False, **LIMITS)
    runner, tables = engine.parts.runner, dict[bool, tuple[int, ...]]()
    run = runner.run

    def recording(batch: Batch) -> list[RowOutput]:
        tables.update({bool(row.adapters): row.block_table for row in batch.rows})
        return run(batch)

    monkeypatch.setattr(runner, "run", recording)
    ask(engine, ACTIVATING, "activated")  # loads it
    engine.run([engine.request(ACTIVATING, name, max_tokens=1) for name in ("activated", None)])
    assert not set(tables[True]) & set(tables[False])
    for layer in range(2):
        for pool in runner._cache.layer(layer):
            base, activated = (content(pool, tables[has_adapter]) for has_adapter in (False, True))
            torch.testing.assert_close(activated[:START], base[:START], rtol=0, atol=1e-6)
            # from the start on they differ, if not in the first layer, whose projections the adapter may leave alone
            assert layer == 0 or (activated[START:] - base[START:]).abs().max() > 1e-3


def content(pool: torch.Tensor, table: Sequence[int]) -> torch.Tensor:
    """K or V of the prompt: [num_tokens, num_kv_heads, head_dim]."""
    return pool[list(table)].flatten(0, 1)[: len(ACTIVATING)]
