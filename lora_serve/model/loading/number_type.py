"""The type of a model's numbers, and quantised base weights as transformers' own configs make and load them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import TorchAoConfig
from transformers.utils.import_utils import is_accelerate_available, is_torchao_available
from transformers.utils.quantization_config import Mxfp4Config

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError, how_to_install
from lora_serve.model.native import compiler, library

FLOAT8 = torch.float8_e4m3fn
_STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors names them
_EXTRA = f"install lora-serve's extra `quantization`: {how_to_install('quantization')}"
_INT4_GROUP = 32  # weights that share a scale: the finest that the kernels have, and a divisor of most widths
_MXFP4 = "mxfp4"  # gpt-oss: experts in blocks of 32 numbers of 4 bits, which are loaded as plain ones
# What a checkpoint may say it was stored with: weights only. Activations scaled over a whole batch (torchao's dynamic
# kinds may, LLM.int8()'s outlier columns always are) would let a row's answer depend on its neighbours.
_STORED_SCHEMES = {
    "torchao Int8WeightOnlyConfig": "int8",
    "torchao Int4WeightOnlyConfig": "int4",
    "torchao IntxWeightOnlyConfig": "intx",
    "torchao Float8WeightOnlyConfig": "float8",
    "bitsandbytes 4-bit": "bitsandbytes 4-bit",
    _MXFP4: _MXFP4,
}


@dataclass(frozen=True, slots=True)
class NumberType:
    """A type, and why it was chosen."""

    dtype: torch.dtype
    reason: str


def stored_parts(model: str) -> Iterator[tuple[str, str, list[int]]]:
    """Name, type as safetensors names it, and shape of each tensor in a folder, by the headers of its files."""
    for file in sorted(Path(model).glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                part = stored.get_slice(name)
                yield name, part.get_dtype(), part.get_shape()


def stored_type(model: str) -> torch.dtype | None:
    """The type of most floating point numbers in a folder's safetensors; None: none are there.

    config.json may lack the type, or name another than its files hold.
    """
    sizes: Counter[torch.dtype] = Counter()
    for _, dtype, shape in stored_parts(model):
        if dtype in _STORED:
            sizes[_STORED[dtype]] += math.prod(shape)
    return sizes.most_common(1)[0][0] if sizes else None


def number_type(
    name: str, hf_config: Any, device: torch.device, asked: str = "as asked", stored: torch.dtype | None = None
) -> NumberType:
    """The type of weights and activations for --dtype `name`. Raises ConfigError.

    `asked`: why it is no "auto"; `stored`: the type of the checkpoint's files, where it is known.
    """
    own: torch.dtype = stored or getattr(hf_config, "dtype", None) or torch.float32
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return NumberType(chosen, asked + _slowness(chosen, device))
    if device.type != "cpu":
        return NumberType(own, "the checkpoint's own")
    if own == torch.bfloat16:
        why_not = _why_not_bfloat16(device)
        if why_not is None:
            return NumberType(own, "the checkpoint's own, which this processor multiplies faster than float32")
        return NumberType(torch.float32, f"the checkpoint is bfloat16, but {why_not}")
    if own == torch.float16:
        return NumberType(torch.float32, "the checkpoint is float16, of which bfloat16 would lose 3 bits")
    return NumberType(torch.float32, "the checkpoint's own" if own == torch.float32 else f"the checkpoint is {own}")


def _why_not_bfloat16(device: torch.device) -> str | None:
    """The reason why bfloat16 is no faster than float32 on a CPU; None: it is."""
    level = compiler.current()
    if not level.multiplies_bfloat16:
        return f"kernels of level {level.name} multiply it no faster than float32"
    return library.why_not(device, torch.bfloat16)


def _slowness(dtype: torch.dtype, device: torch.device) -> str:
    if device.type != "cpu" or dtype != torch.bfloat16:
        return ""
    why_not = _why_not_bfloat16(device)
    return "" if why_not is None else f"; float32 would be as fast: {why_not}"


@dataclass(frozen=True, slots=True)
class Source:
    """A class of transformers, and what its `from_pretrained` is called with."""

    model_class: Any
    name: str | None  # None: `arguments` hold all
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """The way to load: `--dtype` as it results, further arguments of `from_pretrained`, and the work behind it."""

    dtype: str  # "auto" or a type's name
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settle: Callable[[Any, torch.device], None] = lambda module, device: None  # of what is loaded, and where it goes
    open: Callable[[Any, torch.dtype], Source] | None = None  # by an auto class and the model's type: of packed files
    check: Callable[[], None] = lambda: None  # looks at files that are there, short of loading them; raises ModelError


def plan_quantization(config: ModelConfig, hf_config: Any, device: torch.device) -> QuantizationPlan:
    """Compares the flag with the checkpoint. Raises ConfigError (the flag cannot be followed) and ModelError."""
    stored = quantization_of(hf_config)
    if stored is not None:
        name = _check_stored(config, stored if isinstance(stored, dict) else stored.to_dict(), device)
        if name == _MXFP4:
            _check_blocks(config.model)
            return QuantizationPlan(config.dtype, {"quantization_config": Mxfp4Config(dequantize=True)})
        return QuantizationPlan(config.dtype, _placed(device))
    if config.quantization == "none":
        return QuantizationPlan(config.dtype)
    _check_torchao(f"--quantization {config.quantization}")
    arguments = {"quantization_config": TorchAoConfig(torchao_scheme(config.quantization)), **_placed(device)}
    return QuantizationPlan(_activation_dtype(config), arguments, lambda module, device: _check_made(module, config))


def quantization_of(hf_config: Any) -> Any:
    """The `quantization_config` of a model, or that of its text's part; None: it has none."""
    found = getattr(hf_config, "quantization_config", None)
    return found if found is not None else getattr(hf_config.get_text_config(), "quantization_config", None)


