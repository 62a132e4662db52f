"""The exact factors of one linear layer's delta, to which every low-rank method is converted. Plain numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lora_serve.core.errors import InvalidAdapterError

Array: TypeAlias = npt.NDArray[np.floating[Any]]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]  # by role
Arrays: TypeAlias = Mapping[str, Array]  # by role


@dataclass(frozen=True, slots=True)
class Factors:
    """delta_W [out, in] = scale * b.T @ a."""

    a: npt.NDArray[np.float32]  # [rank, in_features], contiguous
    b: npt.NDArray[np.float32]  # [rank, out_features], contiguous: LoRA's B transposed
    scale: float


def rounded(a: Array, b: Array, scale: float, module: str) -> Factors:
    """Round float64 factors once. Raises InvalidAdapterError if a product is too large for float32."""
    with np.errstate(over="ignore"):
        a32, b32 = (np.ascontiguousarray(side, dtype=np.float32) for side in (a, b))
    if not (np.isfinite(a32).all() and np.isfinite(b32).all()):
        raise InvalidAdapterError([f"the weights of {module} multiply to values too large for float32"])
    return Factors(a32, b32, scale)


def wide(arrays: Arrays) -> dict[str, npt.NDArray[np.float64]]:
    return {role: array.astype(np.float64) for role, array in arrays.items()}


def split(matrix: Array) -> tuple[Array, Array]:
    """A full matrix [m, n] as left [m, k] @ right [k, n], k = min(m, n): itself and an identity."""
    rows, columns = matrix.shape
    return (np.eye(rows), matrix) if rows <= columns else (matrix, np.eye(columns))


def misfits(module: str, shapes: Shapes, expected: Shapes) -> list[str]:
    """Differences of the saved shapes from the expected ones: missing roles, further roles, wrong dimensions."""
    reasons = [f"{role} of {module} is missing" for role in expected.keys() - shapes.keys()]
    reasons += [f"{role} of {module} does not belong to a linear layer" for role in shapes.keys() - expected.keys()]
    reasons += [
        f"{role} of {module} has shape {list(shapes[role])}, but the config and the base model's layer ask for "
        f"{list(expected[role])}"
        for role in expected.keys() & shapes.keys()
        if tuple(shapes[role]) != expected[role]
    ]
    return sorted(reasons)
