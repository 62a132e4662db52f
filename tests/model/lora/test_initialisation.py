"""PiSSA and OLoRA undone: against the base as it is, an adapter answers as PEFT does after it changed the base."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.saved import SavedAdapter
from lora_serve.adapters.checkpoint.weights import read_weights
from lora_serve.core.errors import InvalidAdapterError
from tests.kind_matrix import EXACT, LIMITS, NUM_BLOCKS, block_bytes, judge
from tests.local_engine import LocalEngine
from tests.model.test_single_experts import CASES, save_and_merge
from tests.oracle import load_alone, load_fresh, logprobs_alone, peft_may_warn, save_adapter, save_tiny_model

INITS = ("pissa", "olora")
HEAD = "base_model.model.lm_head.base_layer.weight"  # PEFT saves the changed weight of a head that it adapts
BIASED = ["q_proj", "k_proj", "v_proj"]
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "rslora_and_patterns": {
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2, r"layers\.1\..*up_proj": 7},
        "alpha_pattern": {"q_proj": 3, "down_proj": 5},
    },
    "dora": {"use_dora": True},
    "trained_biases": {"bias": "all"},
    "saved_modules": {"target_modules": BIASED, "modules_to_save": ["norm", "lm_head"]},
    "trained_tokens": {"target_modules": BIASED, "trainable_token_indices": [3, 17, 60]},
    "embedding_and_head": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "head_that_was_not_saved": {"target_modules": ["lm_head"]},
    "rank_of_the_layer": {"r": 16, "target_modules": ["k_proj"]},  # [16, 32]: twice the rank is more than it has
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("qwen2", tmp_path_factory.mktemp("init") / "model", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def engine(model: Path) -> LocalEngine:
    return LocalEngine(model, block_size=4, kv_cache_memory="100KiB")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def undone(engine: LocalEngine, folder: Path) -> SavedAdapter:
    artifact = read_artifact(folder, engine.parts.spec)
    return engine.parts.undo(read_weights(folder, artifact), artifact.config.init, lambda: None)


@pytest.mark.parametrize("init", INITS)
def test_whatever_was_trained_beside_it_all_rows_of_one_batch_equal_peft(
    model: Path, tmp_path: Path, init: str
) -> None:
    folders = {
        name: save_adapter(model, tmp_path / name, seed, init_lora_weights=init, **settings)
        for seed, (name, settings) in enumerate(SETTINGS.items())
    }
    change_tensors(folders["head_that_was_not_saved"], lambda tensors: tensors.pop(HEAD))
    limits = {**LIMITS, "kv_cache_memory": str(NUM_BLOCKS * block_bytes(load_fresh(model)))}
    assert {name for name, verdict in judge(model, folders, limits).items() if verdict != EXACT} == set()


@pytest.mark.many(3)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("name", ["rslora_and_patterns", "embedding_and_head", "dora"])
def test_converted_folder_is_in_peft_what_the_original_was(model: Path, tmp_path: Path, init: str, name: str) -> None:
    folder = save_adapter(model, tmp_path / "a", init_lora_weights=init, **SETTINGS[name])
    LocalEngine(model, {"a": folder}, block_size=4, kv_cache_memory="100KiB")
    converted = load_alone(model, tmp_path / "a_as_registered")
    prompt = list(range(20, 60))
    expected = logprobs_alone(load_alone(model, folder), prompt)
    torch.testing.assert_close(logprobs_alone(converted, prompt), expected, atol=5e-4, rtol=0)


@pytest.mark.parametrize("init", INITS)
def test_delta_is_what_peft_makes_of_each_weight(model: Path, engine: LocalEngine, tmp_path: Path, init: str) -> None:
    folder = save_adapter(model, tmp_path / "a", init_lora_weights=init, r=5)
    linears = undone(engine, folder).linears
    plain, merged = load_fresh(model), load_alone(model, folder).merge_and_unload()
    for path, linear in linears.items():
        assert linear.a is not None
        assert linear.b is not None
        assert linear.a.shape[0] == linear.b.shape[0] == 10
        expected = merged.get_submodule(path).weight - plain.get_submodule(path).weight
        torch.testing.assert_close(linear.scale * linear.b.t() @ linear.a, expected, atol=2e-5, rtol=0)


def test_olora_of_a_square_conv1d_is_undone_the_way_peft_does_it(tmp_path: Path) -> None:
    """PEFT decomposes a Conv1D's weight as it lies, [in, out], so only for a square one do the shapes fit at all."""
    model = save_tiny_model("gpt2", tmp_path / "model")
    folder = save_adapter(model, tmp_path / "a", init_lora_weights="olora", target_modules=r".*\.attn\.c_proj")
    engine = LocalEngine(model, {"a": folder}, block_size=4, kv_cache_memory="100KiB")
    prompt = list(range(20, 50))
    (answer,) = engine.run([engine.request(prompt, "a", max_tokens=1, logprobs=1)])
    truth = logprobs_alone(load_alone(model, folder), prompt)[-1]
    assert answer.token_ids == [int(truth.argmax())]
    assert answer.logprobs[0] is not None
    assert answer.logprobs[0].logprob == pytest.approx(float(truth.max()), abs=1e-3)