def is_rounded_here(kind: str, device: torch.device) -> bool:
    """True if `--quantization` makes a packed checkpoint of a plain one; else torchao quantises what is loaded."""
    return kind == "fp8" or (kind != "none" and device.type == "cpu")


def torchao_scheme(name: str) -> Any:
    """torchao's config for a GPU of "int8" (a scale per row) or "int4" (one per 32 weights).

    torchao's global compiler settings, one of which would lower float32's precision, are left alone.
    """
    from torchao import quantization  # noqa: PLC0415 - an optional package

    if name == "int8":
        return quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    layout = "tile_packed_to_4d"  # torch's own kernel; the other layouts need further packages
    return quantization.Int4WeightOnlyConfig(
        group_size=_INT4_GROUP, int4_packing_format=layout, set_inductor_config=False
    )


def _check_made(module: nn.Module, config: ModelConfig) -> None:
    """Raise ConfigError if torchao found no layer to quantise (GPT-2's Conv1D, say)."""
    if not any(is_quantized(weight) for weight in module.parameters()):
        raise ConfigError(
            f"--quantization {config.quantization}: no layer of {config.model} can be quantised "
            f"({type(module).__name__}: its layers are not nn.Linear, or not of a width that has a product); "
            "leave the flag out"
        )


def is_quantized(weight: Tensor) -> bool:
    """True for integers and FP8, and where torchao (a tensor subclass) or bitsandbytes (a parameter with a state) packs
    weights.
    """
    is_bitsandbytes = hasattr(weight, "quant_state") or hasattr(weight, "CB")
    return is_bitsandbytes or _is_torchao(weight) or weight.dtype == FLOAT8 or not weight.is_floating_point()


def resident_bytes(module: nn.Module) -> int:
    """The bytes of parameters and buffers in memory: each storage once, quantised weights as they are packed."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    return sum({part.data_ptr(): _bytes(part) for tensor in tensors for part in _parts(tensor)}.values())


def _bytes(tensor: Tensor) -> int:
    """Of the numbers that lie in memory: those of a dimension of stride 0 are one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.itemsize * math.prod(size for size, stride in sizes if stride)


def _is_torchao(weight: Any) -> bool:
    return bool(is_traceable_wrapper_subclass(weight))


