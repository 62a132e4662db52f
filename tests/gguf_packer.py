"""Tiny GGUF files, written by the library `gguf`: names, facts and most kinds of blocks are the library's, K kinds are
packed here by their documentation, number by number; and what the files hold, as the library reads it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from tests.float8_packer import WEIGHTS, rewritten

Kind = gguf.GGMLQuantizationType
WIDE = {"hidden_size": 256, "intermediate_size": 256}  # for kinds with blocks of 256
ARCHITECTURES = {  # transformers' model_type -> gguf's
    "llama": gguf.MODEL_ARCH.LLAMA, "mixtral": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3_text": gguf.MODEL_ARCH.GEMMA3, "phi3": gguf.MODEL_ARCH.PHI3,
}  # fmt: skip


def packed(weight: NDArray[np.float32], kind: Kind) -> NDArray[Any]:
    """[out, in] -> the bytes of its blocks, [out, bytes]; floats stay numbers."""
    if kind.name in ("Q4_K", "Q5_K", "Q6_K"):
        blocks = [_k_block(block, kind) for block in weight.reshape(-1, 256)]
        return np.frombuffer(b"".join(blocks), np.uint8).reshape(len(weight), -1)
    return quantize(weight, kind)


def _k_block(block: NDArray[np.float32], kind: Kind) -> bytes:
    """256 numbers in one block of a K kind."""
    half = np.float16
    if kind is Kind.Q6_K:
        groups = block.reshape(16, 16)
        scale = half(np.abs(groups).max() / 32 / 127)
        scales = np.clip(np.round(np.abs(groups).max(1) / 32 / float(scale)), 1, 127).astype(np.int8)
        numbers = np.clip(np.round(groups / (float(scale) * scales[:, None])), -32, 31).astype(int) + 32
        quarters = numbers.reshape(2, 4, 32)  # of each half of the block
        low = quarters[:, :2] & 15 | (quarters[:, 2:] & 15) << 4
        high = sum(quarters[:, which] >> 4 << 2 * which for which in range(4))
        return _bytes(low) + _bytes(high) + scales.tobytes() + scale.tobytes()
    top = 15 if kind is Kind.Q4_K else 31
    groups = block.reshape(8, 32)
    least = np.maximum(-groups.min(1), 0)
    steps = (groups.max(1) + least) / top
    scale, of_least = half(steps.max() / 63), half(max(least.max(), 1e-3) / 63)
    scales = np.clip(np.round(steps / float(scale)), 1, 63).astype(int)
    leasts = np.clip(np.round(least / float(of_least)), 0, 63).astype(int)
    found = (groups + float(of_least) * leasts[:, None]) / (float(scale) * scales[:, None])
    numbers = np.clip(np.round(found), 0, top).astype(int)
    six = bytearray(12)
    for group in range(4):
        six[group] = scales[group] | scales[group + 4] >> 4 << 6
        six[group + 4] = leasts[group] | leasts[group + 4] >> 4 << 6
        six[group + 8] = scales[group + 4] & 15 | (leasts[group + 4] & 15) << 4
    low = numbers[::2] & 15 | (numbers[1::2] & 15) << 4
    high = sum(numbers[group] >> 4 << group for group in range(8))
    return scale.tobytes() + of_least.tobytes() + bytes(six) + (b"" if top == 15 else _bytes(high)) + _bytes(low)


def _bytes(numbers: Any) -> bytes:
    return bytes(numbers.astype(np.uint8).tobytes())


def save_gguf(
    plain: Path, root: Path, kind: str, *, name: str = "model", factors: NDArray[Any] | None = None, **facts: Any
) -> tuple[Path, Path]:
    """A GGUF file of a plain model, and the plain model of the very numbers that the file holds. `factors`: of the
    frequencies of positions. `facts`: in place of those of the model; None: left out.
    """
    config = json.loads((plain / "config.json").read_text())
    root.mkdir(parents=True, exist_ok=True)
    file, arch = root / f"{name}.gguf", ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    _add_facts(writer, config)
    _add_words(writer, config, plain)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    numbers = dict[str, Tensor]()
    stacks = dict[str, dict[int, NDArray[Any]]]()
    for source, weight in load_file(plain / WEIGHTS).items():
        own = weight.float().numpy()
        used = Kind[kind] if own.ndim > 1 and "gate.weight" not in source.replace("_", "") else Kind.F32
        blocks = packed(own, used) if own.ndim == 2 else own
        numbers[source] = torch.from_numpy(np.array(dequantize(blocks, used)).reshape(own.shape))
        if "lm_head" in source and config.get("tie_word_embeddings"):
            continue
        path, _, last = source.rpartition(".")
        expert = re.search(r"experts\.(\d+)\.", source)
        target = names.get_name(path.replace(f"experts.{expert[1]}.", "experts.") if expert else path)
        assert target is not None, source
        if expert:
            stacks.setdefault(f"{target}.{last}", {})[int(expert[1])] = blocks
        else:
            _add_tensor(writer, f"{target}.{last}", _as_stored(blocks, target, config), used)
    for target, of_each in stacks.items():
        _add_tensor(writer, target, np.stack([of_each[number] for number in sorted(of_each)]), Kind[kind])
    if factors is not None:
        _add_tensor(writer, "rope_freqs.weight", factors, Kind.F32)
    for key, value in facts.items():
        _change(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain_again = rewritten(plain, root / f"{name}_dequantized", lambda source, _: {source: numbers[source]})
    return file, plain_again


def _as_stored(blocks: NDArray[Any], target: str, config: Mapping[str, Any]) -> NDArray[Any]:
    """Rows of q and k in pairs, and norms with 1 added, where llama.cpp has them so."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(target.rpartition(".")[2])
    if heads and config["model_type"] in ("llama", "mixtral", "mistral"):
        halves = blocks.reshape(config[heads], 2, -1, *blocks.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(blocks.shape))
    return blocks + 1 if config["model_type"].startswith("gemma") and target.endswith("norm") else blocks


