"""Pooling models by family: rows of mixed adapters in one batch equal transformers and PEFT with each row alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from lora_serve.core.request import PoolingParams
from tests.local_engine import LocalEngine
from tests.pooling_models import (
    FAMILIES,
    PADDED,
    REPRESENTATIVE,
    TOLERANCE,
    assert_close,
    hidden_alone,
    how_of,
    load_adapter_alone,
    load_base,
    logits_alone,
    pooled,
    prompts,
    run,
    save_pooling_adapter,
    save_pooling_model,
)
from tests.tiers import mostly_nightly


@pytest.mark.many(3)
@pytest.mark.parametrize("family", mostly_nightly(FAMILIES, *REPRESENTATIVE))
def test_embeddings_of_mixed_rows_are_those_of_each_row_alone(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, "embed", tmp_path / "model")
    folders = {name: save_pooling_adapter(model, tmp_path / name, "embed", seed=i) for i, name in enumerate("abc")}
    engine = LocalEngine(model, folders, task="embed")
    spec = engine.parts.spec.pooling
    assert spec is not None
    assert spec.is_ragged == (family not in PADDED)
    assert (spec.dimension, spec.is_normalized) == (32, True)
    plain = {name: load_adapter_alone(model, folder, "embed") for name, folder in folders.items()}
    plain[None] = load_base(model, "embed")
    rows = [(tokens, (None, "a", "b", "c")[i % 4]) for i, tokens in enumerate(prompts())]
    expected = [pooled(hidden_alone(plain[adapter], tokens), how_of(family)) for tokens, adapter in rows]
    assert_close(run(engine, rows), expected)
    far = [pooled(hidden_alone(plain[None], tokens), how_of(family)) for tokens, _ in rows]
    assert (torch.stack(far) - torch.stack(expected))[1].abs().max() > 100 * TOLERANCE


def test_each_row_says_whether_its_length_is_made_1(tmp_path: Path) -> None:
    model = save_pooling_model("bert", "embed", tmp_path / "model")
    engine, plain = LocalEngine(model, {}, task="embed"), load_base(model, "embed")
    wishes = (None, False, True, False)
    requests = [
        replace(engine.request(tokens), pooling=PoolingParams((), wish))
        for tokens, wish in zip(prompts(4), wishes, strict=True)
    ]
    answers = [
        torch.frombuffer(bytearray(answer.pooled or b""), dtype=torch.float32) for answer in engine.run(requests)
    ]
    means = [hidden_alone(plain, tokens).mean(0) for tokens in prompts(4)]
    assert_close(
        answers, [mean if wish is False else mean / mean.norm() for mean, wish in zip(means, wishes, strict=True)]
    )


@pytest.mark.many(3)
@pytest.mark.parametrize("family", mostly_nightly(FAMILIES, *REPRESENTATIVE))
def test_logits_of_heads_with_different_labels_are_those_of_each_row_alone(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, "classify", tmp_path / "model")
    labels = {"two": 2, "three": 3, "five": 5}
    folders = {
        name: save_pooling_adapter(model, tmp_path / name, "classify", seed=num, num_labels=num)
        for name, num in labels.items()
    }
    without_pooler = {"exclude_modules": ["pooler.dense"]}  # which only some models have below a head
    folders["headless"] = save_pooling_adapter(model, tmp_path / "headless", "embed", seed=9, **without_pooler)
    engine = LocalEngine(model, folders)
    assert engine.parts.spec.pooling is not None
    assert engine.parts.spec.pooling.is_ragged == (family not in PADDED)
    assert {name: ref.traits.num_labels for name, ref in engine.refs.items()} == {**labels, "headless": 0}
    plain = {name: load_adapter_alone(model, folders[name], "classify", num) for name, num in labels.items()}
    plain[None] = load_base(model, "classify")
    plain["headless"] = _headless(model, folders["headless"])
    names = [None, "two", "three", "five", "headless", None, "two", "five"]
    rows = list(zip(prompts(), names, strict=True))
    found = run(engine, rows)
    assert [len(logits) for logits in found] == [3, 2, 3, 5, 3, 3, 2, 5]
    assert_close(found, [logits_alone(plain[adapter], tokens) for tokens, adapter in rows])


def _headless(model: Path, folder: Path) -> Any:
    """A backbone's adapter below the base's own head."""
    base = load_base(model, "classify")
    adapted = load_adapter_alone(model, folder, "embed").merge_and_unload()
    backbone = getattr(base, base.base_model_prefix)
    backbone.load_state_dict(adapted.state_dict(), strict=False)
    return base


OTHER_KINDS = [
    *((family, kind) for family in ("bert", "modernbert", "mpnet", "llama") for kind in ("dora", "ia3", "norms")),
    *(("bert", "rslora"), ("bert", "bias"), ("bert", "embeddings"), ("mpnet", "embeddings"), ("gpt2", "dora")),
]


@pytest.mark.many(3)
@pytest.mark.parametrize(
    ("family", "kind"),
    mostly_nightly(
        OTHER_KINDS, ("modernbert", "dora"), ("mpnet", "ia3"), ("llama", "norms"), *OTHER_KINDS[-5:-2], OTHER_KINDS[-1]
    ),
)
def test_other_kinds_of_adapters_act_on_their_own_rows(family: str, kind: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, "embed", tmp_path / "model")
    folder = _save_kind(kind, model, tmp_path / kind)
    plain = save_pooling_adapter(model, tmp_path / "plain", "embed", seed=5)
    engine = LocalEngine(model, {kind: folder, "plain": plain}, task="embed")
    models = {
        kind: load_adapter_alone(model, folder, "embed"),
        "plain": load_adapter_alone(model, plain, "embed"),
        None: load_base(model, "embed"),
    }
    rows = [(tokens, (None, kind, "plain", kind)[i % 4]) for i, tokens in enumerate(prompts())]
    expected = [pooled(hidden_alone(models[adapter], tokens), how_of(family)) for tokens, adapter in rows]
    assert_close(run(engine, rows), expected)


def _save_kind(kind: str, model: Path, folder: Path) -> Path:
    base = load_base(model, "embed")
    norms = [
        name for name, m in base.named_modules() if isinstance(m, torch.nn.LayerNorm) or "RMSNorm" in repr(type(m))
    ]
    tables = [name for name, m in base.named_modules() if isinstance(m, torch.nn.Embedding) and "relative" not in name]
    if kind == "ia3":
        ia3 = {"kind": peft.IA3Config, "feedforward_modules": []}
        return save_pooling_adapter(model, folder, "embed", **ia3)
    settings: dict[str, dict[str, Any]] = {
        "dora": {"use_dora": True},
        "rslora": {"use_rslora": True, "r": 7},
        "bias": {"bias": "all" if family_has_bias(base) else "none", "r": 3},
        "norms": {"modules_to_save": norms[:3]},
        "embeddings": {"target_modules": tables[:1]},
    }
    return save_pooling_adapter(model, folder, "embed", **settings[kind])


def family_has_bias(model: torch.nn.Module) -> bool:
    return any(name.endswith("bias") for name, _ in model.named_parameters())
