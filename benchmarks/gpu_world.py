"""A Llama of random weights on a device, with adapters in its slots: what `gpu_step` runs steps of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lora_serve.core.batch import Batch, Row, RowAdapter, SampleInput, SlotRef
from lora_serve.core.config import ModelConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import SamplingParams
from lora_serve.model.base_model import BaseModel, described
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.loading.frozen_model import FrozenModule
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta
from lora_serve.model.lora.lora_slots import LoraSlots, copy_stream
from lora_serve.model.runner.graphs import StepGraphs
from lora_serve.model.runner.model_runner import ModelRunner

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, vocabulary
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "tiny": (64, 128, 2, 4, 2, 256),
}
_GREEDY = SampleInput(SamplingParams(temperature=0.0), 0, 0, ())


@dataclass(frozen=True, slots=True)
class World:
    """`rows` rows of `context` tokens can decode for `steps` steps."""

    spec: ModelSpec
    runner: ModelRunner
    cache: KVCache
    slots: LoraSlots
    context: int
    steps: int

    @property
    def base_bytes(self) -> int:
        """Read by every step: all weights but the embedding, of which a step reads a few rows."""
        embedding = self.spec.embeddings[self.spec.input_embedding]
        itemsize = self.cache.shape.dtype.itemsize
        return self.spec.num_bytes - embedding.num_embeddings * embedding.embedding_dim * itemsize

    def kv_bytes(self, num_rows: int) -> int:
        """Read by a step of the middle."""
        return num_rows * (self.context + self.steps // 2) * self.cache.shape.block_bytes(1)

    def batch(self, step: int, adapters: list[RowAdapter | None]) -> Batch:
        """The next token of every row."""
        size = self.cache.block_size
        width = -(-(self.context + self.steps) // size)
        return Batch(
            tuple(
                Row(
                    i,
                    (3 + (step + i) % 200,),
                    self.context + step,
                    tuple(range(1 + i * width, 1 + i * width + (self.context + step) // size + 1)),
                    () if adapter is None else (adapter,),
                    _GREEDY,
                    None,
                )
                for i, adapter in enumerate(adapters)
            ),
            (),
        )


def mixed(world: World, step: int, adapters: list[RowAdapter | None], chunk: int, start: int = 0) -> Batch:
    """The next token of every row but the last, and of that one a prompt's tokens start, start + 1, ..."""
    batch = world.batch(step, adapters)
    *others, last = batch.rows
    width = -(-(world.context + world.steps) // world.cache.block_size)
    first = last.block_table[0]
    num_blocks = -(-(start + chunk) // world.cache.block_size)
    assert num_blocks <= width, "the row has room for as many tokens as its context and its steps"
    ids = tuple(3 + i % 200 for i in range(chunk))
    prompt = replace(last, token_ids=ids, start=start, block_table=tuple(range(first, first + num_blocks)))
    return replace(batch, rows=(*others, prompt))


def make_world(
    shape: str, device: torch.device, num_rows: int, context: int, steps: int, num_slots: int,
    *, block_size: int = 16, graphs: bool = True, lora_kernel: str = "auto",
) -> World:  # fmt: skip
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = ModelConfig(
        model=shape,
        device=device.type,
        dtype="auto",
        max_model_len=None,
        attention="auto",
        lora_kernel=lora_kernel,
        quantization="none",
        fuse_layers=False,
    )
    loaded = described(config, FrozenModule(_random_model(shape, device, dtype), (), dtype, device, None))
    num_blocks = 1 + num_rows * -(-(context + steps) // block_size)
    cache = KVCache(loaded.observation.kv_shape, num_blocks, block_size, device, num_spare=1)
    for layer in range(loaded.spec.num_layers):
        for pool in cache.layer(layer):
            pool[1:].normal_()
    slots = LoraSlots(loaded.spec.linears, num_slots, device, copy_stream(device))
    base = BaseModel(loaded, cache, slots, config)
    captured = None
    if graphs and device.type == "cuda":
        captured = StepGraphs(base, cache, slots, num_rows)
    return World(loaded.spec, ModelRunner(base, cache, slots, device, captured), cache, slots, context, steps)


def random_adapter(spec: ModelSpec, digest: str, rank: int, device: torch.device, dtype: torch.dtype) -> HostAdapter:
    """On every linear layer but the output head, made where it shall lie."""
    deltas = {
        path: LinearDelta(
            torch.randn(rank, shape.in_features, device=device, dtype=dtype) * 0.01,
            torch.randn(rank, shape.out_features, device=device, dtype=dtype) * 0.01,
            1.0,
        )
        for path, shape in spec.linears.items()
        if path != spec.output_head
    }
    return HostAdapter(digest, rank, deltas)


def load(world: World, index: int, generation: int, adapter: HostAdapter) -> RowAdapter:
    slot = SlotRef(index, generation, adapter.digest)
    world.slots.load(slot, adapter)
    return RowAdapter(slot)


def _random_model(shape: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    config = AutoConfig.for_model(
        "llama",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return module.to(device).eval().requires_grad_(False)