def _add_tensor(writer: gguf.GGUFWriter, name: str, blocks: NDArray[Any], kind: Kind) -> None:
    writer.add_tensor(name, np.ascontiguousarray(blocks), raw_dtype=kind)


def _add_facts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads, ropes = config["num_attention_heads"], config["rope_parameters"]
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])
    if config["model_type"] in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"].startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _add_words(writer: gguf.GGUFWriter, config: Mapping[str, Any], folder: Path) -> None:
    """The folder's own tokenizer, which is byte-level BPE with digits apart; else the words w1, w2 and so on."""
    words = (f"w{number}" for number in range(1, config["vocab_size"] - 4))
    tokens, special, merges = ["<pad>", "<s>", "</s>", "w", "1", *words], {0, 1, 2}, ["w 1"]
    writer.add_tokenizer_model("gpt2")
    if (folder / "tokenizer.json").exists():
        stored = json.loads((folder / "tokenizer.json").read_text())
        by_id = {number: token for token, number in stored["model"]["vocab"].items()}
        by_id |= {token["id"]: token["content"] for token in stored["added_tokens"]}
        tokens, special = [by_id[number] for number in range(len(by_id))], {one["id"] for one in stored["added_tokens"]}
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in stored["model"]["merges"]]
        writer.add_chat_template((folder / "chat_template.jinja").read_text())
        writer.add_add_bos_token(True)
    writer.add_tokenizer_pre("smollm" if len(merges) > 1 else "gpt-2")
    writer.add_token_list(tokens)
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_token_types([control if number in special else normal for number in range(len(tokens))])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    if isinstance(ends, list):
        writer.add_eot_token_id(ends[1])
    writer.add_pad_token_id(config["pad_token_id"])


def _change(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    facts = writer.kv_data[0]
    if value is None:
        del facts[key]
    else:
        facts[key] = gguf.gguf_writer.GGUFValue(value, gguf.GGUFValueType.get_type(value))
