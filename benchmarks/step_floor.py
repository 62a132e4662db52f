"""The floor of a step on a CPU: its own base products with nothing between them, and the bytes that it must read.

    floor = seconds of every frozen linear layer, called back to back on the step's rows, the output head included,
            by this project's products or by oneDNN's on prepacked weights, whichever are faster
          + (bytes of the different adapters in the batch + bytes of the keys and values read) / read bandwidth

The bandwidth is measured in the same run, by summing a tensor that is larger than any cache.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import onednn
from benchmarks.alternating import Clock
from benchmarks.step_model import StepModel
from benchmarks.step_seams import Product, num_weights_of, products_of
from lora_serve.core.batch import Batch
from lora_serve.model.base_model import BaseModel

_SUM_BYTES = 2**28  # of the tensor that is summed


def gemms_of(model: StepModel, batch: Batch) -> Callable[[], None]:
    """A function that computes the step's base products and nothing else.

    The very calls that the step makes, so that fused layers count as what they are; where a step's products are not
    all calls of `FrozenLinear`, its layers by their paths, one product each.
    """
    return _replay(_products(model, batch))


def onednn_gemms_of(model: StepModel, batch: Batch) -> Callable[[], None] | None:
    """The same products by oneDNN, on weights of the model's type that it has laid out itself.

    None where it does not multiply this type natively, or a weight is quantised.
    """
    dtype = getattr(torch, model.spec.dtype)
    calls = []
    for product in _products(model, batch):
        weight = product.layer.dense()
        if weight is None or not onednn.can_prepack(weight.to(dtype)):
            return None
        x = torch.randn(product.shape).to(dtype).flatten(0, -2)
        calls.append(functools.partial(onednn.linear, x, onednn.prepack(weight.to(dtype)), None))
    return _together(calls)


def _products(model: StepModel, batch: Batch) -> list[Product]:
    products = products_of(lambda: model.parts.runner.run(batch))
    weights = sum(product.num_weights for product in products)
    expected = sum(shape.in_features * shape.out_features for shape in model.spec.linears.values())
    return products if weights == expected else _by_path(model, batch)


def _by_path(model: StepModel, batch: Batch) -> list[Product]:
    base: BaseModel = model.parts.fold.keywords["base"]  # type: ignore[attr-defined]
    num_logits = sum(row.sample is not None for row in batch.rows)
    dtype = getattr(torch, model.spec.dtype)
    found = []
    for path, linear in model.spec.linears.items():
        rows = num_logits if path == model.spec.output_head else batch.num_tokens
        layer = base.linear(path)
        found.append(Product(layer, "product", (), num_weights_of(layer), (rows, linear.in_features), dtype))
    return found


def _replay(products: Sequence[Product]) -> Callable[[], None]:
    inputs: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
    calls = []
    for product in products:
        key = (product.shape, product.dtype)
        if key not in inputs:
            inputs[key] = torch.randn(product.shape).to(product.dtype)
        calls.append(functools.partial(getattr(product.layer, product.method), inputs[key], *product.arguments))
    return _together(calls)


def _together(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    @torch.inference_mode()
    def run() -> None:
        for call in calls:
            call()

    return run


def read_bandwidth(clock: Clock = time.perf_counter, rounds: int = 7) -> float:
    """Bytes per second at which torch sums a large tensor, the best of `rounds`."""
    tensor = torch.ones(_SUM_BYTES // 4)
    best = float("inf")
    for _ in range(rounds):
        start = clock()
        tensor.sum()
        best = min(best, clock() - start)
    return _SUM_BYTES / best
