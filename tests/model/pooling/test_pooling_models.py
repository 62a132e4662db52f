"""What pooling models do beside the plain case: tasks, limits, positions, pairs, labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM

from lora_serve.core.config import EngineConfig, ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.request import Task
from lora_serve.core.settings import Settings
from lora_serve.model.build import ModelParts, build_model
from tests.local_engine import LocalEngine
from tests.oracle import save_tiny_model
from tests.pooling_models import (
    assert_close,
    hidden_alone,
    load_base,
    logits_alone,
    pooled,
    prompts,
    run,
    save_pooling_model,
)


def build(model: Path, **settings: Any) -> ModelParts:
    given = Settings(model=str(model), **settings)
    return build_model(given.part(ModelConfig), given.part(EngineConfig), 2)


# -- tasks and limits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "saved_for", "task"),
    [
        ("bert", "embed", Task.EMBED),
        ("bert", "classify", Task.CLASSIFY),
        ("llama", "generate", None),
        ("llama", "classify", Task.CLASSIFY),
    ],
)
def test_task_follows_from_the_checkpoint(family: str, saved_for: str, task: Task | None, tmp_path: Path) -> None:
    parts = build(save_pooling_model(family, saved_for, tmp_path))
    assert (parts.spec.pooling and parts.spec.pooling.task) == task
    assert (parts.num_blocks == 0) == (task is not None)


@pytest.mark.parametrize(
    ("family", "saved_for", "task"),
    [("llama", "generate", Task.EMBED), ("llama", "classify", Task.CLASSIFY), ("bert", "embed", Task.EMBED)],
)
def test_task_of_a_model_that_shall_pool_follows_from_its_head(
    family: str, saved_for: str, task: Task, tmp_path: Path
) -> None:
    spec = build(save_pooling_model(family, saved_for, tmp_path), task="pooling").spec
    assert spec.pooling is not None
    assert spec.pooling.task is task


def test_encoder_of_masked_words_embeds(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "embed", tmp_path / "model")
    AutoModelForMaskedLM.from_pretrained(model).save_pretrained(tmp_path / "mlm")
    engine = LocalEngine(tmp_path / "mlm")
    tokens = prompts()[1]
    assert_close(run(engine, [(tokens, None)]), [pooled(hidden_alone(load_base(model, "embed"), tokens), "mean")])


@pytest.mark.parametrize(("family", "limit"), [("bert", 64), ("roberta", 62), ("mpnet", 62), ("llama", 64)])
def test_longest_prompt_is_as_long_as_the_model_has_positions(family: str, limit: int, tmp_path: Path) -> None:
    model = save_pooling_model(family, "embed", tmp_path)
    engine = LocalEngine(model, task="embed")
    assert engine.parts.spec.max_model_len == limit
    tokens = list(range(2, 2 + limit))
    how = "last" if family == "llama" else "mean"
    assert_close(run(engine, [(tokens, None)]), [pooled(hidden_alone(load_base(model, "embed"), tokens), how)])


@pytest.mark.parametrize("how", ["cls", "mean", "last"])
def test_pooling_can_be_chosen(how: str, tmp_path: Path) -> None:
    model = save_pooling_model("bert", "embed", tmp_path)
    engine = LocalEngine(model, pooling=how)
    base = load_base(model, "embed")
    expected = [pooled(hidden_alone(base, tokens), how) for tokens in prompts(4)]
    assert_close(run(engine, [(tokens, None) for tokens in prompts(4)]), expected)


def test_pooling_without_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--pooling cls"):
        build(save_pooling_model("bert", "classify", tmp_path), pooling="cls")


def test_incomplete_backbone_is_refused(tmp_path: Path) -> None:
    file = save_pooling_model("bert", "embed", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["encoder.layer.1.output.dense.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks .*encoder.layer.1.output.dense.weight"):
        build(tmp_path)


def test_model_that_answers_otherwise_in_either_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"AlbertModel cannot be served exactly: packed: .*; padded: "):
        build(save_pooling_model("albert", "embed", tmp_path, embedding_size=16))


# -- what a family has of its own ----------------------------------------------------------------------------------


def test_chunks_longer_than_the_probe_are_seen(tmp_path: Path) -> None:
    model = save_tiny_model("llama4_text", tmp_path, attention_chunk_size=40, floor_scale=8192)
    rows = [[(7 * i + 3 * j) % 90 + 3 for j in range(length)] for i, length in enumerate((100, 5, 41, 64))]
    base = load_base(model, "embed")
    found = run(LocalEngine(model, task="embed"), [(tokens, None) for tokens in rows])
    assert_close(found, [pooled(hidden_alone(base, tokens), "last") for tokens in rows])


def test_second_texts_have_their_own_token_types(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "classify", tmp_path)
    engine = LocalEngine(model)
    assert engine.parts.spec.pooling is not None
    assert engine.parts.spec.pooling.takes_pairs
    base, tokens = load_base(model, "classify"), prompts()[1]
    types = (0,) * 15 + (1,) * (len(tokens) - 15)
    expected = logits_alone(base, tokens, types)
    assert_close(run(engine, [(tokens, None)], types), [expected])
    assert (expected - logits_alone(base, tokens)).abs().max() > 1e-2


def test_model_with_one_token_type_takes_no_pairs_of_types(tmp_path: Path) -> None:
    pooling = build(save_pooling_model("roberta", "classify", tmp_path)).spec.pooling
    assert pooling is not None
    assert not pooling.takes_pairs


@pytest.mark.parametrize("family", ["roberta", "mpnet"])
def test_padding_tokens_inside_a_prompt_have_the_padding_position(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, "embed", tmp_path)
    tokens = [5, 1, 6, 1, 1, 7]
    expected = pooled(hidden_alone(load_base(model, "embed"), tokens), "mean")
    assert_close(run(LocalEngine(model), [(tokens, None), (prompts()[1], None)])[:1], [expected])


def test_decoder_classifies_by_the_last_token_that_is_no_padding(tmp_path: Path) -> None:
    model = save_pooling_model("llama", "classify", tmp_path)
    rows = [[5, 6, 7, 0, 0], [5, 6, 7], [0, 0], [0, 9]]
    base = load_base(model, "classify")
    expected = [logits_alone(base, tokens) for tokens in rows]
    assert_close(run(LocalEngine(model), [(tokens, None) for tokens in rows]), expected)


@pytest.mark.parametrize("how", ["cls", "mean"])
def test_modernbert_head_pools_as_its_config_says(how: str, tmp_path: Path) -> None:
    model = save_pooling_model("modernbert", "classify", tmp_path, classifier_pooling=how)
    base = load_base(model, "classify")
    expected = [logits_alone(base, tokens) for tokens in prompts()]
    assert_close(run(LocalEngine(model), [(tokens, None) for tokens in prompts()]), expected)


@pytest.mark.parametrize("num_labels", [1, 5, 7, 11])
def test_any_number_of_labels_is_served(num_labels: int, tmp_path: Path) -> None:
    model = save_pooling_model("roberta", "classify", tmp_path, num_labels=num_labels)
    engine = LocalEngine(model)
    assert engine.parts.spec.pooling is not None
    assert len(engine.parts.spec.pooling.labels) == num_labels
    base = load_base(model, "classify")
    assert_close(
        run(engine, [(tokens, None) for tokens in prompts(3)]), [logits_alone(base, tokens) for tokens in prompts(3)]
    )


def test_labels_are_named_by_the_config(tmp_path: Path) -> None:
    names = {0: "spam", 1: "ham"}
    model = save_pooling_model(
        "bert", "classify", tmp_path, num_labels=2, id2label=names, problem_type="multi_label_classification"
    )
    pooling = build(model).spec.pooling
    assert pooling is not None
    assert (pooling.labels, pooling.is_multi_label) == (("spam", "ham"), True)
