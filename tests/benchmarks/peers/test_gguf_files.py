"""Checkpoints as llama.cpp reads them: names, the order of q's and k's rows, bytes of bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.peers.gguf_files import (
    adapter_tensor_name,
    module_name,
    num_heads_to_permute,
    permuted,
    read_tensors,
)

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 9, "num_key_value_heads": 3}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.embed_tokens", "token_embd"),
        ("model.layers.0.self_attn.q_proj", "blk.0.attn_q"),
        ("model.layers.29.self_attn.o_proj", "blk.29.attn_output"),
        ("model.layers.7.mlp.down_proj", "blk.7.ffn_down"),
        ("model.layers.7.input_layernorm", "blk.7.attn_norm"),
        ("model.layers.7.post_attention_layernorm", "blk.7.ffn_norm"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
    ],
)
def test_modules_have_llama_cpps_names(path: str, name: str) -> None:
    assert module_name(path) == name


def test_tensors_of_an_adapter_are_named_after_the_weight_they_change() -> None:
    name = "base_model.model.model.layers.3.mlp.gate_proj.lora_{}.weight"
    assert adapter_tensor_name(name.format("A")) == "blk.3.ffn_gate.weight.lora_a"
    assert adapter_tensor_name(name.format("B")) == "blk.3.ffn_gate.weight.lora_b"


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary", "model.layers.x.mlp.up_proj", "transformer.h.0"])
def test_a_module_without_a_place_in_llama_cpp_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no name for"):
        module_name(name)


def test_a_tensor_that_is_no_plain_lora_is_refused() -> None:
    with pytest.raises(ValueError, match="no part of a plain LoRA"):
        adapter_tensor_name("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector")


def rotated_in_pairs(rows: torch.Tensor, num_heads: int, angles: torch.Tensor) -> torch.Tensor:
    """llama.cpp's way: (x[2i], x[2i + 1]) of each head as one complex number, turned by angle i."""
    pairs = torch.view_as_complex(rows.reshape(num_heads, -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).reshape(-1)


def test_permuted_rows_rotated_in_pairs_are_transformers_rotated_halves_in_the_new_order() -> None:
    torch.manual_seed(0)
    num_heads, size = 3, 8
    rows, angles = torch.randn(num_heads * size, dtype=torch.float64), torch.rand(size // 2, dtype=torch.float64)
    both = torch.cat([angles, angles])[None, None, :]
    query = rows.reshape(1, num_heads, 1, size)
    theirs, _ = apply_rotary_pos_emb(query, query, both.cos(), both.sin())
    expected = torch.from_numpy(permuted(theirs.reshape(-1).numpy(), num_heads))
    found = rotated_in_pairs(torch.from_numpy(permuted(rows.numpy(), num_heads)), num_heads, angles)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, theirs.reshape(-1))


def test_permuting_moves_whole_rows_and_keeps_heads_apart() -> None:
    rows = np.arange(16).reshape(8, 2)
    assert permuted(rows, 2).tolist() == [rows[index].tolist() for index in (0, 2, 1, 3, 4, 6, 5, 7)]


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("blk.0.attn_q.weight", 9),
        ("blk.0.attn_k.weight", 3),
        ("blk.0.attn_q.weight.lora_b", 9),
        ("blk.0.attn_q.weight.lora_a", None),
        ("blk.0.attn_v.weight", None),
        ("blk.0.attn_q_norm.weight", None),
    ],
)
def test_only_rows_of_q_and_k_change_their_order(name: str, heads: int | None) -> None:
    assert num_heads_to_permute(name, LLAMA) == heads
    assert num_heads_to_permute(name, QWEN2) is None


def test_bfloat16_is_read_without_loss(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).to(torch.bfloat16), "b": torch.randn(4), "c": torch.randn(2, 2).half()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = dict(read_tensors(tmp_path))
    assert set(found) == {"a", "b", "c"}
    for name, tensor in tensors.items():
        assert torch.equal(torch.from_numpy(found[name]), tensor.float())
