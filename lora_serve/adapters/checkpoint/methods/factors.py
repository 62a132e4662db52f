"""The exact factors of one linear layer's delta, to which every low-rank method is converted. Plain numpy."""

from __future__ import annotations

import re
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


def tensor_names(roles: str) -> re.Pattern[str]:
    """The names of tensors of one module. `roles`: a pattern. Older files keep the adapter's name at the end."""
    return re.compile(rf"(?:base_model\.model\.)?(?P<module>.+)\.(?P<role>{roles})(?:\.default)?\Z")


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


MAX_REDUCTION = 8  # times max_rank; more would cost too much to try


@dataclass(frozen=True, slots=True)
class Compression:
    factors: Factors | None  # None: refused
    errors: tuple[tuple[int, float], ...]  # (rank, relative Frobenius error) at the ranks tried, ascending
    reason: str  # empty unless refused


def too_large(rank: int, max_rank: int) -> str:
    """The reason why factors of `rank` are not even tried; empty if they are. Known from shapes alone."""
    if rank <= MAX_REDUCTION * max_rank:
        return ""
    return f"its exact rank is {rank}, more than {MAX_REDUCTION} times the largest rank served, {max_rank}: not tried"


def compress(factors: Factors, max_rank: int, tolerance: float = 1e-5) -> Compression:
    """The least rank up to `max_rank` whose relative Frobenius error is within `tolerance`, or a refusal."""
    rank = factors.a.shape[0]
    if rank <= max_rank:
        return Compression(factors, ((rank, 0.0),), "")
    reason = too_large(rank, max_rank)
    if reason:
        return Compression(None, (), reason)
    left, values, right = _singular(factors)
    errors = _errors(values)
    needed = max(1, int(np.argmax(errors <= tolerance)))
    tried = tuple((k, float(errors[k])) for k in sorted({needed, min(max_rank, len(values))}))
    if needed > max_rank:
        reason = f"rank {max_rank} has a relative error of {errors[max_rank]:.2g}; within {tolerance:g} needs {needed}"
        return Compression(None, tried, reason)
    return Compression(_truncated(left, values, right, needed, factors.scale), tried, "")


def _singular(factors: Factors) -> tuple[Array, npt.NDArray[np.float64], Array]:
    """b.T @ a = left [out, k] diag(values) right [k, in]."""
    q_in, r_in = np.linalg.qr(factors.a.T.astype(np.float64))
    q_out, r_out = np.linalg.qr(factors.b.T.astype(np.float64))
    left, values, right = np.linalg.svd(r_out @ r_in.T, full_matrices=False)
    return q_out @ left, values, right @ q_in.T


def _errors(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The relative error at each rank from 0 to len(values)."""
    tails = np.append(np.sqrt(np.cumsum(values[::-1] ** 2)[::-1]), 0.0)
    return tails / (tails[0] or 1.0)


def _truncated(left: Array, values: Array, right: Array, rank: int, scale: float) -> Factors:
    root = np.sqrt(values[:rank])
    a = np.ascontiguousarray(root[:, None] * right[:rank], dtype=np.float32)
    b = np.ascontiguousarray((left[:, :rank] * root).T, dtype=np.float32)
    return Factors(a, b, scale)
