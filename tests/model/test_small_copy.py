"""What the few tokens that a start runs on the real weights cannot show: windows, chunks and boundaries beyond them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ModelError
from lora_serve.core.settings import Settings
from lora_serve.model import base_model, exactness
from lora_serve.model.exactness import check_small_copy, shrunk, try_base
from tests.local_engine import LocalEngine
from tests.models_table import build_tiny
from tests.oracle import ARCHITECTURES, REPRESENTATIVE, load_plain, logprobs_alone, save_tiny_model
from tests.tiers import mostly_nightly

CHUNK = 32


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing that another test has proved, or could prove with other code, is known."""
    exactness._check_once.cache_clear()
    yield
    exactness._check_once.cache_clear()


def windowless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither windows nor chunks are applied."""
    create = base_model.create_attention

    def without(name: str, cache: Any) -> Any:
        attention = create(name, cache)
        return lambda *arguments: attention(*arguments[:-1], replace(arguments[-1], window=None, chunk=None))

    monkeypatch.setattr(base_model, "create_attention", without)


def test_window_beyond_the_probe_that_were_ignored_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model("mistral", tmp_path / "model", sliding_window=64)
    windowless(monkeypatch)
    with pytest.raises(ModelError, match=r"small copy.*differ by .*; with --max-model-len 64 it can be served"):
        LocalEngine(model)


def test_window_that_no_sequence_can_reach_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_tiny_model("mistral", tmp_path / "model", sliding_window=64)
    windowless(monkeypatch)
    assert LocalEngine(model, max_model_len=64).parts.spec.max_model_len == 64


def test_chunks_that_were_ignored_are_refused_beyond_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of Llama 4, whose routers return a pair, too."""
    build_tiny("llama4_text").save_pretrained(tmp_path)
    windowless(monkeypatch)
    with pytest.raises(ModelError, match=rf"Llama4ForCausalLM.*; with --max-model-len {CHUNK} it can be served"):
        LocalEngine(tmp_path)
    with pytest.raises(ModelError, match=rf"Llama4ForCausalLM.*; with --max-model-len {CHUNK} it can be served"):
        try_base(Settings(model=str(tmp_path)).part(ModelConfig))
    engine = LocalEngine(tmp_path, max_model_len=CHUNK)
    prompts = [list(range(20, 20 + length)) for length in (3, 17, 25)]
    answers = engine.run([engine.request(prompt, max_tokens=6, ignore_eos=True, logprobs=1) for prompt in prompts])
    plain = load_plain(tmp_path)
    for prompt, answer in zip(prompts, answers, strict=True):
        truth = logprobs_alone(plain, prompt, answer.token_ids)[len(prompt) - 1 : -1]
        assert answer.token_ids == truth.argmax(-1).tolist()


def test_positions_counted_by_the_step_and_not_by_the_row_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny("llama4_text").save_pretrained(tmp_path)
    monkeypatch.setattr(base_model, "tell_past", lambda *_: None)
    with pytest.raises(ModelError, match=r"Llama4ForCausalLM.*small copy.*differ by"):
        LocalEngine(tmp_path)


def test_keyword_of_attention_that_is_not_known_is_named(tmp_path: Path) -> None:
    build_tiny("deepseek_v32").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"DeepseekV32ForCausalLM cannot be served: .*indices"):
        LocalEngine(tmp_path)


@pytest.mark.parametrize("architecture", mostly_nightly(ARCHITECTURES, *REPRESENTATIVE))
def test_served_architecture_in_full_size_has_a_small_copy_that_passes(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = AutoConfig.for_model(architecture)
    with caplog.at_level(logging.WARNING, "lora_serve"):
        exactness._check(config, getattr(config.get_text_config(), "max_position_embeddings", 512))
    assert [record for record in caplog.records if record.name.startswith("lora_serve")] == []


@pytest.mark.parametrize(
    ("architecture", "changes", "length", "is_made"),
    [
        ("llama", {}, None, False),
        ("mistral", {"sliding_window": 64}, None, True),
        ("mistral", {"sliding_window": 64}, 64, False),
        ("llama", {"width_of_something_new": 64}, None, True),
        ("llama", {"width_of_something_new": 12}, None, False),  # the start on the real weights shows that
        ("llama", {"something": {"width": 64}}, None, True),
    ],
)
def test_no_copy_is_made_where_it_could_show_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, changes: Any, length: int | None, is_made: bool
) -> None:
    AutoConfig.for_model(architecture, **changes).save_pretrained(tmp_path)
    made: list[Any] = []
    monkeypatch.setattr(exactness, "_check_once", lambda *arguments: made.append(arguments))
    check_small_copy(Settings(model=str(tmp_path), max_model_len=length).part(ModelConfig))
    assert bool(made) is is_made


def test_small_copy_keeps_a_layer_of_each_kind_and_the_proportions_of_rope() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": list(range(2, 50))}
    big = AutoConfig.for_model(
        "phi3", hidden_size=3072, num_attention_heads=32, original_max_position_embeddings=4096,
        max_position_embeddings=131072, rope_parameters=rope | {"original_max_position_embeddings": 4096},
    )  # fmt: skip
    small = shrunk(big, 131072)
    assert small.original_max_position_embeddings == 64
    assert [len(small.rope_parameters[name]) for name in ("short_factor", "long_factor")] == [8, 8]
    assert shrunk(big, 4096).original_max_position_embeddings > 252
    gemma = shrunk(CONFIG_MAPPING["gemma3_text"](), 131072)
    assert set(gemma.layer_types) == {"sliding_attention", "full_attention"}
    assert len(gemma.layer_types) == gemma.num_hidden_layers == 6


@pytest.mark.parametrize(("num_layers", "num_shared"), [(35, 20), (10, 5), (6, 2)])
def test_small_copy_has_layers_that_read_others_keys_and_those_others(num_layers: int, num_shared: int) -> None:
    kinds = ["sliding_attention", "full_attention"] * 3 if num_layers == 6 else [
        "full_attention" if i % 5 == 4 else "sliding_attention" for i in range(num_layers)
    ]  # fmt: skip
    config = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=num_layers, layer_types=kinds, num_kv_shared_layers=num_shared
    )
    small = shrunk(config, 131072)
    assert (small.num_hidden_layers, small.num_kv_shared_layers) == (4, 2)
    assert small.layer_types == ["sliding_attention", "full_attention"] * 2
    exactness._check(config, 512)


def test_random_numbers_of_the_process_go_on_as_they_were(tmp_path: Path) -> None:
    AutoConfig.for_model("mistral", sliding_window=64).save_pretrained(tmp_path)
    torch.manual_seed(3)
    check_small_copy(Settings(model=str(tmp_path)).part(ModelConfig))
    found = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(found, torch.rand(3))
