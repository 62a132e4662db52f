"""Turns an adapter as it was saved into the form of the device slots, with everything that depends on the base worked
in.

Called by the loaders' threads; reads the base and changes nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.adapters.checkpoint.weights.saved import SavedAdapter, SavedDelta, SavedEmbedding, SavedLinear
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.lora.adapted_model import AdaptedModel
from lora_serve.model.lora.changes import (
    Change,
    EmbeddingDelta,
    HeadRows,
    InputGain,
    LowRankWeight,
    ReplacedWeights,
    TokenRows,
    Twin,
)
from lora_serve.model.lora.host_adapter import HostAdapter, LinearDelta, in_arena

_FEW_ROWS, _FEW_SHARE = 4096, 0.25  # changed rows of a table, up to which they alone are kept


@torch.inference_mode()
def fold(saved: SavedAdapter, base: AdaptedModel[Any]) -> HostAdapter:
    """The host adapter of `saved` for this base, in pinned memory if the base is on a GPU."""
    changes: dict[str, list[Change]] = {}
    for path, parameters in saved.parameters.items():
        if (own := _own(base, path, parameters)) is not None:
            changes.setdefault(path, []).append(own)
    for path, table in saved.deltas.items():
        module = base.module.get_submodule(path)
        changes.setdefault(path, []).append(
            Twin(module, {name: _weight(module, name, delta) for name, delta in table.items()})
        )
    for path, tokens in saved.tokens.items():
        ids, order = torch.tensor(tokens.token_ids).sort()
        rows = tokens.rows[order]
        if path == base.spec.output_head:
            changes.setdefault(path, []).append(HeadRows(ids, rows, is_shared=False))
            continue
        changes.setdefault(path, []).append(TokenRows(ids, rows * base.embedding_scale(path)))
        if path == base.spec.input_embedding and base.spec.ties_embeddings:
            changes.setdefault(base.spec.output_head, []).append(HeadRows(ids, rows))
    for path, embedding in saved.embeddings.items():
        changes.setdefault(path, []).append(_embedding(base, path, embedding))
    for path, linear in saved.linears.items():
        if linear.input_gain is not None:
            changes.setdefault(path, []).append(InputGain(base.linear(path), linear.input_gain))
    deltas = {
        path: _linear(linear, base.linear(path), base.device)
        for path, linear in saved.linears.items()
        if linear.input_gain is None
    }
    adapter = HostAdapter(
        saved.digest,
        saved.name,
        saved.rank,
        deltas,
        {path: tuple(table) for path, table in changes.items()},
        saved.vocab_size,
        is_plain=saved.is_plain,
    )
    return in_arena(adapter, base.spec.linears, pin=base.device.type == "cuda")


def _linear(saved: SavedLinear, base: FrozenLinear, device: torch.device) -> LinearDelta:
    """A linear layer's delta in host memory. `device`: the base's."""
    if saved.output_gain is not None:
        return LinearDelta(None, None, 0.0, saved.output_gain)
    gain = None if saved.magnitude is None else _dora_gain(saved, base, device)
    b = saved.b if gain is None or saved.b is None else saved.b.float() * gain
    a = saved.a if gain is None or saved.a is None else saved.a.float()
    return LinearDelta(
        a, b, saved.scale, gain, _shift(saved, None if base.bias is None else base.bias.float().cpu(), gain)
    )


def _shift(saved: SavedLinear, bias: Tensor | None, gain: Tensor | None) -> Tensor | None:
    """The vector added once y = W x + bias has been multiplied by gain: DoRA rescales W x alone (its section 4)."""
    shift = None if saved.lora_bias is None else saved.lora_bias * saved.scale
    new = bias if saved.bias is None else saved.bias
    if new is None or (gain is None and saved.bias is None):
        return shift
    kept = 0.0 if bias is None else bias if gain is None else bias * gain
    return new - kept if shift is None else new - kept + shift


def _dora_gain(saved: SavedLinear, base: FrozenLinear, device: torch.device) -> Tensor:
    """magnitude / ||W + s B A|| by rows (Liu et al., 2024, arXiv 2402.09353): [out_features] float32.

    ||w + s b A||^2 = ||w||^2 + 2 s b . (A w) + s^2 b (A A^T) b, so that the delta is never formed.
    """
    assert saved.a is not None
    assert saved.b is not None
    assert saved.magnitude is not None
    a, b = saved.a.double(), saved.b.double()  # [rank, in], [rank, out]
    across = base.product(saved.a.to(device, base.dtype)).double().cpu()  # A W^T, [rank, out]
    square = base.row_square_norms().double().cpu()
    square = square + 2 * saved.scale * (b * across).sum(0) + saved.scale**2 * (b * ((a @ a.t()) @ b)).sum(0)
    return (saved.magnitude.double() / square.clamp_min(0).sqrt()).float()


def _embedding(base: AdaptedModel[Any], path: str, saved: SavedEmbedding) -> EmbeddingDelta:
    """An embedding's delta; a scaled embedding multiplies it like its own rows."""
    scale = saved.scale * base.embedding_scale(path)
    if saved.magnitude is None:
        return EmbeddingDelta(saved.a, saved.b, scale)
    table = base.module.get_submodule(path).get_parameter("weight").double()  # [num_embeddings, dim]
    a, b = saved.a.to(base.device).double(), saved.b.to(base.device).double()
    square = (table**2).sum(0) + 2 * saved.scale * (b * (a.t() @ table)).sum(0)
    square = square + saved.scale**2 * (b * ((a.t() @ a) @ b)).sum(0)
    gain = (saved.magnitude.double() / square.cpu().clamp_min(0).sqrt()).float()
    return EmbeddingDelta(saved.a.float(), saved.b.float() * gain, scale, gain)


