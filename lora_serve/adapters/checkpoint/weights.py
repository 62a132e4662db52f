"""An adapter's tensors, as the trainer saved them, in host memory.

A registration rewrites an adapter whose training began by changing the base's weights as the plain LoRA it is to the
base itself; the maths need the base and so are another floor's (`Undo`). Runs on a thread: a loader's, or that of a
registration's check.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_serve.adapters.checkpoint.artifact import Artifact, parse_artifact
from lora_serve.adapters.checkpoint.bound import BoundAdapter, BoundDelta, BoundEmbedding, BoundExperts, BoundLinear
from lora_serve.adapters.checkpoint.content import CONFIG_NAME, MAX_CONFIG_BYTES, WEIGHTS_NAME, AdapterContent
from lora_serve.adapters.checkpoint.peft_config import INIT_RANKS
from lora_serve.adapters.checkpoint.safetensors_header import parse_header
from lora_serve.adapters.checkpoint.saved import (
    SavedAdapter,
    SavedDelta,
    SavedEmbedding,
    SavedLinear,
    SavedTokens,
    convert,
)
from lora_serve.adapters.regular_file import open_regular, read_regular, size_of
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.strict_json import parse_object

# (as saved, PeftConfig.init, what is called before each layer) -> against the base as it is
Undo: TypeAlias = Callable[[SavedAdapter, str, Callable[[], None]], SavedAdapter]
# float16's range is too small to mix with bfloat16 and float32 activations, and CPUs compute it slowly.
HOST_DTYPES: Mapping[torch.dtype, torch.dtype] = types.MappingProxyType(
    {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
)
INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class WeightsFile:
    """A safetensors file in memory. `tensors`: the checked table of its tensors."""

    def __init__(self, content: memoryview, check: Callable[[], None] = lambda: None) -> None:
        """The whole file, writable, as torch asks for. `check`: called at every tensor. Raises InvalidAdapterError."""
        self._check = check
        self.tensors, self._start = parse_header(content, WEIGHTS_NAME)
        self._content = content

    def get_tensor(self, name: str) -> Tensor:
        """A view, in the file's dtype; a copy where the file does not align it."""
        self._check()
        info = self.tensors[name]
        dtype, begin = _DTYPES[info.dtype], self._start + info.begin
        if info.begin == info.end:
            return torch.empty(info.shape, dtype=dtype)
        if begin % dtype.itemsize:  # the format asks for no alignment
            piece = bytearray(self._content[begin : self._start + info.end])
            return torch.frombuffer(piece, dtype=dtype).reshape(info.shape)
        count = math.prod(info.shape)
        return torch.frombuffer(self._content, dtype=dtype, count=count, offset=begin).reshape(info.shape)


def open_weights(folder: Path, check: Callable[[], None] = lambda: None) -> WeightsFile:
    """The weights of a folder that nobody else writes: they are read from the disk as they are looked at.

    What is written to a tensor stays in memory. Raises InvalidAdapterError, OSError.
    """
    with open_regular(folder / WEIGHTS_NAME) as file:
        size = size_of(file)
        content = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
        return WeightsFile(memoryview(content), check)


