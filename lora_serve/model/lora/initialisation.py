"""Rewrites PiSSA and OLoRA adapters, which changed the base's weights before the training, for the base as it is.

Both start from A0, B0 made of the weight and train against W - s B0 A0. PEFT repeats that whenever it loads such a
checkpoint; here the base is shared and stays unchanged. Against it the adapter is s (B A - B0 A0): exact, but of twice
the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_serve.adapters.checkpoint.weights.saved import SavedAdapter, SavedEmbedding, SavedLinear
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.model.frozen_linear import FrozenLinear
from lora_serve.model.lora.adapted_model import AdaptedModel


@torch.inference_mode()
def undo(saved: SavedAdapter, init: str, check: Callable[[], None], base: AdaptedModel[Any]) -> SavedAdapter:
    """`saved` as a LoRA of the unchanged base, each rank doubled. `init`: "pissa" or "olora".

    `check`: called before each layer; ends the work by what it raises. Layers without such an initialisation are filled
    up with zeros. Raises InvalidAdapterError.
    """
    if reasons := list(_reasons(saved, init, base)):
        raise InvalidAdapterError(reasons)
    linears = {}
    for path, linear in saved.linears.items():
        check()
        is_relative = _is_relative(saved, path)
        linears[path] = _undone(linear, init, base.linear(path)) if is_relative else _padded_linear(linear)
    embeddings = {path: _padded_embedding(embedding) for path, embedding in saved.embeddings.items()}
    return replace(saved, linears=linears, embeddings=embeddings)


def _is_relative(saved: SavedAdapter, path: str) -> bool:
    """True for layers that PEFT initialises: no bias, no embedding, and no head whose changed weight is saved whole."""
    return saved.linears[path].a is not None and "weight" not in saved.parameters.get(path, {})


def _reasons(saved: SavedAdapter, init: str, base: AdaptedModel[Any]) -> Iterator[str]:
    for path, linear in saved.linears.items():
        is_relative = _is_relative(saved, path)
        if is_relative and base.linear(path).dense() is None:
            yield f"{path}: its {init} initialisation cannot be taken back on a quantised base: {_CONVERT}"
        if linear.a is not None and path == base.spec.output_head and base.spec.ties_embeddings:
            yield f"{path}: its {init} initialisation changes the input embedding too, which is tied to it"
        if is_relative and init == "pissa" and linear.scale <= 0:
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
    return _rows(root[:, None] * (right @ q_in.t()), rank), _rows((q_out @ left * root).t(), rank)


def _rows(tensor: Tensor, num: int) -> Tensor:
    """[n, features] filled up with rows of zeros: a layer may have fewer features than twice the rank."""
    return F.pad(tensor, (0, 0, 0, num - tensor.shape[0])).contiguous()


def _padded_linear(saved: SavedLinear) -> SavedLinear:
    if saved.a is None or saved.b is None:
        return saved
    rank = 2 * saved.a.shape[0]
    return replace(saved, a=_rows(saved.a, rank), b=_rows(saved.b, rank))


def _padded_embedding(saved: SavedEmbedding) -> SavedEmbedding:
    rank = saved.b.shape[0]
    return replace(saved, a=F.pad(saved.a, (0, rank)), b=_rows(saved.b, 2 * rank))
