"""A GGUF file as the base model: its header, config and names, and each of its blocks. No model is made."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import torch

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.core.gguf_file import TYPES, read_gguf
from lora_serve.core.settings import Settings
from lora_serve.model.loading.frozen_model import read_model_config
from lora_serve.model.loading.packed_checkpoints import plan_packed
from tests.fuzz.files import empty_folder, file_of
from tests.fuzz.mutating import within

ERRORS = (ConfigError, ModelError)
_ARCHITECTURES = ("llama", "qwen2", "qwen3moe", "gemma3", "phi3")
_NUMBERS = {kind: number for number, (kind, _, _) in TYPES.items()}
_WORDS = ("general.architecture", "general.alignment", *_ARCHITECTURES, *_NUMBERS, "blk.0.attn_q.weight")


def fuzz(data: bytes) -> None:
    with empty_folder() as folder:
        file = folder / "model.gguf"
        file.write_bytes(data)
        part = Settings(model=str(file), device="cpu").part(ModelConfig)
        plan = plan_packed(part, read_model_config(part), torch.device("cpu"))
        assert plan is not None
        plan.check()
        for layer in plan.check.__self__.layers:  # type: ignore[attr-defined] # the checkpoint's own
            assert layer.dequantized(torch.float32).shape == layer.size


def seeds() -> Iterator[bytes]:
    for architecture in _ARCHITECTURES:
        for kind in ("Q8_0", "Q4_0", "F16"):
            yield sound(architecture, kind)
    yield sound("llama", "Q6_K", 256)
    yield sound("llama", "Q4_K", 256)


def sound(architecture: str, kind: str, width: int = 32) -> bytes:
    """A file with a layer of two heads, as far as the header tells."""
    facts: dict[str, Any] = {"general.architecture": architecture, "general.alignment": 32}
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": width, "feed_forward_length": width}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "attention.layer_norm_rms_epsilon": 1e-6}
    facts |= {f"{architecture}.{name}": value for name, value in sizes.items()}
    facts |= {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.token_type": [1, 3]}
    if width > 32:  # so that blocks of 256 find room
        facts |= {f"{architecture}.attention.{name}_length": 8 for name in ("key", "value")}
    queries = min(width, 16 if width > 32 else 32)
    shapes = {"token_embd": 2, "blk.0.attn_q": queries, "blk.0.attn_k": queries // 2, "blk.0.ffn_down": 8}
    if architecture == "phi3":
        shapes["blk.0.attn_qkv"] = 2 * width
        del shapes["blk.0.attn_q"], shapes["blk.0.attn_k"]
    tensors = {f"{name}.weight": [kind, [rows, width]] for name, rows in shapes.items()}
    return _dump([facts, {**tensors, "output_norm.weight": ["F32", [width]]}, 0])


def _load(data: bytes) -> Any:
    with file_of(data) as path:
        file = read_gguf(path, texts=True)
    tensors = {name: [one.type, list(one.shape)] for name, one in file.tensors.items()}
    return [dict(file.facts), tensors, 0]


def _dump(tree: Any) -> bytes:
    """With so many bytes less at the end; tensors lie one behind the other."""
    facts, tensors, less = tree
    header, size = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(facts))], 0
    header += [_text(key) + _value(value) for key, value in facts.items()]
    for name, (kind, shape) in tensors.items():
        number = _NUMBERS.get(kind, 99)
        place = struct.pack("<IQ", number, size)
        header.append(_text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)) + place)
        _, block, num_bytes = TYPES.get(number, ("", 1, 1))
        count = 1
        for one in shape:
            count *= one
        size += -(-min(max(count // block * num_bytes, 0), 8192) // 32) * 32
    whole = b"".join(header)
    content = bytes((at * 7 + 1) % 59 for at in range(max(min(size, 16384) - max(less, 0), 0)))
    return whole + bytes(-len(whole) % 32) + content


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """The type and the value."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<Iq", 11, value) if value < 0 else struct.pack("<IQ", 10, value)
        case float():
            return struct.pack("<Id", 12, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack(f"<IIQ{len(value)}q", 9, 11, len(value), *value)


mutate = within(_load, _dump, _WORDS)
