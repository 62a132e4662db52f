"""Adapters of pooling models beside the plain case: their names, heads, faults and smoke tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.weights import read_weights
from lora_serve.commands.adapter_check import check_adapter
from lora_serve.core.batch import Batch, Row, RowAdapter, SlotRef
from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.errors import NumericalError
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.request import PoolingParams
from lora_serve.core.settings import Settings
from lora_serve.model.build import ModelParts, build_model
from tests.local_engine import LocalEngine, refusal
from tests.oracle import peft_may_warn
from tests.pooling_models import (
    assert_close,
    hidden_alone,
    load_adapter_alone,
    load_base,
    logits_alone,
    pooled,
    prompts,
    run,
    save_pooling_adapter,
    save_pooling_model,
)

NO_POOLER = {"exclude_modules": ["pooler.dense"]}


def build(model: Path, **settings: Any) -> ModelParts:
    given = Settings(model=str(model), **settings)
    return build_model(given.part(ModelConfig), given.part(EngineConfig), 2)


def load(parts: ModelParts, folder: Path, slot: int = 0) -> RowAdapter:
    artifact = read_artifact(folder, parts.spec)
    ref = SlotRef(slot, 1, artifact.digest)
    parts.runner.load_slot(ref, parts.fold(read_weights(folder, artifact)))
    return RowAdapter(ref)


def smoke_test(parts: ModelParts, folder: Path) -> SmokeTestResult:
    return parts.runner.smoke_test(load(parts, folder), (5, 6, 7, 8))


# -- names of adapters ---------------------------------------------------------------------------------------------


def test_adapter_of_a_language_model_embeds(tmp_path: Path) -> None:
    model = save_pooling_model("qwen2", "generate", tmp_path / "model")
    folder = save_pooling_adapter(model, tmp_path / "a", "generate", rank_pattern={r"model\.layers\.1\..*q_proj": 2})
    engine = LocalEngine(model, {"a": folder}, task="embed")
    trained = load_adapter_alone(model, folder, "generate").get_base_model().model
    expected = [pooled(hidden_alone(trained, tokens), "last") for tokens in prompts()]
    assert_close(run(engine, [(tokens, "a") for tokens in prompts()]), expected)


def test_adapter_of_a_model_of_masked_words_embeds(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "embed", tmp_path / "model")
    mlm = AutoModelForMaskedLM.from_pretrained(model)
    with peft_may_warn():
        trained = peft.get_peft_model(mlm, peft.LoraConfig(target_modules=["query", "value"]))
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.15)
        trained.save_pretrained(tmp_path / "a")
    engine = LocalEngine(model, {"a": tmp_path / "a"})
    tokens = prompts()[1]
    expected = pooled(hidden_alone(trained.eval().get_base_model().bert, tokens), "mean")
    assert_close(run(engine, [(tokens, "a")]), [expected])


def test_adapter_of_a_classifier_is_refused_where_there_are_embeddings(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "classify", tmp_path / "model")
    folder = save_pooling_adapter(model, tmp_path / "a", "classify")
    engine = LocalEngine(model, task="embed")
    assert "classifier" in (refusal(engine, folder) or "")


def test_adapter_of_a_classifier_is_refused_where_text_is_generated(tmp_path: Path) -> None:
    model = save_pooling_model("llama", "generate", tmp_path / "model")
    folder = save_pooling_adapter(model, tmp_path / "a", "classify", num_labels=2)
    assert 'task_type "SEQ_CLS" is not CAUSAL_LM' in (refusal(LocalEngine(model), folder) or "")


# -- heads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "roberta", "llama"])
def test_base_without_a_head_serves_adapters_that_bring_one(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, "embed", tmp_path / "model")
    folder = save_pooling_adapter(model, tmp_path / "a", "classify", num_labels=4)
    bare = save_pooling_adapter(model, tmp_path / "bare", "embed", **NO_POOLER)
    engine = LocalEngine(model, {"a": folder}, task="classify")
    assert engine.parts.spec.pooling is not None
    assert engine.parts.spec.pooling.labels == ()
    assert "the adapter must bring them whole" in (refusal(engine, bare) or "")
    trained = load_adapter_alone(model, folder, "classify", 4)
    expected = [logits_alone(trained, tokens) for tokens in prompts()]
    assert_close(run(engine, [(tokens, "a") for tokens in prompts()]), expected)


@pytest.mark.parametrize("kind", [peft.IA3Config, peft.LoHaConfig])
def test_other_methods_bring_heads_too(kind: Any, tmp_path: Path) -> None:
    model = save_pooling_model("roberta", "classify", tmp_path / "model")
    more = {"feedforward_modules": []} if kind is peft.IA3Config else {"r": 3, "alpha": 6}
    folder = save_pooling_adapter(model, tmp_path / "a", "classify", num_labels=5, kind=kind, **_saved(kind), **more)
    engine = LocalEngine(model, {"a": folder})
    assert engine.refs["a"].traits.num_labels == 5
    trained, base = load_adapter_alone(model, folder, "classify", 5), load_base(model, "classify")
    rows = [(tokens, "a" if i % 2 else None) for i, tokens in enumerate(prompts())]
    expected = [logits_alone(trained if adapter else base, tokens) for tokens, adapter in rows]
    assert_close(run(engine, rows), expected)


def _saved(kind: Any) -> dict[str, Any]:
    return {"modules_to_save": ["classifier"]} if kind is peft.LoHaConfig else {}


def test_head_trained_in_full_beside_dora_replaces_all_its_layers(tmp_path: Path) -> None:
    model = save_pooling_model("distilbert", "classify", tmp_path / "model")
    more = {"modules_to_save": ["pre_classifier", "classifier"], "use_dora": True}
    folder = save_pooling_adapter(model, tmp_path / "a", "classify", num_labels=2, **more)
    trained = load_adapter_alone(model, folder, "classify", 2)
    expected = [logits_alone(trained, tokens) for tokens in prompts()]
    assert_close(run(LocalEngine(model, {"a": folder}), [(tokens, "a") for tokens in prompts()]), expected)


@pytest.mark.parametrize("family", ["modernbert", "electra", "bert", "roberta"])
def test_layers_of_the_base_head_take_deltas(family: str, tmp_path: Path) -> None:
    """ModernBERT's norm after pooling is no linear layer, and sees rows, not tokens."""
    model = save_pooling_model(family, "classify", tmp_path / "model")
    more = {
        "modernbert": {"target_modules": ["head.dense", "Wqkv"], "modules_to_save": ["head.norm"], "num_labels": 2},
        "electra": {"target_modules": ["query"], "num_labels": 6},
        "bert": {"target_modules": ["query"], "num_labels": 2, "bias": "all"},  # which saves the head's bias twice
        "roberta": {"target_modules": ["query"], "num_labels": 4, "bias": "all"},
    }[family]
    folder = save_pooling_adapter(model, tmp_path / "a", "classify", **more)
    trained, base = load_adapter_alone(model, folder, "classify", more["num_labels"]), load_base(model, "classify")
    rows = [(tokens, "a" if i % 3 else None) for i, tokens in enumerate(prompts())]
    expected = [logits_alone(trained if adapter else base, tokens) for tokens, adapter in rows]
    assert_close(run(LocalEngine(model, {"a": folder}), rows), expected)


