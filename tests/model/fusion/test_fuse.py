"""What is fused in each architecture, what is left alone, and that nothing but speed changes."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

from lora_serve.model.fusion.kinds import attention, gated_mlp, norm
from lora_serve.model.fusion.kinds.attention import FusedRotaryAttention
from lora_serve.model.fusion.kinds.gated_mlp import FusedGatedMLP
from lora_serve.model.fusion.kinds.norm import FusedNorm
from lora_serve.model.fusion.parts import FusionParts
from lora_serve.model.native.layer_kernels import ACTIVATIONS
from tests.local_engine import Answer, LocalEngine, refusal
from tests.oracle import (
    ARCHITECTURES,
    REPRESENTATIVE,
    load_fresh,
    load_plain,
    logprobs_alone,
    save_tiny_model,
)
from tests.peft_kinds import INVOCATION, KINDS, TRAINED_TOKENS, save_kind, why_not
from tests.peft_layers import read_layers
from tests.tiers import mostly_nightly

# Heads of k and v fill whole panels of any processor, as those of real models do.
SHAPE = {"hidden_size": 64, "intermediate_size": 96}
DTYPES = ("float32", "bfloat16")
KINDS_OF_LAYER = ("Attention", "MLP", "Norm", "DecoderLayer", "Experts", "Router")
FUSED: Mapping[str, Mapping[str, int]] = {  # in two decoder layers and the last norm
    "llama": {"Attention": 2, "MLP": 2, "Norm": 5, "DecoderLayer": 2},
    "mistral": {"Attention": 2, "MLP": 2, "Norm": 5, "DecoderLayer": 2},
    "qwen2": {"Attention": 2, "MLP": 2, "Norm": 5, "DecoderLayer": 2},
    "qwen3": {"Attention": 2, "MLP": 2, "Norm": 9, "DecoderLayer": 2},  # q and k of each head have norms too
    "gemma2": {"Attention": 2, "MLP": 2, "Norm": 9},  # before and after
    "gemma3_text": {"Attention": 2, "MLP": 2, "Norm": 13},  # both
    "phi3": {"Norm": 5},  # q, k and v, gate and up are one product already
    "gpt2": {},
    "gpt_neox": {},
    "opt": {},
    "granite": {"Attention": 2, "MLP": 2, "Norm": 5},  # multiplies what it adds
    "olmo2": {"MLP": 2, "Norm": 9},  # norms over all heads of q and k at once
    "starcoder2": {"Attention": 2},
    "stablelm": {"Attention": 2, "MLP": 2},  # rotates a part of each head
    "mixtral": {"Attention": 2, "Norm": 5, "Experts": 2, "Router": 2},
    "qwen3_moe": {"Attention": 2, "Norm": 9, "Experts": 2, "Router": 2},
    "cohere": {"MLP": 2},  # rotates neighbours, not halves
    "smollm3": {"Attention": 2, "MLP": 2, "Norm": 5, "DecoderLayer": 2},
    "gpt_oss": {"Attention": 2, "Norm": 5, "Experts": 2, "Router": 2},  # sinks
    # A dense layer's feed-forward part and the shared expert's; K and V by way of a latent vector.
    "deepseek_v3": {"Attention": 2, "MLP": 2, "Norm": 9, "Experts": 1, "Router": 1},
    "gemma4_text": {"Attention": 6, "MLP": 6, "Norm": 46},  # some layers read the keys of others
    "llama4_text": {"Norm": 5},  # rotates neighbours, by complex numbers; multiplies up by gate
}
OWN_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {},
    "deepseek_v3": {**SHAPE, "q_lora_rank": 32},  # as whole panels as real ones
    "gemma4_text": {
        **SHAPE, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
}  # fmt: skip
LENGTHS = (3, 29, 1, 45)
LIMITS = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "block_size": 4, "kv_cache_memory": "1MiB"}


def fused_kinds(engine: LocalEngine) -> dict[str, int]:
    """How many modules run something else than their class's forward, by kind."""
    modules = engine.parts.runner._model.module.modules()
    names = [type(module).__name__ for module in modules if "forward" in vars(module)]
    return dict(Counter(kind for name in names for kind in KINDS_OF_LAYER if kind in name))


