"""Works the base into an adapter as it was saved: into the form of the device slots (`fold`), and a PiSSA's or OLoRA's
initialisation back out of it (`undo`).

Runs on a thread: the loaders', or that of a registration's check. Reads the base and changes nothing of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_serve.adapters.checkpoint.saved import SavedAdapter, SavedDelta, SavedEmbedding, SavedLinear
from lora_serve.core.errors import InvalidAdapterError
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
    changes: defaultdict[str, list[Change]] = defaultdict(list)
    for path, parameters in saved.parameters.items():
        if (own := _own(base, path, parameters)) is not None:
            changes[path].append(own)
    stacks: dict[str, LinearDelta] = {}
    for path, table in saved.deltas.items():
        found = {f"{path}.{name}": LinearDelta(delta.a, delta.b, delta.scale) for name, delta in table.items()}
        if found.keys() <= base.module_index.keys():
            stacks |= found
        else:
            module = base.module.get_submodule(path)
            is_transposed = path in base.spec.transposed
            weights = {name: _weight(getattr(module, name), delta, is_transposed) for name, delta in table.items()}
            changes[path].append(Twin(module, weights))
    for path, tokens in saved.tokens.items():
        ids, order = torch.tensor(tokens.token_ids).sort()
        changes[path].append(_rows(base, path, ids, tokens.rows[order]))
        if path == base.spec.input_embedding and base.spec.ties_embeddings and path != base.spec.output_head:
            changes[base.spec.output_head].append(HeadRows(ids, tokens.rows[order]))
    for path, embedding in saved.embeddings.items():
        changes[path].append(_embedding(base, path, embedding))
    for path, linear in saved.linears.items():
        if linear.input_gain is not None:
            changes[path].append(InputGain(base.linear(path), linear.input_gain))
    deltas = {
        path: _linear(linear, base.linear(path), base.device)
        for path, linear in saved.linears.items()
        if linear.input_gain is None
    }
    adapter = HostAdapter(
        saved.digest,
        saved.rank,
        deltas | stacks,
        {path: tuple(table) for path, table in changes.items()},
        saved.vocab_size,
        is_plain=saved.is_plain,
    )
    return in_arena(adapter, base.module_index, pin=base.device.type == "cuda")


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
    across = base.exact_product(saved.a.to(device, base.dtype)).double().cpu()  # A W^T, [rank, out]
    square = base.row_square_norms().double().cpu()
    square = square + 2 * saved.scale * (b * across).sum(0) + saved.scale**2 * (b * ((a @ a.t()) @ b)).sum(0)
    return (saved.magnitude.double() / square.clamp_min(0).sqrt()).float()


def _embedding(base: AdaptedModel[Any], path: str, saved: SavedEmbedding) -> EmbeddingDelta:
    """An embedding's delta; a scaled embedding multiplies it like its own rows."""
    scale = saved.scale * (base.spec.embeddings[path].scale or 1.0)
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
    is_looked_up = path not in base.spec.embeddings or base.spec.embeddings[path].scale is not None
    if path in (base.spec.input_embedding, base.spec.output_head) and originals.keys() == {"weight"} and is_looked_up:
        table = parameters["weight"]
        ids = _changed_rows(table, originals["weight"])
        if len(ids) <= min(_FEW_ROWS, _FEW_SHARE * len(table)):  # PEFT saves a resized model's tables whole
            return _rows(base, path, ids, table[ids]) if len(ids) else None  # None: a shorter table of the base's rows
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


def _rows(base: AdaptedModel[Any], path: str, ids: Tensor, rows: Tensor) -> Change:
    """Rows of the output head, or of an embedding, in place of its own."""
    if path == base.spec.output_head:
        return HeadRows(ids, rows, is_shared=False)
    return TokenRows(ids, rows * (base.spec.embeddings[path].scale or 1.0))


def _is_same(tensor: Tensor, original: Tensor | None) -> bool:
    return original is not None and torch.equal(tensor.to(original.device, original.dtype), original)


def _weight(base: Any, delta: SavedDelta, is_transposed: bool) -> LowRankWeight:
    """A weight with its delta: a stack of experts' weights keeps its first dimension, a matrix loses it."""
    if base.dim() == 2:
        return LowRankWeight(base, delta.b[0], delta.a[0], delta.scale)
    left, right = (delta.a, delta.b) if is_transposed else (delta.b, delta.a)
    return LowRankWeight(base, left, right, delta.scale)


@torch.inference_mode()
def undo(saved: SavedAdapter, init: str, check: Callable[[], None], base: AdaptedModel[Any]) -> SavedAdapter:
    """`saved` as a LoRA of the unchanged base, each rank doubled. `init`: "pissa" or "olora".

    `check`: called before each layer; ends the work by what it raises. Layers without such an initialisation are filled
    up with zeros. Raises InvalidAdapterError.
    """
    if reasons := list(_obstacles(saved, init, base)):
        raise InvalidAdapterError(reasons)
    linears = {}
    for path, linear in saved.linears.items():
        check()
        was_initialised = _was_initialised(saved, path)
        linears[path] = _undone(linear, init, base.linear(path)) if was_initialised else _padded_linear(linear)
    embeddings = {path: _padded_embedding(embedding) for path, embedding in saved.embeddings.items()}
    return replace(saved, linears=linears, embeddings=embeddings)