# -- rows ----------------------------------------------------------------------------------------------------------


def test_composed_adapters_add_up_with_their_scales(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "embed", tmp_path / "model")
    folders = {name: save_pooling_adapter(model, tmp_path / name, "embed", seed=i) for i, name in enumerate("ab")}
    engine = LocalEngine(model, folders)
    merged = load_base(model, "embed")
    for name, scale in (("a", 0.5), ("b", -1.5)):
        other = load_adapter_alone(model, folders[name], "embed").merge_and_unload().state_dict()
        plain = load_base(model, "embed").state_dict()
        merged.load_state_dict(
            {key: value + scale * (other[key] - plain[key]) for key, value in merged.state_dict().items()}
        )
    tokens = prompts()[1]
    found = run(engine, [(tokens, {"a": 0.5, "b": -1.5}), (prompts()[2], None)])
    assert_close(found[:1], [pooled(hidden_alone(merged, tokens), "mean")])


@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_row_that_is_not_a_number_ends_alone(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, "embed", tmp_path / "model")
    folder = save_pooling_adapter(model, tmp_path / "a", "embed")
    parts = build(model)
    adapter = load(parts, folder)
    for module in parts.runner._model.module.modules():  # an overflow that no check of the files would foresee
        if type(module).__name__ == "LoraLinear":
            index = module.module
            delta = parts.runner._slots.delta(index, 0)
            if delta is not None and delta.b is not None:
                delta.b.fill_(float("nan"))
    rows = [
        Row(i, tuple(tokens), 0, (), (adapter,) if i == 1 else (), None, None, pool=PoolingParams())
        for i, tokens in enumerate(prompts(4))
    ]
    outputs = parts.runner.run(Batch(tuple(rows), ()))
    assert [type(output.error) for output in outputs] == [type(None), NumericalError, type(None), type(None)]
    base = load_base(model, "embed")
    expected = [pooled(hidden_alone(base, prompts(4)[i]), "mean") for i in (0, 2, 3)]
    found = [torch.frombuffer(bytearray(outputs[i].pooled or b""), dtype=torch.float32) for i in (0, 2, 3)]
    assert_close(found, expected)


