"""Small pieces of the maths floor for tests: slots with random adapters, packed steps, caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lora_serve.core.batch import SlotRef
from lora_serve.core.model_spec import LinearShape
from lora_serve.model.kv_cache import KVCache, KVShape
from lora_serve.model.kv_format import FORMATS
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta
from lora_serve.model.lora.lora_slots import LoraSlots
from lora_serve.model.step_context import DecodeRows, PrefillRow, StepInputs

CPU = torch.device("cpu")
MODULE = "layer"


def random_adapter(digest: str, rank: int, shape: LinearShape, dtype: torch.dtype = torch.float32) -> HostAdapter:
    """Targets MODULE with random A [rank, in] and B [rank, out]; an even rank brings a gain and a shift as well."""
    a = (torch.randn(rank, shape.in_features) / shape.in_features**0.5).to(dtype)
    b = torch.randn(rank, shape.out_features).to(dtype)
    gain, shift = (
        (torch.rand(shape.out_features) + 0.5, torch.randn(shape.out_features)) if rank % 2 == 0 else (None, None)
    )
    return HostAdapter(digest, rank, {MODULE: LinearDelta(a, b, 0.5, gain, shift)})


def filled_slots(
    shape: LinearShape, ranks: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> LoraSlots:
    """One slot per rank; the slot after them is empty."""
    slots = LoraSlots({MODULE: shape, "other": shape}, len(ranks) + 1, device)
    for index, rank in enumerate(ranks):
        slots.load(SlotRef(index, 1, f"d{index}"), random_adapter(f"d{index}", rank, shape, dtype))
    return slots


def filled_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    stored: str = "auto",
) -> KVCache:
    """One layer of random keys and values; block 0 stays zero."""
    shape = replace(KVShape.alike(1, num_kv_heads, head_dim, dtype), form=FORMATS[stored])
    cache = KVCache(shape, num_blocks, block_size, device)
    tokens = (num_blocks - 1) * block_size
    positions = torch.arange(block_size, num_blocks * block_size, device=device)
    keys, values = (torch.randn(tokens, num_kv_heads, head_dim).to(device, dtype) for _ in range(2))
    cache.write(0, keys, values, positions)
    return cache


def step_of(rows: Sequence[tuple[int, int, list[int]]], device: torch.device = CPU) -> StepInputs:
    """From (context, tokens, blocks) per row, rows of one token first; token ids do not matter here."""
    decode = [row for row in rows if row[1] == 1]
    width = max((len(blocks) for _, _, blocks in decode), default=0)
    prefill, position = [], len(decode)
    for context, tokens, blocks in rows[len(decode) :]:
        prefill.append(PrefillRow(position, position + tokens, context, torch.tensor(blocks, device=device)))
        position += tokens
    nothing = torch.zeros(1, position, dtype=torch.int64, device=device)
    return StepInputs(
        token_ids=nothing,
        position_ids=nothing,
        cache_positions=nothing[0],
        decode=DecodeRows(
            len(decode),
            torch.tensor([[*blocks, *[0] * (width - len(blocks))] for _, _, blocks in decode], device=device),
            torch.tensor([context + 1 for context, _, _ in decode], dtype=torch.int64, device=device),
        ),
        prefill=tuple(prefill),
        logit_positions=nothing[0],
        lora=(),
        lora_logits=(),
    )
