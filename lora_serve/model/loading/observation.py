"""Facts about a model that its own modules tell as they run: one watched pass, and calls with many positions."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from lora_serve.core.errors import ModelError
from lora_serve.core.model_spec import EmbeddingShape, LinearShape, Shape
from lora_serve.model.kv_cache import KVHeads, KVShape
from lora_serve.model.loading.number_type import is_quantized
from lora_serve.model.step_context import AttentionSettings

NUM_TOKENS, NUM_LOGITS = 11, 7  # numbers that no model has as a dimension, so that a token dimension is known by size
_ONE_EXPERT = re.compile(r"\.experts\.\d+(\.|$)")  # which tokens it sees depends on the tokens
# Keywords of attention that are applied, or have no effect on it; any other may change it.
_KEYWORDS = frozenset(
    {"dropout", "logits_to_keep", "output_attentions", "output_router_logits", "position_ids", "scaling"}
    | {"s_aux", "sliding_window", "softcap", "use_cache"}
)
_num_registered = itertools.count()


@dataclass(frozen=True, slots=True)
class Site:
    """A module that treats every token by itself, so that adapters can change it for their rows alone."""

    input_dims: tuple[int | None, ...]  # which dimension of each positional argument counts tokens; None: none does
    output_dim: int  # likewise of its output, or of the first if it has several (the others are as the first)
    is_output_head: bool  # it sees only the tokens whose logits are wanted, or the rows that were pooled
    num_copies: int = 1  # all tokens lie there so many times: once for each expert (Llama 4)


@dataclass(frozen=True, slots=True)
class Observation:
    """The facts that one pass showed."""

    kv_shape: KVShape
    sites: Mapping[str, Site]  # by module path; every module with parameters of its own that runs once per token
    linears: Mapping[str, LinearShape]
    embeddings: Mapping[str, EmbeddingShape]
    transposed: frozenset[str]  # sites whose experts' weights lie [expert, in, out], as transformers marks them
    unmet: Mapping[str, int]  # the model's parts, or those of its body, of which no module ran -> their parameters
    chunks: Mapping[nn.Module, int] = field(default_factory=dict)  # of the modules that attend within such
    windows: tuple[int | None, ...] = ()  # by layer, the most tokens that one sees, itself included; None: all before

    def parameters(self, module: PreTrainedModel) -> dict[str, dict[str, Shape]]:
        """module -> parameter -> shape, of every site."""
        tables = {path: dict(module.get_submodule(path).named_parameters(recurse=False)) for path in self.sites}
        return {path: {name: tuple(p.shape) for name, p in table.items()} for path, table in tables.items()}


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """True for layers that compute y = x W^T + bias and no more: subclasses may have a forward of their own, of which
    those of quantised weights are known.
    """
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    is_plain = type(module).forward in (nn.Linear.forward, Conv1D.forward) and "forward" not in vars(module)
    return is_plain or is_quantized(module.weight)


def linear_shape(linear: nn.Linear | Conv1D) -> LinearShape:
    """The layer's in and out features as it states them: a packed weight has another shape."""
    if isinstance(linear, Conv1D):
        return LinearShape(*linear.weight.shape)
    return LinearShape(linear.in_features, linear.out_features)


def layer_index(module: nn.Module) -> int:
    """The number of an attention module's layer."""
    index = module.layer_idx
    assert isinstance(index, int)
    return index


def first_line(error: Exception) -> str:
    """The first line of an error of transformers, whose messages are long."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def refused_if_it_fails(module: nn.Module) -> Iterator[None]:
    """Raises ModelError for whatever a model's own code raises inside the block."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"{type(module).__name__} cannot be served: {first_line(error)}") from error


def registered_attention(attend: Callable[..., Any]) -> str:
    """A new name under which transformers' models find an attention function."""
    name = f"lora_serve_{next(_num_registered)}"
    AttentionInterface.register(name, attend)
    return name