def test_row_of_a_slot_with_another_adapter_is_refused(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "embed", tmp_path / "model")
    parts = build(model)
    adapter = load(parts, save_pooling_adapter(model, tmp_path / "a", "embed"))
    parts.runner.clear_slot(0)
    row = Row(0, (5, 6), 0, (), (adapter,), None, None, pool=PoolingParams())
    (output,) = parts.runner.run(Batch((row,), ()))
    assert "no longer holds" in str(output.error)


# -- smoke tests ---------------------------------------------------------------------------------------------------


def test_probe_sees_what_an_adapter_changes_and_what_changes_nothing(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "embed", tmp_path / "model")
    parts = build(model)
    assert not smoke_test(parts, save_pooling_adapter(model, tmp_path / "a", "embed")).is_noop
    idle = save_pooling_adapter(model, tmp_path / "idle", "embed")
    _fill(idle, "lora_B", 0.0)
    assert smoke_test(parts, idle).is_noop


def test_own_head_is_an_effect_by_itself_unless_it_is_all_zeros(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "classify", tmp_path / "model")
    parts = build(model)
    folder = save_pooling_adapter(model, tmp_path / "a", "classify", num_labels=5)
    _fill(folder, "lora_B", 0.0)
    assert not smoke_test(parts, folder).is_noop
    _fill(folder, "classifier", 0.0)
    assert smoke_test(parts, folder).is_noop


def _fill(folder: Path, part: str, value: float) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors |= {name: torch.full_like(tensor, value) for name, tensor in tensors.items() if part in name}
    save_file(tensors, file, metadata={"format": "pt"})


def test_check_command_tries_adapters_of_classifiers(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "classify", tmp_path / "model")
    folder = save_pooling_adapter(model, tmp_path / "a", "classify", num_labels=5)
    settings = Settings(model=str(model))
    verdict = check_adapter(folder, settings, build(model))
    assert verdict.reasons == ()
    assert verdict.smoke_test is not None
    _rename_head(folder)
    assert "head.weight" in str(check_adapter(folder, settings, build(model)).reasons)


def _rename_head(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = {name.replace(".classifier.", ".head."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["classifier", "score"]


def test_quantised_base_embeds_as_its_plain_self_does(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "embed", tmp_path / "model")
    folder = save_pooling_adapter(model, tmp_path / "a", "embed")
    engine = LocalEngine(model, {"a": folder}, quantization="int8")
    full = LocalEngine(model, {"a": folder})
    rows = [(tokens, "a" if i % 2 else None) for i, tokens in enumerate(prompts())]
    for mine, exact in zip(run(engine, rows), run(full, rows), strict=True):
        assert torch.cosine_similarity(mine, exact, dim=0) > 0.99
