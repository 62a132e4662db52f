"""Writes checkpoints: a model's folder, shard by shard, with a tokenizer in which `t7` is token 7; adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from lora_serve.random_weights import LORA_TARGETS, RANKS, SHAPES, ModelShape

SHARD_BYTES = 2**30  # a shard, and one slab of its largest tensor in float32, is all that is in memory
SLAB = 2**24  # elements drawn at once
EMBEDDING_STD = 0.02
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
B_STD = 0.05  # a fresh adapter's B is zero; this one changes the logits, which stay finite


def model_root(cache: Path, shape: str, seed: int) -> Path:
    """The folder of one shape and seed: its model and adapters."""
    return cache / f"{SHAPES[shape].model_type}-{shape}-seed{seed}"


def make_model(cache: Path, shape: str, seed: int) -> Path:
    """The model's folder, in bfloat16; the same seed gives the same weights. Shapes are the keys of SHAPES."""
    folder = model_root(cache, shape, seed) / "model"
    if not folder.exists():
        into_place(folder, lambda target: _write_model(target, SHAPES[shape], seed))
    return folder


def empty_network(folder: Path) -> nn.Module:
    """The network of a model's folder without its weights."""
    with torch.device("meta"):
        network: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))  # type: ignore[no-untyped-call]
    return network


def network_of(shape: ModelShape) -> tuple[PretrainedConfig, nn.Module]:
    """The configuration, and the network without its weights."""
    config = AutoConfig.for_model(
        shape.model_type,
        **shape.sizes,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.is_tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        network: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return config, network


def _write_model(folder: Path, shape: ModelShape, seed: int) -> None:
    config, network = network_of(shape)
    config.architectures = [type(network).__name__]
    config.save_pretrained(folder)
    _write_weights(folder, _parameters(network, shape), seed)
    _write_tokenizer(folder, shape.vocab_size)


def _parameters(network: nn.Module, shape: ModelShape) -> list[tuple[str, torch.Size]]:
    named = ((name, tensor.shape) for name, tensor in network.state_dict().items())
    return [(name, size) for name, size in named if not (shape.is_tied and name == "lm_head.weight")]


def _write_weights(folder: Path, parameters: list[tuple[str, torch.Size]], seed: int) -> None:
    """In the layout of a sharded checkpoint, or one file if it fits into one shard."""
    shards = list(_shards(parameters))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        one = len(shards) == 1
        name = "model.safetensors" if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {path: _weight(path, size, seed, index) for index, path, size in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        total = sum(2 * size.numel() for _, size in parameters)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(parameters: list[tuple[str, torch.Size]]) -> Iterator[list[tuple[int, str, torch.Size]]]:
    """(number of the parameter, path, shape), SHARD_BYTES at most unless one tensor is larger."""
    shard: list[tuple[int, str, torch.Size]] = []
    num_bytes = 0
    for index, (path, size) in enumerate(parameters):
        if shard and num_bytes + 2 * size.numel() > SHARD_BYTES:
            yield shard
            shard, num_bytes = [], 0
        shard.append((index, path, size))
        num_bytes += 2 * size.numel()
    yield shard


def _weight(path: str, size: torch.Size, seed: int, index: int) -> Tensor:
    """Normal values, with the deviation that keeps a layer's output as large as its input."""
    if len(size) == 1:
        return (torch.zeros if path.endswith("bias") else torch.ones)(size, dtype=torch.bfloat16)
    is_embedding = path.endswith(("embed_tokens.weight", "lm_head.weight"))
    deviation = EMBEDDING_STD if is_embedding else size[-1] ** -0.5
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    weight = torch.empty(size, dtype=torch.bfloat16)
    rows = max(1, SLAB // size[1:].numel())
    for start in range(0, size[0], rows):
        slab = weight[start : start + rows]
        slab.copy_(torch.randn(slab.shape, generator=generator).mul_(deviation))
    return weight


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Words `t0`, `t1`, ... between spaces, so that a text tells its token ids."""
    tokenizer = Tokenizer(models.WordLevel({f"t{index}": index for index in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "t0", "unk_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    wrapper = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)  # type: ignore[no-untyped-call]
    wrapper.chat_template = CHAT_TEMPLATE
    wrapper.save_pretrained(folder)


def make_adapters(
    cache: Path, shape: str, count: int, seed: int, ranks: Sequence[int] = RANKS, tenant: str = "bench"
) -> dict[str, Path]:
    """Makes bfloat16 adapters once; returns adapter id (`tenant/a0007`) -> folder. Ranks take turns; alpha is the
    rank.
    """
    model = make_model(cache, shape, seed)
    root = model_root(cache, shape, seed) / f"rank{'-'.join(map(str, ranks))}"
    folders = {f"{tenant}/a{index:04d}": root / f"a{index:04d}" for index in range(count)}
    missing = [(index, folder) for index, folder in enumerate(folders.values()) if not folder.exists()]
    sizes = linear_sizes(model) if missing else {}
    for index, folder in missing:
        rank, own_seed = ranks[index % len(ranks)], seed * 1_000_003 + index + 1
        into_place(folder, lambda target, rank=rank, own=own_seed: write_adapter(target, sizes, rank, own))  # type: ignore[misc]
    return folders


def write_adapter(folder: Path, sizes: dict[str, tuple[int, int]], rank: int, seed: int) -> None:
    """Writes one adapter. `sizes`: module path -> (out_features, in_features). A is `[rank, in]`, B `[out, rank]`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (num_out, num_in) in sizes.items():
        a = torch.randn(rank, num_in, generator=generator) / num_in**0.5
        b = torch.randn(num_out, rank, generator=generator) * B_STD
        tensors[f"base_model.model.{path}.lora_A.weight"] = a.to(torch.bfloat16)
        tensors[f"base_model.model.{path}.lora_B.weight"] = b.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(_config(rank), indent=2) + "\n")


def _config(rank: int) -> dict[str, object]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "bench-base",
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": list(LORA_TARGETS),
    }


def linear_sizes(model: Path) -> dict[str, tuple[int, int]]:
    """Module path -> (out_features, in_features) of the layers that adapters of `write_adapter` change."""
    linears = ((name, part) for name, part in empty_network(model).named_modules() if isinstance(part, nn.Linear))
    return {name: (part.out_features, part.in_features) for name, part in linears if name.endswith(LORA_TARGETS)}


def into_place(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a temporary folder and renames it, so that an interrupted run leaves no incomplete checkpoint."""
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write(beside)
    beside.rename(folder)