def _parts(tensor: Any) -> Iterator[Tensor]:
    if _is_torchao(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor
        yield from _scales(getattr(tensor, "quant_state", None))


def _scales(state: Any) -> Iterator[Tensor]:
    """The tensors that bitsandbytes keeps beside a packed weight; its scales may be quantised in turn (`state2`)."""
    if state is not None:
        yield from (part for name in ("absmax", "code") if isinstance(part := getattr(state, name, None), Tensor))
        yield from _scales(getattr(state, "state2", None))


def check_asked(config: ModelConfig, name: str, *kinds: str) -> None:
    """Raises ConfigError if the flag asks for another kind than `name`, in which the checkpoint is stored; `kinds`: the
    flag's own names of that.
    """
    if config.quantization not in ("none", name, *kinds):
        raise ConfigError(
            f"--quantization {config.quantization}: {config.model} is quantised already ({name}) and cannot be "
            "quantised again; leave the flag out, or give the plain checkpoint"
        )


def _check_stored(config: ModelConfig, stored: Mapping[str, Any], device: torch.device) -> str:
    """The kind in which the checkpoint is stored, if it can be served. Raises ConfigError and ModelError."""
    scheme = _scheme_of(stored)
    name = _STORED_SCHEMES.get(scheme)
    if name is None:
        raise ModelError(
            f"--model {config.model}: quantised with {scheme}; served are torchao's weight-only kinds, bitsandbytes, "
            "MXFP4, compressed-tensors, gptq, awq, fp8, fbgemm_fp8 and modelopt, whose rows do not depend on their "
            "neighbours"
        )
    check_asked(config, name)
    if name == "int4" and device.type == "cpu":
        raise ModelError(
            f"--model {config.model}: torchao stores int4 in layouts for GPUs only; on a CPU serve the plain "
            "checkpoint with --quantization int4"
        )
    if scheme.startswith("torchao"):
        _check_torchao(f"--model {config.model} is quantised with torchao")
    return name


def _check_blocks(model: str) -> None:
    """Raises ModelError for MXFP4 that is not as its loader takes it for granted, in the files of a folder."""
    forms = {name: (dtype, shape) for name, dtype, shape in stored_parts(model)}
    for name in sorted(forms):
        weight, is_part, kind = name.rpartition("_")
        if not is_part or kind not in ("blocks", "scales"):
            continue
        (of_blocks, blocks), (of_scales, scales) = (
            forms.get(f"{weight}_{one}", ("", [])) for one in ("blocks", "scales")
        )
        if of_blocks != "U8" or of_scales != "U8" or blocks != [*scales, 16] or weight in forms:
            raise ModelError(
                f"--model {model}: {weight} is stored as blocks {of_blocks} {blocks} and scales {of_scales} {scales}; "
                "MXFP4 has bytes, [..., 16] for each scale, and no plain weight beside them"
            )


def _scheme_of(stored: Mapping[str, Any]) -> str:
    """The checkpoint's own words: "torchao Int8WeightOnlyConfig", "bitsandbytes 4-bit", "gptq"."""
    method = str(stored.get("quant_method"))
    if method == "bitsandbytes":
        return f"{method} {4 if stored.get('load_in_4bit') else 8}-bit"
    quant_type = stored.get("quant_type")
    inner = quant_type.get("default") if isinstance(quant_type, dict) else None
    return f"{method} {inner['_type']}" if isinstance(inner, dict) and "_type" in inner else method


def _check_torchao(asked: str) -> None:
    if not is_torchao_available():
        raise ConfigError(f"{asked}: needs torchao; {_EXTRA}")


def _placed(device: torch.device) -> dict[str, Any]:
    """Loading arguments that pack weights on the GPU where they stay: moved afterwards, some layouts break."""
    if device.type == "cpu":
        return {}
    if not is_accelerate_available():
        raise ConfigError(f"--device {device.type} with quantised weights needs accelerate; {_EXTRA}")
    return {"device_map": {"": device}}


def _activation_dtype(config: ModelConfig) -> str:
    """The type of activations: torchao's kernels of int4 know bfloat16 only."""
    if config.quantization != "int4" or config.dtype == "bfloat16":
        return config.dtype
    if config.dtype == "auto":
        return "bfloat16"
    raise ConfigError(f"--dtype {config.dtype}: --quantization int4 on a GPU multiplies bfloat16 only")
