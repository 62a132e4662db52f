"""A model of random weights on a device, with adapters in its slots: what the GPU's benchmarks run steps of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lora_serve.core.batch import Batch, Row, RowAdapter, SampleInput, SlotRef
from lora_serve.core.config import ModelConfig
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.request import SamplingParams
from lora_serve.model.base_model import BaseModel, described
from lora_serve.model.experts import is_experts
from lora_serve.model.kv_cache import KVCache
from lora_serve.model.loading.float8 import Float8Linear, can_multiply, quantized
from lora_serve.model.loading.frozen_model import FrozenModule
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta
from lora_serve.model.lora.lora_slots import LoraSlots, copy_stream
from lora_serve.model.runner.graphs import StepGraphs
from lora_serve.model.runner.model_runner import ModelRunner

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, vocabulary
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "tiny": (64, 128, 2, 4, 2, 256),
    "moe": (2048, 6144, 16, 32, 4, 151936),  # Qwen3-30B-A3B's layers, a third of them
    "dense": (2048, 6144, 16, 32, 4, 151936),  # with as many products for a token, of one layer instead of experts
    "tiny-moe": (64, 64, 2, 4, 2, 256),
    "tiny-dense": (64, 64, 2, 4, 2, 256),
}
EXPERTS = {"moe": (128, 8, 768), "tiny-moe": (8, 2, 32)}  # experts, how many a token has, their intermediate size
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
    stacks: Mapping[str, int] = field(default_factory=dict)  # experts of each weight that adapters can add to, by path
    expert_bytes: int = 0
    chosen: float = 1.0  # the part of the experts that a token has

    def weight_bytes(self, num_rows: int) -> int:
        """As `base_bytes`, without the experts that no row chooses; each row chooses at random."""
        return self.base_bytes - int(self.expert_bytes * (1 - self.chosen) ** num_rows)

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
    *, block_size: int = 16, graphs: bool = True, lora_kernel: str = "auto", joined: bool = True,
    compiled: bool = True, float8: bool = False, targets: tuple[str, ...] = (),
) -> World:  # fmt: skip
    """`joined`, `compiled`: as a server on a GPU has it. `float8`: linear layers in FP8, where the device has it.
    `targets`: --lora-target-modules.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = ModelConfig(
        model=shape,
        device=device.type,
        dtype="auto",
        max_model_len=None,
        attention="auto",
        lora_kernel=lora_kernel,
        quantization="none",
        fuse_layers=joined and device.type == "cuda",
        compile_layers=compiled,
    )
    module = random_model(shape, device, dtype)
    experts = [part for part in module.modules() if is_experts(part)]
    if float8:
        for path, layer in list(module.named_modules()):
            if type(layer) is nn.Linear and layer is not module.lm_head and can_multiply(layer, device):
                module.set_submodule(path, Float8Linear(layer, *quantized(layer.weight.detach())))
    loaded = described(config, FrozenModule(module, (), dtype, device, None))
    num_blocks = 1 + num_rows * -(-(context + steps) // block_size)
    cache = KVCache(loaded.observation.kv_shape, num_blocks, block_size, device, num_spare=1)
    for layer in range(loaded.spec.num_layers):
        for pool in cache.layer(layer):
            pool[1:].normal_()
    first_rank = 64 if device.type == "cuda" else 0  # as a server has it
    slots = LoraSlots(loaded.spec.linears, num_slots, device, copy_stream(device), first_rank, targets)
    base = BaseModel(loaded, cache, slots, config)
    if joined and device.type == "cpu":
        base.group_experts()
    num_experts, per_token, _ = EXPERTS.get(shape, (1, 1, 0))
    stacks = {path: num_experts for path in slots.module_index if path not in loaded.spec.linears}
    captured = None
    if graphs and device.type == "cuda":
        captured = StepGraphs(base, cache, slots, num_rows)
    return World(
        loaded.spec, ModelRunner(base, cache, slots, device, captured), cache, slots, context, steps, stacks,
        sum(parameter.nbytes for part in experts for parameter in part.parameters()), per_token / num_experts,
    )  # fmt: skip


def with_experts(world: World, adapter: HostAdapter, rank: int) -> HostAdapter:
    """The adapter with deltas on all experts beside its own."""
    like = next(delta.a for delta in adapter.deltas.values() if delta.a is not None)
    made = {}
    for path, count in world.stacks.items():
        shape = world.slots.shapes[world.slots.module_index[path]]
        sizes = shape.in_features, shape.out_features
        a, b = (like.new_empty(count, rank, size).normal_().mul_(0.01) for size in sizes)
        made[path] = LinearDelta(a, b, 1.0)
    return HostAdapter(f"{adapter.digest} of experts", rank, {**adapter.deltas, **made})


def random_adapter(
    spec: ModelSpec, digest: str, rank: int, device: torch.device, dtype: torch.dtype, ends: tuple[str, ...] = ("",)
) -> HostAdapter:
    """On every linear layer but the output head, or those whose path ends so, made where it shall lie."""
    deltas = {
        path: LinearDelta(
            torch.randn(rank, shape.in_features, device=device, dtype=dtype) * 0.01,
            torch.randn(rank, shape.out_features, device=device, dtype=dtype) * 0.01,
            1.0,
        )
        for path, shape in spec.linears.items()
        if path != spec.output_head and path.endswith(ends)
    }
    return HostAdapter(digest, rank, deltas)


def load(world: World, index: int, generation: int, adapter: HostAdapter) -> RowAdapter:
    slot = SlotRef(index, generation, adapter.digest)
    world.slots.load(slot, adapter)
    return RowAdapter(slot)


def random_model(shape: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SHAPES[shape]
    sparse: dict[str, int] = {}
    if shape in EXPERTS:
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        sparse = {**dict(zip(names, EXPERTS[shape], strict=True)), "head_dim": hidden // heads}
    config = AutoConfig.for_model(
        "qwen3_moe" if sparse else "llama",
        **sparse,
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