def _own(base: AdaptedModel[Any], path: str, parameters: Mapping[str, Tensor]) -> Change | None:
    """The module with the adapter's own parameters; None if they equal the base's, saved beside the trained ones."""
    originals = base.parameters_of(path)
    if all(_is_same(tensor, originals.get(name)) for name, tensor in parameters.items()):
        return None
    if path in (base.spec.input_embedding, base.spec.output_head) and originals.keys() == {"weight"}:
        table = parameters["weight"]
        ids = _changed_rows(table, originals["weight"])
        if len(ids) <= min(_FEW_ROWS, _FEW_SHARE * len(table)):
            return _rows(base, path, ids, table)
    module = base.module.get_submodule(path)
    if path in base.spec.linears:
        own = ReplacedWeights(base.linear(path), parameters)
        return own.to(base.device) if base.device.type == "cpu" else own
    return Twin(module, parameters)


def _changed_rows(table: Tensor, original: Tensor) -> Tensor:
    """The ids whose rows differ from the base's, ids that the base does not have included."""
    common = min(len(table), len(original))
    differs = torch.ones(len(table), dtype=torch.bool)
    differs[:common] = (table[:common].to(original.device, original.dtype) != original[:common]).any(1).cpu()
    return differs.nonzero()[:, 0]


def _rows(base: AdaptedModel[Any], path: str, ids: Tensor, table: Tensor) -> Change | None:
    """The few changed rows of a table: PEFT saves a resized model's tables whole, however few rows were trained."""
    if len(ids) == 0:
        return None  # a shorter table of the base's own rows
    if path == base.spec.output_head:
        return HeadRows(ids, table[ids], is_shared=False)
    return TokenRows(ids, table[ids] * base.embedding_scale(path))


def _is_same(tensor: Tensor, original: Tensor | None) -> bool:
    return original is not None and torch.equal(tensor.to(original.device, original.dtype), original)


def _weight(module: nn.Module, name: str, delta: SavedDelta) -> LowRankWeight:
    """The delta of a module's weight: a stack of experts' weights keeps its first dimension, a matrix loses it."""
    parameter = module.get_parameter(name)
    is_stack = parameter.dim() == 3
    return LowRankWeight(
        parameter, delta.a if is_stack else delta.a[0], delta.b if is_stack else delta.b[0], delta.scale
    )
