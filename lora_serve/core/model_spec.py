"""The base model as plain facts, for every floor that must know its shape without torch."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_serve.core.request import Task

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer that LoRA can target: y [out_features] = W x [in_features]."""

    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class EmbeddingShape:
    """An embedding table that LoRA can target: y [embedding_dim] = scale * W[token]."""

    num_embeddings: int
    embedding_dim: int
    scale: float | None = 1.0  # None: y is more than a row, such as its norm


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """The answers of a model that does not generate."""

    task: Task  # EMBED or CLASSIFY
    dimension: int  # of an embedding; 0 with CLASSIFY
    labels: tuple[str, ...] = ()  # of the base's own head; empty: only adapters have heads
    is_ragged: bool = True  # rows of any lengths lie end to end; False: padded, so rows of like lengths go together
    takes_pairs: bool = False  # tokens have types: 0 for the first text, 1 for the second
    is_multi_label: bool = False  # labels do not exclude one another: sigmoid, not softmax
    is_normalized: bool = False  # embeddings have length 1
    label_layer: str = ""  # with CLASSIFY: the module with one row per label, whose number may be an adapter's own
    backbone: str = ""  # what transformers calls the part below the head ("bert"); with EMBED no path begins with it
    untrained: tuple[str, ...] = ()  # modules of the head that the checkpoint lacks: never used, adapters bring theirs


@dataclass(frozen=True, slots=True)
class KernelDescription:
    """The kernels that a model runs by on a CPU."""

    level: str  # of the processor's instructions: "amx"; "none": torch's own operators serve
    dtype: str  # of the numbers between layers
    order: str  # of a product's sums: "plain", one after another; "dot", as VDPBF16PS; "blocks", as TDPBF16PS; "none"
    source: str  # "shipped" with the wheel, "compiled" on this machine, or "torch"
    reason: str = ""  # why there are none


@dataclass(frozen=True, slots=True)
class LongRope:
    """Positions that are rotated by other factors from `boundary` on, and in all of a sequence that is long (LongRoPE,
    Ding et al., 2024, arXiv 2402.13753).
    """

    boundary: int = sys.maxsize  # the most tokens of a short sequence
    recomputes: bool = False  # transformers' `generate` computes a sequence that grows beyond it anew; else K, V stay

    def is_long(self, num_prompt: int, num_known: int) -> bool:
        """True if a sequence of so many tokens, `num_prompt` of its prompt, has the long factors from its start."""
        return (num_known if self.recomputes else num_prompt) > self.boundary


ONE_ROPE = LongRope()  # no sequence is long: what is computed of a position depends on nothing else


def num_unseen(window: int | None, num_computed: int, block_size: int) -> int:
    """The blocks at a sequence's beginning that no token behind its first `num_computed` sees in layers of `window`."""
    return 0 if window is None else max(0, (num_computed + 1 - window) // block_size)


@dataclass(frozen=True)  # without slots, as it keeps its fingerprint
class ModelSpec:
    """The facts of a loaded base model. Modules are named by their paths, as in `named_modules()`."""

    name: str  # folder or hub id
    architecture: str  # e.g. "LlamaForCausalLM"
    vocab_size: int
    max_model_len: int  # tokens, prompt and answer together
    eos_token_ids: tuple[int, ...]
    num_layers: int
    linears: Mapping[str, LinearShape]  # e.g. "model.layers.0.self_attn.q_proj"
    num_bytes: int  # resident weight bytes
    dtype: str  # e.g. "float32"
    device: str  # e.g. "cpu"
    embeddings: Mapping[str, EmbeddingShape] = field(default_factory=dict)
    # Modules that treat every token by itself, linear layers and embeddings among them: module -> parameter -> shape,
    # in the model's order. For these an adapter may bring parameters of its own, for its own rows.
    modules: Mapping[str, Mapping[str, Shape]] = field(default_factory=dict)
    input_embedding: str = ""
    output_head: str = ""  # empty: the model has no layer for it
    pooling: PoolingSpec | None = None  # None: it generates
    ties_embeddings: bool = False  # the output head multiplies by the input embedding's own weight
    kernels: KernelDescription | None = None  # None: on a GPU
    captured_tokens: int = 0  # of rows of several tokens, at most, in a step that is captured as a CUDA graph
    saved_paths: Mapping[str, str] = field(default_factory=dict)  # of modules that checkpoints call otherwise
    unmet: Mapping[str, int] = field(default_factory=dict)  # parts that no text runs through -> their parameters
    long_rope: LongRope = ONE_ROPE
    # The kinds of its layers: first those in which a token sees all before it (None), then those in which it sees so
    # many at most, itself included.
    windows: tuple[int | None, ...] = (None,)
    transposed: frozenset[str] = frozenset()  # modules marked as having stacks of experts' weights [expert, in, out]

    @property
    def task(self) -> Task:
        return Task.GENERATE if self.pooling is None else self.pooling.task

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of what an adapter must fit, as "sha256:...": architecture, vocabulary, shapes of all modules."""
        linears = {name: [shape.in_features, shape.out_features] for name, shape in self.linears.items()}
        modules = {name: {key: list(shape) for key, shape in table.items()} for name, table in self.modules.items()}
        facts = [self.architecture, self.vocab_size, self.num_layers, self.ties_embeddings, linears, modules]
        return "sha256:" + hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
