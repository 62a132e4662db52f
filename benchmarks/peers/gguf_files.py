"""A checkpoint and its LoRA adapters as GGUF files, for llama.cpp. Runs by its path in llama.cpp's own environment.

    python gguf_files.py model FOLDER OUT.gguf --dtype f16
    python gguf_files.py adapter FOLDER OUT.gguf --dtype f16 --model MODEL_FOLDER

Llama and Qwen2 shapes. Needs numpy, and for writing the PyPI package `gguf`. What differs from transformers' layout:
the names; and for Llama the order of the rows of q and k, since llama.cpp rotates neighbouring pairs of a head
(x[2i], x[2i + 1]) where transformers rotates halves (x[i], x[i + size / 2]). Qwen2 is rotated by halves there too.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}  # transformers' architecture -> llama.cpp's
LAYER_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OTHER_PARTS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def module_name(path: str) -> str:
    """`model.layers.3.self_attn.q_proj` -> `blk.3.attn_q`. Raises ValueError for what has no place in llama.cpp."""
    if path in OTHER_PARTS:
        return OTHER_PARTS[path]
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", path)
    if found is None or found[2] not in LAYER_PARTS:
        raise ValueError(f"no name for {path} in llama.cpp")
    return f"blk.{found[1]}.{LAYER_PARTS[found[2]]}"


def adapter_tensor_name(name: str) -> str:
    """PEFT's `base_model.model.<path>.lora_A.weight` -> `<name>.weight.lora_a`. Raises ValueError."""
    found = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
    if found is None:
        raise ValueError(f"{name} is no part of a plain LoRA")
    return f"{module_name(found[1])}.weight.lora_{found[2].lower()}"


def permuted(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of q or k, [heads * size, ...], from halves to pairs: new row 2i is old row i, 2i + 1 is i + size / 2."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def num_heads_to_permute(name: str, config: dict[str, Any]) -> int | None:
    """Heads whose rows change their order in this tensor; None: it stays as it is. A LoRA's A has no such rows."""
    part = next((key for key in HEADS if re.search(rf"\.{key}\.", name)), None)
    if part is None or name.endswith("lora_a") or NAMES[config["architectures"][0]] != "llama":
        return None
    return int(config[HEADS[part]])


def read_tensors(folder: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor of a folder's safetensors files as float32; bfloat16 are the upper halves of float32."""
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        length = int.from_bytes(bytes(data[:8]), "little")
        header = json.loads(bytes(data[8 : 8 + length]))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                yield name, _as_float32(data[8 + length + begin : 8 + length + end], entry)


def _as_float32(data: NDArray[np.uint8], entry: dict[str, Any]) -> NDArray[np.float32]:
    if entry["dtype"] == "BF16":
        values = (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = data.view({"F32": "<f4", "F16": "<f2"}[entry["dtype"]]).astype(np.float32)
    return values.reshape(entry["shape"])


def write_model(folder: Path, file: Path, dtype: str) -> None:
    """Weights as `dtype`, norms and biases as float32. A tied output head is left out: llama.cpp does the same."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, NAMES[config["architectures"][0]])
    _add_sizes(writer, config)
    _add_words(writer, config)
    for source, values in read_tensors(folder):
        path, _, kind = source.rpartition(".")
        if path != "lm_head" or not config["tie_word_embeddings"]:
            _add(writer, f"{module_name(path)}.{kind}", values, config, dtype if values.ndim > 1 else "f32")
    _write(writer)


def write_adapter(folder: Path, file: Path, dtype: str, model: Path) -> None:
    """llama.cpp scales by alpha / rank, as plain LoRA does. Raises ValueError for other kinds."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    lora = json.loads((folder / "adapter_config.json").read_text())
    if lora.get("use_rslora") or lora.get("use_dora") or lora.get("rank_pattern") or lora.get("alpha_pattern"):
        raise ValueError(f"{folder} is no plain LoRA")
    writer = gguf.GGUFWriter(file, NAMES[config["architectures"][0]])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(lora["lora_alpha"]))
    for source, values in read_tensors(folder):
        _add(writer, adapter_tensor_name(source), values, config, dtype)
    _write(writer)


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_type("model")
    writer.add_name("bench")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(_rope_base(config))
    writer.add_vocab_size(config["vocab_size"])


def _rope_base(config: dict[str, Any]) -> float:
    """transformers 5 writes `rope_parameters`, earlier ones `rope_theta`."""
    return float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])


def _add_words(writer: Any, config: dict[str, Any]) -> None:
    """Word <id> is ` t<id>`, as in the checkpoints' own tokenizers; the first three are special and have no text."""
    import gguf

    count = config["vocab_size"]
    normal, special = int(gguf.TokenType.NORMAL), int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"\u2581t{index}".encode() for index in range(count)])
    writer.add_token_scores([-float(index) for index in range(count)])
    writer.add_token_types([special] * 3 + [normal] * (count - 3))
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def _add(writer: Any, name: str, values: NDArray[np.float32], config: dict[str, Any], dtype: str) -> None:
    import gguf

    num_heads = num_heads_to_permute(name, config)
    if num_heads is not None:
        values = permuted(values, num_heads)
    kind = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16}.get(dtype)
    kind = kind if kind is not None else gguf.GGMLQuantizationType.BF16
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["model", "adapter"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=["f32", "f16", "bf16"], default="f16")
    parser.add_argument("--model", type=Path, help="the base model's folder, for an adapter")
    options = parser.parse_args()
    if options.kind == "model":
        write_model(options.folder, options.out, options.dtype)
    else:
        write_adapter(options.folder, options.out, options.dtype, options.model)


if __name__ == "__main__":
    main()
