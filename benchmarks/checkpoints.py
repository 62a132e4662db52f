"""Seeded checkpoints of random weights: a Llama shape of about 135M, a tokenizer over its vocabulary, adapters.

Random weights cost exactly what trained ones cost. The shape is SmolLM-135M's (hidden 576, 30 layers, 9 query heads
on 3 KV heads), so figures compare with what others publish for it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RANKS = (8, 16, 32)
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCAB_SIZE = 49152
SHAPES = {
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "38m": {  # for a thousand adapters: 2.6 MB each at rank 16
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "4m": {  # for many short requests: what is measured is the scheduler
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "tiny": {  # for trying the script out
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def make_checkpoints(cache: Path, shape: str, num_adapters: int, seed: int) -> tuple[Path, dict[str, Path]]:
    """The model's folder and adapter name -> folder, made once per shape and seed under `cache`."""
    root = cache / f"llama-{shape}-seed{seed}"
    model = root / "model"
    if not model.exists():
        _into_place(model, lambda folder: _write_model(folder, SHAPES[shape], seed))
    adapters = {f"bench/a{index:02d}": root / "adapters" / f"a{index:02d}" for index in range(num_adapters)}
    missing = [(index, folder) for index, folder in enumerate(adapters.values()) if not folder.exists()]
    shapes = _linear_shapes(model) if missing else {}
    for index, folder in missing:
        _into_place(folder, lambda target, index=index: _write_adapter(target, shapes, index, seed))
    return model, adapters


def make_adapters(cache: Path, shape: str, count: int, seed: int, rank: int) -> dict[str, Path]:
    """Adapter name -> folder of `count` adapters of one rank for a model of `make_checkpoints`, made once."""
    root = cache / f"llama-{shape}-seed{seed}"
    folders = {f"rank{rank}/a{index:04d}": root / f"rank{rank}" / f"a{index:04d}" for index in range(count)}
    missing = [(index, folder) for index, folder in enumerate(folders.values()) if not folder.exists()]
    shapes = _linear_shapes(root / "model") if missing else {}
    for index, folder in missing:
        _into_place(folder, lambda target, index=index: _write_adapter(target, shapes, index, seed, rank))
    return folders


def _into_place(folder: Path, write: Callable[[Path], None]) -> None:
    """Write beside, then rename: an interrupted run leaves no half checkpoint."""
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write(beside)
    beside.rename(folder)


def _write_model(folder: Path, shape: dict[str, int], seed: int) -> None:
    torch.manual_seed(seed)
    sizes = {**shape, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    network = LlamaForCausalLM(config)
    for part in network.modules():
        if isinstance(part, torch.nn.Linear) and part is not network.lm_head:
            torch.nn.init.normal_(part.weight, std=part.in_features**-0.5)  # else it would only echo its last token
    network.to(torch.bfloat16).save_pretrained(folder)
    words = {f"t{index}": index for index in range(config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "t0", "unk_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def _linear_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """Module path -> (out_features, in_features) of every layer that the adapters target."""
    with torch.device("meta"):
        network = LlamaForCausalLM(LlamaConfig.from_pretrained(model))
    linears = ((name, part) for name, part in network.named_modules() if isinstance(part, torch.nn.Linear))
    return {name: tuple(part.weight.shape) for name, part in linears if name.endswith(LORA_TARGETS)}


def _write_adapter(
    folder: Path, shapes: dict[str, tuple[int, int]], index: int, seed: int, rank: int | None = None
) -> None:
    """B is random too (a fresh PEFT adapter's is zero), small, so that the logits change but stay finite."""
    generator = torch.Generator().manual_seed(seed * 1000 + index + 1)
    rank = rank or RANKS[index % len(RANKS)]
    tensors = {}
    for name, (num_out, num_in) in shapes.items():
        a = torch.randn(rank, num_in, generator=generator) / num_in**0.5
        b = torch.randn(num_out, rank, generator=generator) * 0.05
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(LORA_TARGETS), task_type="CAUSAL_LM")
    config.base_model_name_or_path = "bench-base"
    config.inference_mode = True
    config.save_pretrained(folder)


def num_weight_bytes(folder: Path) -> int:
    """Bytes of the tensors in a checkpoint's safetensors files, headers left out."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(
            entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values() if "dtype" in entry
        )
    return total
