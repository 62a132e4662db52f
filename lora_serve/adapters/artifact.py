"""A PEFT folder that has been checked against the base model: nothing unproven comes past this file. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_serve.adapters.binding import BoundModule, bind
from lora_serve.adapters.digest import CONFIG_NAME, WEIGHTS_NAME, adapter_digest
from lora_serve.adapters.peft_config import LoraConfig, read_config
from lora_serve.adapters.safetensors_header import TensorInfo, read_header
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec

HOST_BYTES = {"F32": 4, "BF16": 2, "F16": 4}  # float16 is widened to float32 on the host


@dataclass(frozen=True, slots=True)
class Artifact:
    """One adapter version whose files are well formed and fit the base model."""

    digest: str
    config: LoraConfig
    tensors: Mapping[str, TensorInfo]
    num_bytes: int  # of its LoRA weights in host memory
    rank: int  # the largest of any module
    modules: Mapping[str, BoundModule]


def read_artifact(folder: Path, spec: ModelSpec, max_rank: int | None = None, digest: str | None = None) -> Artifact:
    """Check the folder's two files and bind every tensor. `digest`: the folder's, if it is known already.

    The values themselves are `weights.check_values`'s part. Raises InvalidAdapterError with every reason, OSError.
    """
    config, tensors = _read(folder, max_rank)
    modules = bind(config, tensors, spec)
    num_bytes = sum(module_bytes(module, tensors) for module in modules.values())
    rank = max(module.rank for module in modules.values())
    return Artifact(digest or adapter_digest(folder), config, tensors, num_bytes, rank, modules)


def module_bytes(module: BoundModule, tensors: Mapping[str, TensorInfo]) -> int:
    """Host bytes of one module's two tensors, which share the wider of their dtypes."""
    pair = tensors[module.a_name], tensors[module.b_name]
    width = max(HOST_BYTES[tensor.dtype] for tensor in pair)
    return sum(tensor.shape[0] * tensor.shape[1] * width for tensor in pair)


def _read(folder: Path, max_rank: int | None) -> tuple[LoraConfig, Mapping[str, TensorInfo]]:
    check_files(folder)
    reasons: list[str] = []
    config = tensors = None
    try:
        config = read_config(folder / CONFIG_NAME, max_rank)
    except InvalidAdapterError as error:
        reasons += error.reasons
    try:
        tensors = read_header(folder / WEIGHTS_NAME)
    except InvalidAdapterError as error:
        reasons += error.reasons
    if config is None or tensors is None:
        raise InvalidAdapterError(reasons)
    return config, tensors


def check_files(folder: Path) -> None:
    """Both files are there, as regular files. Raises InvalidAdapterError."""
    reasons = [f"{name} is missing" for name in (CONFIG_NAME, WEIGHTS_NAME) if not _is_regular(folder / name)]
    if reasons and (folder / "adapter_model.bin").exists():
        reasons.append("adapter_model.bin is a pickle: save the adapter as safetensors")
    if reasons:
        raise InvalidAdapterError(reasons)


def _is_regular(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()