@pytest.mark.parametrize("init", INITS)
def test_untrained_start_cancels_out_in_the_factors_themselves(
    model: Path, engine: LocalEngine, tmp_path: Path, init: str
) -> None:
    """Else bfloat16 would round what cancels, which is as large as the weight itself."""
    with peft_may_warn():
        config = peft.LoraConfig(r=4, target_modules=BIASED, task_type="CAUSAL_LM", init_lora_weights=init)
        peft.get_peft_model(load_fresh(model), config).save_pretrained(tmp_path)
    for linear in undone(engine, tmp_path).linears.values():
        assert linear.a is not None
        assert linear.b is not None
        assert float(linear.a.norm() * linear.b.norm()) < 1e-4


def change_config(folder: Path, **values: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


@pytest.mark.parametrize("alpha", [0, -8])
def test_pissa_without_a_scale_above_zero_is_refused(
    model: Path, engine: LocalEngine, tmp_path: Path, alpha: int
) -> None:
    folder = save_adapter(model, tmp_path / "a", target_modules=["q_proj"])
    change_config(folder, init_lora_weights="pissa", lora_alpha=alpha)
    with pytest.raises(InvalidAdapterError, match=r"layers\.0\.self_attn\.q_proj: PiSSA needs a scale above zero"):
        undone(engine, folder)


@pytest.mark.parametrize("init", INITS)
def test_head_that_shares_its_weight_with_the_embedding_is_refused(tmp_path: Path, init: str) -> None:
    model = save_tiny_model("llama", tmp_path / "model", tie_word_embeddings=True)
    folder = save_adapter(model, tmp_path / "a", target_modules=["lm_head", "q_proj"])
    change_config(folder, init_lora_weights=init)
    with pytest.raises(InvalidAdapterError, match=r"lm_head: its .* initialisation changes the input embedding too"):
        undone(LocalEngine(model, block_size=4, kv_cache_memory="100KiB"), folder)


def test_quantised_base_is_refused_with_the_way_out(model: Path, tmp_path: Path) -> None:
    folder = save_adapter(model, tmp_path / "a", target_modules=["q_proj"], init_lora_weights="pissa")
    quantised = LocalEngine(model, block_size=4, kv_cache_memory="100KiB", quantization="int8", dtype="float32")
    with pytest.raises(InvalidAdapterError, match=r"q_proj: .* quantised base: convert the adapter with PEFT's"):
        undone(quantised, folder)


def test_single_experts_are_refused_with_the_way_out(tmp_path: Path) -> None:
    model, folder = save_tiny_model("mixtral", tmp_path / "model"), tmp_path / "a"
    save_and_merge(CASES["all-linear"], model, folder)
    change_config(folder, init_lora_weights="pissa")
    with pytest.raises(InvalidAdapterError, match=r"experts.*one stack here: convert the adapter with PEFT's"):
        undone(LocalEngine(model, block_size=4, kv_cache_memory="100KiB"), folder)
