"""Which modules treat every token by itself: learned by watching, not by knowing a model's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lora_serve.core.errors import ModelError
from lora_serve.model.loading.observation import Observation, Site, observe
from tests.models_table import build_tiny
from tests.oracle import ARCHITECTURES, load_fresh, save_tiny_model


def observed(architecture: str, tmp_path: Path, **overrides: Any) -> tuple[Any, Observation]:
    model = load_fresh(save_tiny_model(architecture, tmp_path / "model", **overrides))
    return model, observe(model, torch.device("cpu"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_module_with_parameters_is_a_site(architecture: str, tmp_path: Path) -> None:
    """But OPT's position table, which is looked up by more than the token's position; and gpt-oss's sinks, which belong
    to no token.
    """
    model, found = observed(architecture, tmp_path)
    owners = {path for path, module in model.named_modules() if list(module.parameters(recurse=False))}
    others = {"gpt_oss": {f"model.layers.{i}.self_attn" for i in (0, 1)}}
    assert owners - found.sites.keys() <= others.get(architecture, {"model.decoder.embed_positions"})
    experts = {path for path in owners if path.endswith(".experts")}
    assert found.transposed == (experts if architecture == "gpt_oss" else set())
    heads = [path for path, site in found.sites.items() if site.is_output_head]
    assert [model.get_submodule(path) for path in heads] == [model.get_output_embeddings()]
    assert model.get_input_embeddings() in [model.get_submodule(path) for path in found.embeddings]


def test_token_dimension_is_found_wherever_it_lies(tmp_path: Path) -> None:
    _, qwen = observed("qwen3", tmp_path / "a")
    assert qwen.sites["model.layers.0.self_attn.q_norm"] == Site((1,), 1, False)
    _, moe = observed("mixtral", tmp_path / "b")
    assert moe.sites["model.layers.1.mlp.experts"] == Site((0, 0, 0), 0, False)
    assert moe.sites["model.layers.1.mlp.gate"].output_dim == 0


def test_module_that_runs_twice_or_mixes_tokens_is_no_site(tmp_path: Path) -> None:
    model = load_fresh(save_tiny_model("llama", tmp_path / "model"))
    layer = model.model.layers[1]
    layer.input_layernorm = model.model.layers[0].input_layernorm  # one module, two places
    layer.mlp.down_proj = MixesTokens(64, 32)
    found = observe(model, torch.device("cpu"))
    assert "model.layers.0.input_layernorm" not in found.sites
    assert "model.layers.1.mlp.down_proj" not in found.sites
    assert "model.layers.1.mlp.up_proj" in found.linears


@pytest.mark.parametrize(
    ("model_type", "kept", "left_out"),
    [
        ("bert", "cls.predictions.transform.dense", "cls.predictions"),  # a bias beside the layers inside
        ("ernie4_5_moe", "model.layers.1.mlp.gate", "model.layers.1.mlp.gate.moe_statics"),
    ],
)
def test_of_two_sites_one_within_the_other_one_counts(model_type: str, kept: str, left_out: str) -> None:
    found = observe(build_tiny(model_type), torch.device("cpu"))
    assert kept in found.sites
    assert left_out not in found.sites
    assert [path for path in found.sites for other in found.sites if other.startswith(f"{path}.")] == []


@pytest.mark.parametrize(
    ("model_type", "scale"), [("llama", 1.0), ("gemma3_text", pytest.approx(8.0)), ("muse_glimmer", None)]
)
def test_embedding_that_does_more_than_scale_its_rows_is_told(model_type: str, scale: float | None) -> None:
    model = build_tiny(model_type)
    (shape,) = observe(model, torch.device("cpu")).embeddings.values()
    assert shape.scale == scale


class MixesTokens(nn.Module):
    """Swaps the dimensions, so that none of its output counts tokens alone."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in))

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()

    def __call__(self, x: torch.Tensor) -> Any:
        return super().__call__(x=x)


def test_chunks_are_seen_however_many_tokens_they_have(tmp_path: Path) -> None:
    for size in (4, 8192):  # the first pass has more tokens than the one, and fewer than the other
        model, found = observed("llama4_text", tmp_path / str(size), attention_chunk_size=size)
        assert found.chunks == {model.model.layers[0].self_attn: size}
    _, windowed = observed("mistral", tmp_path / "windowed", sliding_window=4, attention_chunk_size=4)
    assert windowed.chunks == {}


def test_a_model_whose_logits_cannot_be_chosen_is_refused(tmp_path: Path) -> None:
    model = load_fresh(save_tiny_model("llama", tmp_path / "model"))
    own = model.forward
    model.forward = lambda logits_to_keep, **given: own(**given)
    with pytest.raises(ModelError, match="does not take `logits_to_keep`"):
        observe(model, torch.device("cpu"))
