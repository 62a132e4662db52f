"""Checkpoints in FP8: those of compressed-tensors' FP8-dynamic, and plain ones that are quantised while they load.

In the files of the first each quantised layer has a `weight` [out, in] of float8_e4m3fn and a `weight_scale`, one per
output ([out, 1]) or one in all ([1]). Layers without them are plain, whatever config.json's `targets` and `ignore` are.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ConfigError, ModelError
from lora_serve.model.loading.float8 import Float8Linear, can_multiply, multiplies_float8, quantized
from lora_serve.model.loading.number_type import FLOAT8, QuantizationPlan, check_asked

_METHOD = "lora_serve_float8"
_NOTHING: tuple[Any, ...] = (None, {}, [])
# The fields of config.json on which depends what the numbers mean, and the values that are served; None: not given.
_OF_CHECKPOINT: Mapping[str, tuple[Any, ...]] = {
    "format": ("float-quantized",),
    "kv_cache_scheme": _NOTHING,
    "transform_config": _NOTHING,
    "sparsity_config.format": (None, "dense"),
}
_OF_GROUP: Mapping[str, tuple[Any, ...]] = {
    "format": (None, "float-quantized"),
    **{f"{part}.type": ("float",) for part in ("weights", "input_activations")},
    **{f"{part}.num_bits": (8,) for part in ("weights", "input_activations")},
    **{f"{part}.symmetric": (True, None) for part in ("weights", "input_activations")},
    "weights.strategy": ("channel", "tensor"),
    "weights.dynamic": (False, None),
    "input_activations.strategy": ("token",),
    "input_activations.dynamic": (True,),
    "output_activations": _NOTHING,
}
_log = logging.getLogger(__name__)


def plan_float8(config: ModelConfig, hf_config: Any, device: torch.device) -> QuantizationPlan | None:
    """The way to load a model in FP8; None: it has other numbers. Raises ConfigError and ModelError."""
    stored = getattr(hf_config, "quantization_config", None)
    if stored is None and config.quantization == "fp8":
        if not multiplies_float8(device):
            raise ConfigError("--quantization fp8: needs a GPU that multiplies FP8 (Ada, Hopper or later)")
        return QuantizationPlan(config.dtype, settle=_quantize)
    if not isinstance(stored, Mapping) or stored.get("quant_method") != "compressed-tensors":
        return None
    check_asked(config, "fp8")
    _check_fields(config.model, stored)
    plain = copy.deepcopy(hf_config)
    del plain.quantization_config
    chosen = _Config(_METHOD)  # type: ignore[arg-type] # a name that only this project knows
    return QuantizationPlan(config.dtype, {"config": plain, "quantization_config": chosen}, _settle)


def _check_fields(model: str, stored: Mapping[str, Any]) -> None:
    groups = stored.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"--model {model}: quantization_config.config_groups is {groups!r}: it names no group")
    tables = [("", stored, _OF_CHECKPOINT), *((f"config_groups.{n}.", group, _OF_GROUP) for n, group in groups.items())]
    for place, table, wanted in tables:
        for name, values in wanted.items():
            parts = name.split(".")
            found = functools.reduce(lambda at, part: at.get(part) if isinstance(at, Mapping) else None, parts, table)
            if found not in values:
                raise ModelError(
                    f"--model {model}: quantization_config.{place}{name} is {found!r}; of compressed-tensors' formats "
                    f"FP8-dynamic alone is served, in which it is {' or '.join(map(repr, values))}"
                )


def float8_scales(model: str, files: Sequence[Path]) -> dict[str, Tensor]:
    """The scales of all weights in FP8, by weight. Raises ModelError for files that contradict themselves."""
    forms: dict[str, tuple[str, list[int]]] = {}  # safetensors' name of the type, and the shape
    scales: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is no mapping
                part = stored.get_slice(name)
                forms[name] = part.get_dtype(), part.get_shape()
                if name.endswith(".weight_scale"):
                    scales[name.removesuffix("_scale")] = stored.get_tensor(name)
    lacking = {name for name, (dtype, _) in forms.items() if dtype.startswith("F8")} - scales.keys()
    if lacking:
        raise ModelError(f"--model {model}: {min(lacking)} is in FP8, and the files lack {min(lacking)}_scale")
    if not scales:
        raise ModelError(f"--model {model}: config.json says that weights are in FP8, and its files hold none")
    for name, scale in scales.items():
        dtype, shape = forms.get(name, ("not there", []))
        words = f"--model {model}: {name}_scale, {forms[f'{name}_scale']}, belongs to a weight that is {dtype} {shape}"
        is_matrix = dtype == "F8_E4M3" and len(shape) == 2
        if not is_matrix or not scale.is_floating_point() or scale.shape not in {(shape[0], 1), (1, 1), (1,), ()}:
            raise ModelError(f"{words}; served are matrices F8_E4M3 [out, in] with real numbers [out, 1] or [1]")
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise ModelError(f"{words}; it has numbers that are negative, infinite or none")
    return scales


@register_quantization_config(_METHOD)
class _Config(QuantizationConfigMixin):
    """Chooses `_Quantizer`, by its name."""


@register_quantizer(_METHOD)
class _Quantizer(HfQuantizer):
    """Gives a model, before transformers loads its weights, layers that hold those in FP8 as they are stored."""

    is_trainable = False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] = (), **_: Any
    ) -> None:
        transforms = get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        names, modules = model.state_dict(), dict(model.named_modules())
        for name, scale in float8_scales(str(model.name_or_path), [Path(file) for file in checkpoint_files]).items():
            found, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, names)
            layer = modules.get(path := found.removesuffix(".weight"))
            if converted is not None or (found in names and type(layer) is not nn.Linear):
                raise ModelError(
                    f"--model {model.name_or_path}: {name} is in FP8, but is no linear layer of {type(model).__name__} "
                    "by itself; served in FP8 are linear layers, not experts that are one stack"
                )
            if isinstance(layer, nn.Linear):
                stored = torch.empty_like(layer.weight, dtype=FLOAT8)
                model.set_submodule(path, Float8Linear(layer, stored, torch.empty_like(scale, device="meta")))


def _settle(module: Any, device: torch.device) -> None:
    """Dequantises the layers that the device has no FP8 product for."""
    module.hf_quantizer.remove_quantization_config(module)
    layers = {path: part for path, part in module.named_modules() if isinstance(part, Float8Linear)}
    plain = {path: layer for path, layer in layers.items() if not can_multiply(layer, device)}
    for path, layer in plain.items():
        module.set_submodule(path, layer.dequantized())
    _log.info("FP8: %d layers, of which %d are dequantised for this device", len(layers), len(plain))


def _quantize(module: PreTrainedModel, device: torch.device) -> None:
    """Quantises each linear layer but the output head, on the device where it stays."""
    head = module.get_output_embeddings()  # type: ignore[no-untyped-call]
    for path, layer in list(module.named_modules()):
        if type(layer) is nn.Linear and layer is not head and can_multiply(layer, device):
            module.set_submodule(path, Float8Linear(layer, *quantized(layer.weight.detach().to(device))))