def run(engine: LocalEngine, names: list[str | None]) -> list[Answer]:
    generator = torch.Generator().manual_seed(3)
    requests = []
    for i, name in enumerate(names):
        prompt = torch.randint(20, 97, (LENGTHS[i % len(LENGTHS)],), generator=generator).tolist()
        prompt += [TRAINED_TOKENS[0], *INVOCATION, 30 + i]  # whatever an adapter of some kind looks for
        requests.append(engine.request(prompt, name, max_tokens=5, logprobs=1, prompt_logprobs=0, ignore_eos=True))
    answers = engine.run(requests)
    for request, answer in zip(requests, answers, strict=True):
        assert answer.error is None
        answer.token_ids = [*request.prompt_token_ids, *answer.token_ids]
    return answers


def numbers(answer: Answer) -> torch.Tensor:
    """Log-probabilities of all tokens but the first."""
    assert answer.prompt_logprobs is not None
    return torch.tensor([item.logprob for item in (*answer.prompt_logprobs, *answer.logprobs) if item is not None])


def assert_is_plain_transformers(model: Path, answers: list[Answer]) -> None:
    plain = load_plain(model)
    for answer in answers:
        truth = logprobs_alone(plain, answer.token_ids)[:-1]
        chosen = truth.gather(1, torch.tensor(answer.token_ids)[1:, None])[:, 0]
        assert torch.allclose(numbers(answer), chosen, atol=1e-4)


@pytest.mark.parametrize("architecture", mostly_nightly(ARCHITECTURES, *REPRESENTATIVE))
def test_fused_layers_are_those_of_the_table_and_change_nothing(architecture: str, tmp_path: Path) -> None:
    model = save_tiny_model(architecture, tmp_path / "model", **OWN_SHAPES.get(architecture, SHAPE))
    fused, unfused = (LocalEngine(model, fuse_layers=fuse, **LIMITS) for fuse in (True, False))
    assert fused_kinds(fused) == FUSED[architecture]
    assert fused_kinds(unfused) == {}
    found, wanted = (run(engine, [None] * 4) for engine in (fused, unfused))
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert torch.allclose(numbers(one), numbers(other), atol=3e-5)
    assert_is_plain_transformers(model, found)


def _swapped(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def _limited(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As DeepSeek V4's: no probe need ever come near the limit."""
    return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=1e4)) * self.up_proj(x))


def _halved(self: Any, x: torch.Tensor) -> torch.Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype) * 0.5


