"""A checkpoint relative to a changed base, rewritten as plain LoRA: same scales, same names, nothing else touched."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.content import CONFIG_NAME, WEIGHTS_NAME, adapter_digest
from lora_serve.adapters.checkpoint.module_patterns import ranks_and_scales
from lora_serve.adapters.checkpoint.peft_config import parse_config
from lora_serve.adapters.checkpoint.weights import convert_to_plain_lora, plain_settings, read_weights
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec
from tests.fake_verifier import FakeVerifier
from tests.loading import load_adapter

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter


@pytest.mark.parametrize("use_rslora", [True, False, None])
@pytest.mark.parametrize(
    "patterns", [{}, {"rank_pattern": None}, {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"up_proj": 5}}]
)
def test_ranks_double_and_scales_stay(spec: ModelSpec, use_rslora: bool | None, patterns: dict[str, Any]) -> None:
    table = {"peft_type": "LORA", "r": 4, "lora_alpha": 9, "target_modules": ["q_proj"], "use_rslora": use_rslora}
    before, after = (
        ranks_and_scales(parse_config(json.dumps(values).encode()).ranks, tuple(spec.linears))
        for values in (table | patterns, plain_settings(table | patterns))
    )
    assert after == {module: (2 * rank, pytest.approx(scale, rel=1e-12)) for module, (rank, scale) in before.items()}


def test_patterns_keep_their_order_because_the_first_match_counts(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    patterns = {"q_proj": 4, "down_proj": 4, ".*_proj": 9}
    folder = make_adapter(rank=4, settings={"init_lora_weights": "pissa", "rank_pattern": patterns})
    convert_to_plain_lora(folder, read_artifact(folder, spec), FakeVerifier().converted)
    plain = read_artifact(folder, spec)
    assert plain.config.ranks.rank_pattern == (("q_proj", 8), ("down_proj", 8), (".*_proj", 18))


def test_folder_is_rewritten_as_plain_lora_and_read_back(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    folder = make_adapter(rank=4, settings={"init_lora_weights": "pissa"}, dtype=torch.bfloat16)
    sent, verifier = read_artifact(folder, spec), FakeVerifier()
    expected = verifier.converted(read_weights(folder, sent), "pissa")
    convert_to_plain_lora(folder, sent, verifier.converted)
    plain = read_artifact(folder, spec)
    assert (plain.config.init, plain.config.ranks.r, plain.digest) == ("", 8, adapter_digest(folder))
    found = read_weights(folder, plain)
    assert found.linears.keys() == expected.linears.keys()
    for path, linear in found.linears.items():
        torch.testing.assert_close(linear.a, expected.linears[path].a)
        torch.testing.assert_close(linear.b, expected.linears[path].b)
        assert linear.scale == expected.linears[path].scale
    assert sorted(os.listdir(folder)) == [CONFIG_NAME, WEIGHTS_NAME]


def test_tensors_that_are_no_factors_keep_their_bytes(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    magnitudes = {
        f"base_model.model.model.layers.{i}.{module}.lora_magnitude_vector": torch.rand(16).half() + 1
        for i in (0, 1)
        for module in ("self_attn.q_proj", "mlp.down_proj")
    }
    settings = {"init_lora_weights": "olora", "use_dora": True}
    folder = make_adapter(settings=settings, change=lambda tensors: tensors.update(magnitudes))
    convert_to_plain_lora(folder, read_artifact(folder, spec), FakeVerifier().converted)
    found = load_file(folder / WEIGHTS_NAME)
    assert found[name].dtype == torch.float16
    assert torch.equal(found[name], magnitudes[name])


def test_files_that_share_their_bytes_with_the_sender_are_not_written_into(
    make_adapter: MakeAdapter, spec: ModelSpec, tmp_path: Path
) -> None:
    sent = make_adapter(settings={"init_lora_weights": "pissa"})
    digest, copy = adapter_digest(sent), tmp_path / "copy"
    copy.mkdir()
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        os.link(sent / name, copy / name)
    convert_to_plain_lora(copy, read_artifact(copy, spec), FakeVerifier().converted)
    assert adapter_digest(sent) == digest


def test_unconverted_content_is_never_loaded_as_if_it_were_plain(make_adapter: MakeAdapter, spec: ModelSpec) -> None:
    folder = make_adapter(settings={"init_lora_weights": "pissa"})
    with pytest.raises(InvalidAdapterError, match="pissa initialisation was not undone"):
        load_adapter(folder, AdapterRef("t", "t/a", 1, adapter_digest(folder), 4, 0), spec)