def copy_of(view: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor that owns its memory: `view` lies in the file's mapping.

    By numpy, on this thread alone: torch's own copy would start a second team of OpenMP threads beside the engine's
    (measured on 2 busy cores: 2.7 s against 0.1 s for 84 MB).
    """
    if view.dtype == torch.float16 and dtype == torch.float32:
        return torch.from_numpy(view.numpy().astype("float32", order="C"))
    copy = torch.from_numpy(bits_of(view).copy(order="C")).view(view.dtype)
    return copy if copy.dtype == dtype else copy.to(dtype)


def bits_of(tensor: Tensor) -> Any:
    """The tensor's memory as a numpy array of signed integers of the same width; numpy knows no bfloat16."""
    return tensor.view(INTEGERS[tensor.itemsize]).numpy()


def parse_checked(content: AdapterContent, adapter: AdapterRef, spec: ModelSpec) -> SavedAdapter:
    """The tensors of a registered adapter. Raises InvalidAdapterError."""
    if adapter.traits.base not in ("", spec.fingerprint):
        raise InvalidAdapterError([f"it was registered for another base model than {spec.name}: register it again"])
    file = WeightsFile(content.weights)
    artifact = parse_artifact(content, file.tensors, spec)
    if artifact.config.init:  # a registration stores it as plain LoRA
        raise InvalidAdapterError([f"its {artifact.config.init} initialisation was not undone: register it again"])
    return _saved(file, artifact, adapter.rank or None)


def read_weights(
    folder: Path, artifact: Artifact, max_rank: int | None = None, check: Callable[[], None] = lambda: None
) -> SavedAdapter:
    """The tensors of a folder that was checked. `max_rank`: for what is converted to LoRA (None: whatever is exact).

    `check`: called at every tensor. Raises InvalidAdapterError, OSError, what `check` raises.
    """
    return _saved(open_weights(folder, check), artifact, max_rank)


def _saved(file: WeightsFile, artifact: Artifact, max_rank: int | None) -> SavedAdapter:
    bound, reader = artifact.bound, _TensorReader(file)
    linears = {path: reader.linear(linear) for path, linear in bound.linears.items()}
    if bound.conversions is not None:
        linears |= convert(bound.conversions, file.get_tensor, max_rank)
    return SavedAdapter(
        artifact.digest,
        linears,
        {path: reader.embedding(embedding) for path, embedding in bound.embeddings.items()},
        {path: {key: reader.delta(delta) for key, delta in table.items()} for path, table in bound.deltas.items()},
        {path: SavedTokens(tokens.token_ids, reader.tensor(tokens.name)) for path, tokens in bound.tokens.items()},
        {path: {key: reader.tensor(name) for key, name in table.items()} for path, table in bound.parameters.items()},
        bound.vocab_size,
    )


class _TensorReader:
    """Copies tensors out of an open file."""

    def __init__(self, file: WeightsFile) -> None:
        self._file = file

    def linear(self, bound: BoundLinear) -> SavedLinear:
        a, b = (None, None) if bound.a_name is None else self._pair(bound.a_name, bound.b_name or "")
        vectors = (self._vector(n) for n in (bound.lora_bias_name, bound.magnitude_name, bound.bias_name))
        return SavedLinear(a, b, bound.scale, *vectors)

    def embedding(self, bound: BoundEmbedding) -> SavedEmbedding:
        b, a = self._pair(bound.b_name, bound.a_name, transpose_first=True)
        return SavedEmbedding(a, b, bound.scale, self._vector(bound.magnitude_name))

    def delta(self, bound: BoundDelta | BoundExperts) -> SavedDelta:
        """PEFT lays lora_A out as [expert, rank] rows and lora_B as [rank, expert] columns."""
        if isinstance(bound, BoundExperts):
            return stack_experts(bound, self.linear)
        a, b = self._pair(bound.a_name, bound.b_name)  # [E * rank, in], [rank * E, out]
        num_in, num_out = a.shape[1], b.shape[1]
        experts = b.view(bound.rank, bound.num_experts, num_out).transpose(0, 1).contiguous()
        return SavedDelta(a.view(bound.num_experts, bound.rank, num_in), experts, bound.scale)

    def tensor(self, name: str) -> Tensor:
        """A copy in the host's dtype."""
        view: Tensor = self._file.get_tensor(name)
        return copy_of(view, HOST_DTYPES[view.dtype])

    def _vector(self, name: str | None) -> Tensor | None:
        return None if name is None else self.tensor(name).float()

    def _pair(self, first: str, second: str, *, transpose_first: bool = False) -> tuple[Tensor, Tensor]:
        """Two factors in the wider of their dtypes, the second transposed (and the first too, if asked)."""
        views = [self._file.get_tensor(first), self._file.get_tensor(second)]
        dtype = torch.promote_types(*(HOST_DTYPES[view.dtype] for view in views))
        return copy_of(views[0].t() if transpose_first else views[0], dtype), copy_of(views[1].t(), dtype)


def stack_experts(bound: BoundExperts, read: Callable[[BoundLinear], SavedLinear]) -> SavedDelta:
    """The parts' ranks beside each other, and in B zeros between them:

    [W1 + B1^T A1; W2 + B2^T A2] = [W1; W2] + [B1 0; 0 B2]^T [A1; A2], where the semicolon stacks rows.

    What an expert lacks (a part that is not trained, a rank below that of others) is zero. One scale serves all: a
    part's own one is worked into its B, in float32, where it is another.
    """
    parts = [{expert: read(linear) for expert, linear in part.items()} for part in bound.parts]
    dtype = _dtype([linear for part in parts for linear in part.values()], bound.scale)
    num_out = bound.shape.out_features
    a = _zeros((bound.num_experts, bound.rank, bound.shape.in_features), dtype)
    b = _zeros((bound.num_experts, bound.rank, num_out * len(parts)), dtype)
    first_rank = 0
    for number, part in enumerate(parts):
        columns = slice(number * num_out, (number + 1) * num_out)
        for expert, linear in part.items():
            own_a, own_b = _factors(linear, bound.scale, dtype)
            rows = slice(first_rank, first_rank + len(own_a))
            bits_of(a)[expert, rows] = bits_of(own_a)
            bits_of(b)[expert, rows, columns] = bits_of(own_b)
        first_rank += max((linear.rank for linear in bound.parts[number].values()), default=0)
    return SavedDelta(a, b, bound.scale)


def _dtype(linears: Iterable[SavedLinear], scale: float) -> torch.dtype:
    dtypes = [factor.dtype for linear in linears for factor in (linear.a, linear.b) if factor is not None]
    rescaled = [torch.float32 for linear in linears if linear.scale != scale]
    return functools.reduce(torch.promote_types, [*dtypes, *rescaled])


def _factors(linear: SavedLinear, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    assert linear.a is not None
    assert linear.b is not None
    a, b = linear.a.to(dtype), linear.b.to(dtype)
    return a, b if linear.scale == scale else b * (linear.scale / scale)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """By numpy, which starts no threads and touches no page before it is written (see `copy_of`)."""
    return torch.from_numpy(np.zeros(shape, f"int{8 * dtype.itemsize}")).view(dtype)


def convert_to_plain_lora(
    folder: Path, artifact: Artifact, undo: Undo, check: Callable[[], None] = lambda: None
) -> None:
    """Rewrite a private folder's two files, so that its adapter is a LoRA of the unchanged base.

    `check`: called at every tensor and layer; ends the work by what it raises. Raises InvalidAdapterError, OSError.
    """
    saved = undo(read_weights(folder, artifact, check=check), artifact.config.init, check)
    _replace_weights(folder, artifact.bound, saved)
    _replace_config(folder / CONFIG_NAME)


def plain_settings(table: dict[str, Any]) -> dict[str, Any]:
    """adapter_config.json's values with every rank doubled and every module's scale as it was.

    The patterns keep their order: the first that matches a module counts.
    """
    factor = math.sqrt(INIT_RANKS) if table.get("use_rslora") else INIT_RANKS  # alpha / sqrt(r), or alpha / r
    ranks, alphas = table.get("rank_pattern") or {}, table.get("alpha_pattern") or {}
    return {
        **table,
        "init_lora_weights": True,
        "r": table["r"] * INIT_RANKS,
        "lora_alpha": table["lora_alpha"] * factor,
        "rank_pattern": {name: rank * INIT_RANKS for name, rank in ranks.items()},
        "alpha_pattern": {name: alpha * factor for name, alpha in alphas.items()},
    }


def _replace_config(path: Path) -> None:
    table = parse_object(read_regular(path, MAX_CONFIG_BYTES).removeprefix(b"\xef\xbb\xbf"), path.name)
    path.unlink()  # it may be a hard link to what was sent
    path.write_text(json.dumps(plain_settings(table), ensure_ascii=False, indent=2), encoding="utf-8")


def _replace_weights(folder: Path, bound: BoundAdapter, saved: SavedAdapter) -> None:
    """New factors under their old names; whatever else was trained stays as it is."""
    factors = dict(_factors_as_saved(bound, saved))
    file, written = open_weights(folder), folder / f"{WEIGHTS_NAME}.new"
    tensors = {name: factors[name] if name in factors else file.get_tensor(name) for name in file.tensors}
    save_file(tensors, written, metadata={"format": "pt"})
    written.replace(folder / WEIGHTS_NAME)


def _factors_as_saved(bound: BoundAdapter, saved: SavedAdapter) -> Iterator[tuple[str, Tensor]]:
    """(name in the file, tensor as PEFT lays it out); SavedAdapter has B transposed, and an embedding's A."""
    for path, linear in saved.linears.items():
        names = bound.linears[path]
        if linear.a is not None and linear.b is not None and names.a_name and names.b_name:
            yield names.a_name, linear.a.contiguous()
            yield names.b_name, linear.b.t().contiguous()
    for path, embedding in saved.embeddings.items():
        yield bound.embeddings[path].a_name, embedding.a.t().contiguous()
        yield bound.embeddings[path].b_name, embedding.b.t().contiguous()