def _was_initialised(saved: SavedAdapter, path: str) -> bool:
    """True for layers that PEFT initialises: no bias, no embedding, and no head whose changed weight is saved whole."""
    return saved.linears[path].a is not None and "weight" not in saved.parameters.get(path, {})


def _obstacles(saved: SavedAdapter, init: str, base: AdaptedModel[Any]) -> Iterator[str]:
    """Why the initialisation cannot be taken back, for each layer where it cannot."""
    for path in saved.deltas:
        yield f"{path}: its {init} initialisation cannot be taken back, as its experts are one stack here: {_CONVERT}"
    for path, linear in saved.linears.items():
        was_initialised = _was_initialised(saved, path)
        if was_initialised and base.linear(path).dense() is None:
            yield f"{path}: its {init} initialisation cannot be taken back on a quantised base: {_CONVERT}"
        if linear.a is not None and path == base.spec.output_head and base.spec.ties_embeddings:
            yield f"{path}: its {init} initialisation changes the input embedding too, which is tied to it"
        if was_initialised and init == "pissa" and linear.scale <= 0:
            yield f"{path}: PiSSA needs a scale above zero (got {linear.scale:g})"


_CONVERT = "convert the adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"


def _undone(saved: SavedLinear, init: str, base: FrozenLinear) -> SavedLinear:
    assert saved.a is not None
    assert saved.b is not None
    a0, b0 = _initial(base, init, saved.a.shape[0], saved.scale)
    a, b = _difference(saved.a.to(a0), saved.b.to(b0), a0, b0)
    return replace(saved, a=a.float().cpu(), b=b.float().cpu())


def _initial(base: FrozenLinear, init: str, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """A0 [rank, in] and B0 transposed [rank, out], float64 on the base's device; only their product is PEFT's own."""
    weight = base.dense()
    assert weight is not None
    weight = weight.double()  # [out, in]
    if init == "pissa":
        a0, b0 = _largest_part(weight, rank)
        return a0 / scale, b0
    if base.is_transposed:  # PEFT decomposes the weight as a Conv1D holds it
        b0, a0 = _first_columns(weight.t(), rank)
        return a0, b0
    return _first_columns(weight, rank)


def _largest_part(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """PiSSA (Meng et al., 2024, arXiv 2404.02948): weight's best approximation of that rank, b^T a = U U^T W.

    The eigenvectors of the smaller Gram matrix: half the time of an SVD, and in float64 no less exact for the largest.
    """
    if weight.shape[0] <= weight.shape[1]:
        left = torch.linalg.eigh(weight @ weight.t()).eigenvectors[:, -rank:]  # [out, rank]
        return left.t() @ weight, left.t()
    right = torch.linalg.eigh(weight.t() @ weight).eigenvectors[:, -rank:]  # [in, rank]
    return right.t(), (weight @ right).t()


def _first_columns(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """OLoRA (Büyükakyüz, 2024, arXiv 2406.01775): the first columns of Q and rows of R of weight = Q R.

    They follow from the weight's first columns alone: Q_r spans them, and R_r = Q_r^T W.
    """
    q = torch.linalg.qr(weight[:, :rank]).Q  # [rows, rank]
    return q.t() @ weight, q.t()


def _difference(a: Tensor, b: Tensor, a0: Tensor, b0: Tensor) -> tuple[Tensor, Tensor]:
    """b^T a - b0^T a0 as two factors of rank 2 r whose parts do not cancel one another.

    [a; a0] and [b; -b0] are the same, but each is as large as the weight and they differ by what was learned; rounded
    to bfloat16 for storage or computation, that would be lost. So: QR of both, SVD of the small core.
    """
    rank = 2 * a.shape[0]
    q_in, r_in = torch.linalg.qr(torch.cat([a, a0]).t())
    q_out, r_out = torch.linalg.qr(torch.cat([b, -b0]).t())
    left, values, right = torch.linalg.svd(r_out @ r_in.t(), full_matrices=False)
    root = values.sqrt()
    return _padded_rows(root[:, None] * (right @ q_in.t()), rank), _padded_rows((q_out @ left * root).t(), rank)


def _padded_rows(tensor: Tensor, num: int) -> Tensor:
    """[n, features] filled up with rows of zeros: a layer may have fewer features than twice the rank."""
    return F.pad(tensor, (0, 0, 0, num - tensor.shape[0])).contiguous()


def _padded_linear(saved: SavedLinear) -> SavedLinear:
    if saved.a is None or saved.b is None:
        return saved
    rank = 2 * saved.a.shape[0]
    return replace(saved, a=_padded_rows(saved.a, rank), b=_padded_rows(saved.b, rank))


def _padded_embedding(saved: SavedEmbedding) -> SavedEmbedding:
    rank = saved.b.shape[0]
    return replace(saved, a=F.pad(saved.a, (0, rank)), b=_padded_rows(saved.b, 2 * rank))
