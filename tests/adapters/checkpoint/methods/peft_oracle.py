"""Adapters that PEFT trained (at random), saved and loaded again on tiny models; and what our methods make of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from lora_serve.adapters.checkpoint.methods.factors import Array, Factors
from lora_serve.adapters.checkpoint.methods.ia3 import Gains
from lora_serve.adapters.checkpoint.saved import to_array
from lora_serve.core.model_spec import LinearShape

TOKENS = torch.arange(1, 12).unsqueeze(0)
OURS = ("hada_", "lokr_", "vera_lambda_", "lora_", "ia3_l")


def llama() -> Any:
    """Linear layers of 24 -> 24, 12 (k and v), 40 (mlp) and 37 (the head, a prime), and 40 -> 24."""
    torch.manual_seed(0)
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=37, num_key_value_heads=2, tie_word_embeddings=False, **shape)
    return LlamaForCausalLM(config).eval()


def gpt2() -> Any:
    """Conv1D layers of 16 -> 48 (c_attn), 16 -> 16, 16 -> 64 and 64 -> 16, with biases that are not zero."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
    ).eval()
    for module in model.modules():
        if isinstance(module, Conv1D):
            torch.nn.init.normal_(module.bias)
    return model


@dataclass(frozen=True)
class Adapter:
    folder: Path
    oracle: Any  # PEFT's model, loaded from the folder
    base: Any
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def layers(self) -> dict[str, Any]:
        named = self.oracle.base_model.model.named_modules()
        return {name: layer for name, layer in named if isinstance(layer, BaseTunerLayer)}

    def linears(self) -> dict[str, LinearShape]:
        return {name: _shape(self.base.get_submodule(name)) for name in self.layers()}

    def logits(self) -> Tensor:
        return self.oracle(TOKENS).logits


def trained(config: peft.PeftConfig, folder: Path, base: Any = llama, dtype: torch.dtype = torch.float32) -> Adapter:
    """Every trained parameter random, saved by PEFT in `dtype`, and loaded by PEFT in float32."""
    model = peft.get_peft_model(base(), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if any(ours in name for ours in OURS):
            torch.nn.init.normal_(parameter, std=0.5)
    model.to(dtype).save_pretrained(folder, save_embedding_layers=False)
    oracle = peft.PeftModel.from_pretrained(base(), folder).eval()
    settings = json.loads((folder / "adapter_config.json").read_text())
    return Adapter(folder, oracle, base(), settings, load_file(folder / "adapter_model.safetensors"))


def by_module(method: Any, adapter: Adapter) -> dict[str, dict[str, Array]]:
    """module -> role -> array, the whole model's roles (VeRA) in every module."""
    shared, own = {}, {name: {} for name in adapter.layers()}
    for name, tensor in adapter.tensors.items():
        match = method.ROLES.match(name)
        assert match is not None, name
        (shared if match["module"] is None else own[match["module"]])[match["role"]] = to_array(tensor)
    return {module: roles | shared for module, roles in own.items()}


def converted(method: Any, adapter: Adapter, generated: Mapping[str, Array] | None = None) -> dict[str, Factors]:
    linears = adapter.linears()
    plan = method.plan(method.parse(adapter.config), linears)
    table = {}
    for module, roles in by_module(method, adapter).items():
        sizes = linears[module].in_features, linears[module].out_features
        rank = method.bind(plan, module, {role: array.shape for role, array in roles.items()}, *sizes)
        table[module] = factors = method.factors(plan, module, roles | dict(generated or {}), *sizes)
        assert (factors.a.shape, factors.b.shape) == ((rank, sizes[0]), (rank, sizes[1]))
        assert factors.a.dtype == factors.b.dtype == np.float32
    return table


def assert_same_deltas(table: Mapping[str, Factors], adapter: Adapter) -> None:
    for module, factors in table.items():
        theirs = adapter.layers()[module].get_delta_weight("default").detach()
        theirs = theirs.T if isinstance(adapter.base.get_submodule(module), Conv1D) else theirs
        assert distance(delta(factors), theirs.double().numpy()) < 1e-5, module


def delta(factors: Factors) -> Array:
    return factors.scale * (factors.b.T.astype(np.float64) @ factors.a.astype(np.float64))


def distance(ours: Array, theirs: Array) -> float:
    """Relative Frobenius distance."""
    return float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-30))


def assert_same_logits(table: Mapping[str, Factors | Gains], adapter: Adapter) -> None:
    plain = adapter.base(TOKENS).logits
    with _applied(table, adapter.base):
        ours = adapter.base(TOKENS).logits
    theirs = adapter.logits()
    assert (theirs - plain).abs().max() > 1e-2  # or the test would say nothing
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@contextmanager
def _applied(table: Mapping[str, Factors | Gains], base: Any) -> Iterator[None]:
    handles = [hook for module, what in table.items() for hook in _hooks(base.get_submodule(module), what)]
    yield
    for handle in handles:
        handle.remove()


def _hooks(layer: Any, what: Factors | Gains) -> Iterator[Any]:
    if isinstance(what, Factors):
        a, b = torch.from_numpy(what.a), torch.from_numpy(what.b)
        yield layer.register_forward_hook(lambda _, x, y: y + what.scale * (x[0] @ a.T) @ b)
    elif what.input is not None:
        yield layer.register_forward_pre_hook(lambda _, x: (x[0] * torch.from_numpy(what.input),))
    else:
        yield layer.register_forward_hook(lambda _, x, y: y * torch.from_numpy(what.output))


def _shape(layer: Any) -> LinearShape:
    rows, columns = layer.weight.shape
    return LinearShape(rows, columns) if isinstance(layer, Conv1D) else LinearShape(columns, rows)
