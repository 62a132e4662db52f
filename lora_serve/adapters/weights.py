"""Adapter weights as host tensors. The only file of this floor that knows torch."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lora_serve.adapters.artifact import Artifact, read_artifact
from lora_serve.adapters.binding import BoundModule
from lora_serve.adapters.digest import WEIGHTS_NAME, adapter_digest
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec

DtypePolicy = Mapping[str, torch.dtype]  # safetensors dtype -> host dtype
# float16's range is too small to mix with bfloat16 and float32 activations, and CPUs compute it slowly.
HOST_DTYPES: DtypePolicy = types.MappingProxyType({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float32})

_INTEGERS = {2: torch.int16, 4: torch.int32}  # by bytes
_ALL_BUT_SIGN = {2: 0x7FFF, 4: 0x7FFFFFFF}
_EXPONENTS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One linear layer's delta: y [n, out] += scale * (x [n, in] @ a.T) @ b."""

    a: Tensor  # [rank, in_features], contiguous
    b: Tensor  # [rank, out_features], contiguous: PEFT's lora_B transposed
    scale: float  # not folded into a or b: folding would round twice in bfloat16


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """One adapter version in host memory."""

    digest: str
    name: str
    num_bytes: int
    rank: int  # the largest of any module
    modules: Mapping[str, LoraModule]  # by module path, as in ModelSpec.linears


def load_host_adapter(
    folder: Path, adapter: AdapterRef, spec: ModelSpec, dtype_policy: DtypePolicy = HOST_DTYPES
) -> HostAdapter:
    """Read the adapter's files into memory of our own (no file mapping stays open).

    Raises InvalidAdapterError if the content is not what `adapter.digest` names or does not fit `spec`, OSError.
    """
    found = adapter_digest(folder)
    if found != adapter.digest:
        raise InvalidAdapterError([f"the stored files are corrupt: their digest is {found}, not {adapter.digest}"])
    artifact = read_artifact(folder, spec, digest=found)
    with _open(folder) as file:
        modules = {path: _module(file, bound, artifact, dtype_policy) for path, bound in artifact.modules.items()}
    num_bytes = sum(module.a.nbytes + module.b.nbytes for module in modules.values())
    return HostAdapter(adapter.digest, adapter.name, num_bytes, artifact.rank, types.MappingProxyType(modules))


def fetch_host_adapter(store: AdapterStore, spec: ModelSpec, adapter: AdapterRef) -> HostAdapter:
    """What a Loader fetches. Raises AdapterUnavailableError, InvalidAdapterError, OSError."""
    with store.open(adapter.digest) as folder:
        return load_host_adapter(folder, adapter, spec)


def check_values(folder: Path, artifact: Artifact, allow_noop: bool = False) -> None:
    """Every value is finite and, unless `allow_noop`, some module's delta is not zero.

    Raises InvalidAdapterError naming the tensors, OSError.
    """
    with _open(folder) as file:
        reasons = [f"tensor {name!r} holds NaN or infinity" for name in artifact.tensors if not _is_finite(file, name)]
        if not reasons and not allow_noop and all(_is_noop(file, module) for module in artifact.modules.values()):
            reasons.append("it changes nothing: in every module lora_A, lora_B or the scale is zero")
    if reasons:
        raise InvalidAdapterError(reasons)


def _open(folder: Path) -> Any:
    try:
        return safe_open(folder / WEIGHTS_NAME, framework="pt", device="cpu")
    except SafetensorError as error:
        raise InvalidAdapterError([f"{WEIGHTS_NAME} is not a safetensors file: {error}"]) from None


def _module(file: Any, bound: BoundModule, artifact: Artifact, policy: DtypePolicy) -> LoraModule:
    names = bound.a_name, bound.b_name
    dtype = torch.promote_types(*(policy[artifact.tensors[name].dtype] for name in names))
    a, b = (file.get_tensor(name) for name in names)
    return LoraModule(_copy(a, dtype), _copy(b.t(), dtype), bound.scale)


def _copy(view: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor that owns its memory: `view` lies in the file's mapping.

    By numpy, on this thread alone: torch's own copy would start a second team of OpenMP threads beside the engine's
    (measured on 2 busy cores: 2.7 s against 0.1 s for 84 MB).
    """
    if view.dtype == torch.float16 and dtype == torch.float32:
        return torch.from_numpy(view.numpy().astype("float32", order="C"))
    copy = torch.from_numpy(_bits(view).copy(order="C")).view(view.dtype)
    return copy if copy.dtype == dtype else copy.to(dtype)


def _bits(tensor: Tensor) -> Any:
    """The tensor's memory as a numpy array of signed integers of the same width; numpy knows no bfloat16."""
    return tensor.view(_INTEGERS[tensor.itemsize]).numpy()


def _is_finite(file: Any, name: str) -> bool:
    tensor = file.get_tensor(name)
    mask = _EXPONENTS[tensor.dtype]
    return bool((_bits(tensor) & mask).max() < mask)  # NaN and infinity have every bit of the exponent set


def _is_noop(file: Any, module: BoundModule) -> bool:
    return module.scale == 0.0 or any(_is_zero(file.get_tensor(name)) for name in (module.a_name, module.b_name))


def _is_zero(tensor: Tensor) -> bool:
    return not (_bits(tensor) & _ALL_BUT_SIGN[tensor.itemsize]).any()