class ModuleWatch:
    """Notes which modules see every token, or every output, exactly once, and along which dimension."""

    def __init__(self, module: nn.Module, num_tokens: int, num_outputs: int) -> None:
        """The token and output counts of the pass that is to be watched; no module may have either as a dimension."""
        self._numbers = (num_tokens, num_outputs)
        parameters = [path for path, _ in module.named_parameters()]
        self._parts = Counter(".".join(p.split(".")[:n]) for p in parameters for n in (1, 2) if p.count(".") >= n)
        self._seen: dict[str, list[Site | None]] = {}
        self._owners = {
            path: owner
            for path, owner in module.named_modules()
            if not _ONE_EXPERT.search(path) and any(True for _ in owner.parameters(recurse=False))
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches one pass inside the block; the hooks are gone afterwards."""
        with ExitStack() as hooks:
            for path, owner in self._owners.items():
                hooks.enter_context(owner.register_forward_hook(self._watch(path), with_kwargs=True))
            yield

    def observation(self, kv_shape: KVShape) -> Observation:
        """The facts seen."""
        sites = {path: found[0] for path, found in self._seen.items() if len(found) == 1 and found[0] is not None}
        # A change runs its module again for some rows, which sites inside would take for the whole step's: of two, one
        # within the other, the inner one counts if it is a layer, else the outer one.
        ends = {path: [dot.start() for dot in re.finditer(r"\.", path)] for path in sites}
        pairs = [(path[:end], path) for path in sites for end in ends[path] if path[:end] in sites]
        layers = {path for path, owner in self._owners.items() if is_linear(owner) or isinstance(owner, nn.Embedding)}
        holders = {outer for outer, inner in pairs if inner in layers}
        inside = {inner for outer, inner in pairs if outer not in holders}
        sites = {path: site for path, site in sites.items() if path not in holders | inside}
        owners = {path: owner for path, owner in self._owners.items() if path in sites}
        linears = {path: linear_shape(m) for path, m in owners.items() if is_linear(m)}
        embeddings = {
            path: EmbeddingShape(m.num_embeddings, m.embedding_dim, _scale_of(m))
            for path, m in owners.items()
            if isinstance(m, nn.Embedding)
        }
        parts = self._parts.items()
        unmet = {part: n for part, n in parts if not any(f"{path}.".startswith(f"{part}.") for path in self._seen)}
        transposed = frozenset(path for path, owner in owners.items() if getattr(owner, "is_transposed", False))
        return Observation(kv_shape, sites, linears, embeddings, transposed, unmet)

    def _watch(self, path: str) -> Callable[..., None]:
        def note(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            experts = {len(weight) for weight in module.parameters(recurse=False) if weight.dim() == 3}
            tried = (_site(inputs, output, self._numbers, copies) for copies in ([] if keywords else [1, *experts]))
            self._seen.setdefault(path, []).append(next((site for site in tried if site is not None), None))

        return note


class _WatchedMasks:
    """transformers' plain masks; tells afterwards which of them end with chunks, however few tokens it was made for."""

    def __init__(self) -> None:
        self._chunked: list[tuple[Tensor, int]] = []

    def __call__(self, *, mask_function: Callable[..., Any], config: Any, device: torch.device, **given: Any) -> Any:
        mask = eager_mask(mask_function=mask_function, config=config, device=device, **given)
        size = given.get("local_size")
        if size is not None and size == getattr(config, "attention_chunk_size", None):
            zero = torch.zeros((), dtype=torch.int64, device=device)
            if not mask_function(zero, zero, zero + size, zero + size - 1):
                self._chunked.append((mask, size))
        return mask

    def chunk_of(self, mask: Tensor | None) -> int | None:
        """The size of the chunks that a mask is of; None: of none."""
        return next((size for one, size in self._chunked if one is mask), None)


def _is_applied(mask: Tensor, settings: AttentionSettings) -> bool:
    """True for the mask [..., T, T] of tokens that see themselves and what these settings let them see before."""
    tokens = torch.arange(mask.shape[-1], device=mask.device)
    is_seen = (tokens <= tokens[:, None]) & (tokens >= settings.first_seen(tokens)[:, None])
    if mask.shape[-2:] != is_seen.shape:
        return False
    return bool((mask == is_seen if mask.dtype == torch.bool else torch.where(is_seen, mask == 0, mask < -1e4)).all())


@torch.inference_mode()
def observe(module: PreTrainedModel, device: torch.device) -> Observation:
    """Runs a few tokens and notes what each layer would cache, and which modules see every token once.

    Raises ModelError for attention that is more than causal, windowed or in chunks, and for logits that cannot be
    chosen.
    """
    keys: dict[int, Tensor] = {}
    chunks: dict[nn.Module, int] = {}
    windows: dict[int, int | None] = {}
    masks = _WatchedMasks()

    def attend(
        layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **keywords: Any
    ) -> tuple[Tensor, None]:
        if key.shape[:-1] != value.shape[:-1]:
            raise ModelError("keys and values of different numbers of heads are not supported")
        if (sinks := keywords.get("s_aux")) is not None and sinks.shape != query.shape[1:2]:
            raise ModelError("its attention has sinks that are not one number a head")
        if unknown := sorted(name for name in keywords.keys() - _KEYWORDS if keywords[name] is not None):
            raise ModelError(f"its attention takes more than is applied here: {', '.join(unknown)}")
        chunk = masks.chunk_of(attention_mask)
        if chunk is not None:
            chunks[layer] = chunk
        settings = AttentionSettings(1.0, keywords.get("sliding_window") or None, chunk=chunk)
        windows[layer_index(layer)] = min((size for size in (settings.window, chunk) if size), default=None)
        if attention_mask is not None and not _is_applied(attention_mask, settings):
            raise ModelError("its attention has a mask that is neither causal nor a window's or a chunk's")
        keys[layer_index(layer)] = key if key.shape[-1] >= value.shape[-1] else value
        return F.pad(query.transpose(1, 2), (0, value.shape[-1] - query.shape[-1])).contiguous(), None

    watch = ModuleWatch(module, NUM_TOKENS, NUM_LOGITS)
    implementation = registered_attention(attend)
    AttentionMaskInterface.register(implementation, masks)
    before = module.config._attn_implementation  # noqa: SLF001 - its setter is public, its getter is not
    try:
        with refused_if_it_fails(module), watch.watching():
            module.set_attn_implementation(implementation)
            ids = torch.arange(NUM_TOKENS, device=device)[None]
            output = module(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=ids[0, -NUM_LOGITS:])
            if output.logits.shape[1] != NUM_LOGITS:
                raise ModelError("it does not take `logits_to_keep`, the positions whose logits are wanted")
    finally:
        module.set_attn_implementation(before)
    found = watch.observation(_kv_shape(module, keys))
    return replace(found, chunks=chunks, windows=tuple(windows[layer] for layer in range(len(windows))))


def _scale_of(embedding: nn.Embedding) -> float | None:
    scale = float(getattr(embedding, "embed_scale", 1.0))
    ids = torch.arange(min(8, embedding.num_embeddings), device=embedding.weight.device)
    return scale if torch.allclose(embedding(ids), embedding.weight[ids] * scale, rtol=0.01) else None


def _site(inputs: tuple[Any, ...], output: Any, numbers: tuple[int, int], num_copies: int) -> Site | None:
    outputs = output if isinstance(output, tuple) else (output,)
    for num_tokens in numbers:
        dims = {_dim_of(tensor, num_copies * num_tokens) for tensor in outputs}
        input_dims = tuple(_dim_of(tensor, num_copies * num_tokens) for tensor in inputs)
        if len(dims) == 1 and None not in dims and any(dim is not None for dim in input_dims):
            return Site(input_dims, dims.pop() or 0, num_tokens == numbers[1], num_copies)
    return None


def _dim_of(value: Any, size: int) -> int | None:
    """The one dimension of that size; None if there is none or more than one."""
    dims = [dim for dim, length in enumerate(value.shape) if length == size] if isinstance(value, Tensor) else []
    return dims[0] if len(dims) == 1 else None


def _kv_shape(module: PreTrainedModel, keys: Mapping[int, Tensor]) -> KVShape:
    num_layers = module.config.get_text_config().num_hidden_layers
    types = {key.dtype for key in keys.values()}
    if sorted(keys) != list(range(num_layers)) or len(types) != 1:
        raise ModelError(
            f"{type(module).__name__} cannot be served: its {num_layers} layers do not all attend through keys and "
            f"values (seen in {len(keys)} layers: {sorted(map(str, types))})"
        )
    shapes = (keys[layer].shape for layer in range(num_layers))
    return KVShape(tuple(KVHeads(shape[1], shape[3]) for shape in shapes), types.pop())