def _centred(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x - x.mean(-1, keepdim=True)
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


_attention = modeling_llama.LlamaAttention.forward


def _growing(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **others: Any) -> Any:
    """As Ministral 3's: queries grow at far positions only."""
    out, weights = _attention(self, hidden_states, position_embeddings, **others)
    return out * (1 + (others["position_ids"] // 1_000_000)[..., None]), weights


LOOK_ALIKES: Mapping[str, tuple[type[nn.Module], Callable[..., Any], str]] = {
    "gate and up swapped": (modeling_llama.LlamaMLP, _swapped, "MLP"),
    "gate with a limit": (modeling_llama.LlamaMLP, _limited, "MLP"),
    "norm times a half": (modeling_llama.LlamaRMSNorm, _halved, "Norm"),
    "norm without the mean": (modeling_llama.LlamaRMSNorm, _centred, "Norm"),
    "attention that grows": (modeling_llama.LlamaAttention, _growing, "Attention"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alike_that_computes_otherwise_is_left_as_it_is(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, forward, fused = LOOK_ALIKES[name]
    monkeypatch.setattr(kind, "forward", forward)
    model = save_tiny_model("llama", tmp_path / "model", **SHAPE)
    engine = LocalEngine(model, dtype=dtype, **LIMITS)
    left = {fused, "DecoderLayer"}  # which is made of fused parts only
    assert fused_kinds(engine) == {k: n for k, n in FUSED["llama"].items() if k not in left}
    if dtype == "float32":
        assert_is_plain_transformers(model, run(engine, [None] * 4))


def _other_epsilon(fused: FusedNorm) -> None:
    fused._epsilon *= 1000


def _other_offset(fused: FusedNorm) -> None:
    fused._offset = 1.0 - fused._offset


def _other_activation(fused: FusedGatedMLP) -> None:
    fused.activation = next(name for name in ACTIVATIONS if name != fused.activation)


def _gate_and_up_exchanged(fused: FusedGatedMLP) -> None:
    joined = fused.joined
    fused.joined = lambda x: torch.cat(joined(x).chunk(2, -1)[::-1], -1)  # type: ignore[assignment]


def _other_scale(fused: FusedRotaryAttention) -> None:
    object.__setattr__(fused, "settings", replace(fused.settings, scale=fused.settings.scale * 1.05))


def _no_norms(fused: FusedRotaryAttention) -> None:
    object.__setattr__(fused, "query_norm", None)


def _nothing_written(fused: FusedRotaryAttention) -> None:
    """The keys and values that the layer's own code has left in the cache must not do."""
    elsewhere = copy.copy(fused.cache)
    elsewhere.resize(elsewhere.num_blocks)
    object.__setattr__(fused, "cache", elsewhere)


def _short_window(fused: FusedRotaryAttention) -> None:
    object.__setattr__(fused, "settings", replace(fused.settings, window=5))


WRONG: Mapping[str, tuple[ModuleType, Callable[[Any], None], str]] = {
    "epsilon": (norm, _other_epsilon, "Norm"),
    "offset": (norm, _other_offset, "Norm"),
    "activation": (gated_mlp, _other_activation, "MLP"),
    "gate and up": (gated_mlp, _gate_and_up_exchanged, "MLP"),
    "scale": (attention, _other_scale, "Attention"),
    "no norms": (attention, _no_norms, "Attention"),
    "keys and values lost": (attention, _nothing_written, "Attention"),
    "window": (attention, _short_window, "Attention"),
}


@pytest.mark.many(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_replacement_that_is_wrong_is_not_taken(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, spoil, left_out = WRONG[name]
    candidates = kind.candidates

    def spoilt(module: nn.Module, parts: FusionParts) -> list[Any]:
        found: list[Any] = candidates(module, parts)[:1]  # the right one stands first
        for one in found:
            spoil(one)
        return found

    monkeypatch.setattr(kind, "candidates", spoilt)
    engine = LocalEngine(save_tiny_model("qwen3", tmp_path / "model", **SHAPE), dtype=dtype, **LIMITS)
    left = {left_out, "DecoderLayer"}
    assert fused_kinds(engine) == {k: n for k, n in FUSED["qwen3"].items() if k not in left}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "is_fused"), [("silu", True), ("gelu_pytorch_tanh", True), ("gelu", False), ("relu", False)]
)
def test_activation_is_recognised_even_where_its_inputs_are_tiny(
    activation: str, is_fused: bool, dtype: str, tmp_path: Path
) -> None:
    model = save_tiny_model("llama", tmp_path / "model", hidden_act=activation, **SHAPE)
    plain = load_plain(model)
    for name, parameter in plain.named_parameters():
        if "gate_proj" in name:
            parameter.data *= 1e-4  # gelu, exact and by tanh, differ by less than rounding here
    plain.save_pretrained(model)
    engine = LocalEngine(model, dtype=dtype, **LIMITS)
    assert ("MLP" in fused_kinds(engine)) == is_fused
    if dtype == "float32":
        assert_is_plain_transformers(model, run(engine, [None] * 4))


@pytest.mark.parametrize(("dtype", "num_runs"), [("float32", 3), ("bfloat16", 4)])
def test_own_code_of_a_layer_runs_again_only_in_wider_numbers(
    dtype: str, num_runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once to observe the model, once untouched, once recorded; rounded numbers are then held against float32's."""
    runs, forward = Counter[nn.Module](), modeling_llama.LlamaMLP.forward

    @functools.wraps(forward)
    def counted(self: nn.Module, *arguments: Any) -> Any:
        runs[self] += 1
        return forward(self, *arguments)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", counted)
    engine = LocalEngine(save_tiny_model("llama", tmp_path / "model", **SHAPE), dtype=dtype, **LIMITS)
    assert fused_kinds(engine) == FUSED["llama"]
    assert list(runs.values())[:2] == [num_runs] * 2  # those of the small copy come after them


def test_layers_in_another_type_are_not_fused(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model", **SHAPE)
    assert fused_kinds(LocalEngine(model, dtype="float16", **LIMITS)) == {}


def test_some_biases_of_joined_layers_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = modeling_qwen2.Qwen2Attention.__init__

    def without_bias_of_k(self: Any, *arguments: Any, **others: Any) -> None:
        made(self, *arguments, **others)
        self.k_proj = nn.Linear(self.k_proj.in_features, self.k_proj.out_features, bias=False)

    monkeypatch.setattr(modeling_qwen2.Qwen2Attention, "__init__", without_bias_of_k)
    model = save_tiny_model("qwen2", tmp_path / "model", **SHAPE)
    engine = LocalEngine(model, **LIMITS)
    assert fused_kinds(engine) == FUSED["qwen2"]
    assert_is_plain_transformers(model, run(engine, [None] * 4))


def test_layers_whose_heads_do_not_fill_panels_are_served_as_they_are(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path / "model", hidden_size=24, intermediate_size=20)
    engine = LocalEngine(model, **LIMITS)
    assert fused_kinds(engine) == {"Norm": 5}
    assert_is_plain_transformers(model, run(engine, [None] * 4))


@pytest.mark.parametrize("architecture", ["qwen2", pytest.param("gemma3_text", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("lora_kernel", ["native", pytest.param("loop", marks=pytest.mark.nightly)])
def test_adapters_of_every_kind_act_in_fused_layers_as_in_others(
    architecture: str, lora_kernel: str, tmp_path: Path
) -> None:
    model = save_tiny_model(architecture, tmp_path / "model", **SHAPE)
    layers = read_layers(load_fresh(model))
    is_tied = bool(load_fresh(model).config.tie_word_embeddings)
    kinds = [n for n in KINDS if KINDS[n].tied in {None, is_tied} and why_not(n, architecture, layers) is None]
    folders = {kind: save_kind(kind, architecture, model, tmp_path / kind) for kind in kinds}
    doorman = LocalEngine(model, **LIMITS)
    folders = {kind: folder for kind, folder in folders.items() if refusal(doorman, folder) is None}
    assert {"plain", "dora", "save_norms", "ia3"} <= folders.keys()
    assert ("bias_all" in folders) == (architecture == "qwen2")
    settings = {"max_loras": 5, "lora_kernel": lora_kernel, **LIMITS}
    fused, unfused = (LocalEngine(model, folders, fuse_layers=fuse, **settings) for fuse in (True, False))
    left = {"DecoderLayer"} if lora_kernel == "loop" else set()  # whole layers need the native kernel
    assert fused_kinds(fused) == {k: n for k, n in FUSED[architecture].items() if k not in left}
    found, wanted = (run(engine, [None, *folders]) for engine in (fused, unfused))
    assert fused.max_adapters_in_batch >= 3
    for name, one, other in zip([None, *folders], found, wanted, strict=True):
        assert one.token_ids == other.token_ids, name
        assert torch.allclose(numbers(one), numbers(other), atol=1e-4), name
