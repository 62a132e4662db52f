"""Checkpoints with packed weights, which are read layer by layer, and kept so or dequantised while transformers loads.

transformers is handed a plain checkpoint's names, so that what it does to these, and to experts one by one, holds here,
too. A format is an entry of `_FORMATS`.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.import_utils import is_bitsandbytes_available

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import ModelError
from lora_serve.core.gguf_file import gguf_of, read_gguf
from lora_serve.model.loading import (
    bitsandbytes_formats,
    compressed_tensors,
    float4_formats,
    float8_formats,
    gguf_blocks,
    gguf_models,
    gptq,
)
from lora_serve.model.loading.checkpoint_files import places_in, reported, tensors_of, without_numbers
from lora_serve.model.loading.kept_linear import Keep
from lora_serve.model.loading.number_type import (
    QuantizationPlan,
    Source,
    check_asked,
    is_rounded_here,
    quantization_of,
)
from lora_serve.model.loading.observation import first_line
from lora_serve.model.loading.packed_format import Scheme, StoredLayer
from lora_serve.model.loading.packed_weight import PackedWeight
from lora_serve.model.loading.rounded_checkpoint import BESIDE
from lora_serve.model.loading.rounded_once import rounded_once

_FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Sequence[Scheme]]] = {
    "awq": gptq.awq_schemes,
    "bitsandbytes": bitsandbytes_formats.schemes,
    "compressed-tensors": compressed_tensors.schemes,
    "fbgemm_fp8": float8_formats.fbgemm_schemes,
    "fp8": float8_formats.schemes,
    "gguf": gguf_blocks.schemes,
    "gptq": gptq.gptq_schemes,
    "modelopt": float4_formats.modelopt_schemes,
}
_PLAIN = frozenset({"F64", "F32", "BF16", "F16", "I64", "BOOL", "U8"})  # types that tensors of no packed layer may have
_log = logging.getLogger(__name__)


def plan_packed(config: ModelConfig, hf_config: Any, device: torch.device) -> QuantizationPlan | None:
    """The way to load a model whose weights are packed, or are to be; None: they are not. Raises ConfigError and
    ModelError.
    """
    stored, file = quantization_of(hf_config), gguf_of(config.model)
    if stored is None and is_rounded_here(config.quantization, device):
        rounded = _Rounded(config, hf_config, device)
        return QuantizationPlan(config.dtype, settle=rounded.settle, open=rounded.open)
    if not isinstance(stored, Mapping) or (find := _FORMATS.get(str(stored.get("quant_method")))) is None:
        return None
    if stored.get("load_in_4bit") and device.type == "cuda" and is_bitsandbytes_available():
        return None  # that library's product keeps them packed
    with reported(f"--model {config.model}", ModelError):
        schemes = find(stored)
    kinds = [scheme.kind for scheme in schemes] if file is None else []
    check_asked(config, schemes[0].words if file is None else "GGUF", *kinds)
    plain = copy.deepcopy(hf_config)
    for part in (plain, plain.get_text_config()):
        vars(part).pop("quantization_config", None)
    checkpoint = _Checkpoint(config.model, file, plain, schemes, device)
    return QuantizationPlan(config.dtype, settle=checkpoint.settle, open=checkpoint.open, check=checkpoint.check)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A layer whose tensors fit each other."""

    model: str
    layer: StoredLayer
    scheme: Scheme
    size: tuple[int, int]  # outputs and inputs

    def weight(self) -> PackedWeight:
        """For a scheme that keeps it so."""
        with reported(f"--model {self.model}: {self.layer.path}", ModelError):
            found = self.scheme.weight(self.layer)
        assert isinstance(found, PackedWeight), "other weights are not kept"
        return found

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        with reported(f"--model {self.model}: {self.layer.path}", ModelError):
            return self.scheme.weight(self.layer).dequantized(dtype)


@dataclass(frozen=True, slots=True)
class _Dequantized:
    """Stands in the place of a file's slice: the weight is made when transformers asks for it."""

    packed: _Packed
    dtype: torch.dtype

    def __getitem__(self, where: Any) -> Tensor:
        return self.packed.dequantized(self.dtype)[where]


@dataclass(slots=True)
class _Checkpoint:
    model: str
    file: Path | None  # in GGUF; None: in safetensors
    plain: Any  # config.json of the model without quantisation
    schemes: Sequence[Scheme]
    device: torch.device
    folder: str | None = None  # of the weights, where they lie beside the model
    layers: Sequence[_Packed] = ()  # as far as the files were read
    kept: dict[str, tuple[_Packed, Keep]] = field(default_factory=dict)  # by path: the layer, and what makes it

    def check(self) -> None:
        """Looks at all that the files of a folder hold, but for the codes. Raises ModelError."""
        if self.file is not None or any(Path(self.model).glob("*.safetensors")):
            try:
                with reported(f"--model {self.model}", ModelError):
                    self._read()
            except (OSError, SafetensorError) as error:
                raise ModelError(f"--model {self.model}: its weights cannot be read: {first_line(error)}") from error
        _log.warning("--model %s: %s; a start tells how many layers stay so", self.model, self._words())

    def open(self, auto_class: Any, dtype: torch.dtype) -> Source:
        """The plain checkpoint that the files stand for. Raises ModelError."""
        model = without_numbers(auto_class, self.plain)
        with reported(f"--model {self.model}", ModelError):
            layers, tensors = self._read()
            self._place(layers, tensors, model, dtype)
        return Source(type(model), None, {"config": model.config, "state_dict": tensors})

    def settle(self, module: Any, device: torch.device) -> None:
        """Gives a loaded model the layers that stay packed, and what `from_pretrained` reads beside weights."""
        num_kept = 0
        for path, (packed, make) in self.kept.items():
            like, weight = module.get_submodule(path), packed.weight()
            if (own := make(like, weight)) is None:
                like.weight = nn.Parameter(weight.dequantized(like.weight.dtype), requires_grad=False)
            else:
                module.set_submodule(path, own)
                num_kept += 1
        others = "; the others are dequantised" if num_kept < len(self.layers) else ""
        _log.info("%d of %d packed linear layers stay so (%s)%s", num_kept, len(self.layers), self._words(), others)
        self.kept.clear()
        self.layers = ()
        if module.can_generate() and self.file is None:
            with suppress(OSError):  # there is none: what config.json says holds
                module.generation_config = GenerationConfig.from_pretrained(self.model)

    def _words(self) -> str:
        found = [layer.scheme for layer in self.layers] or ([] if self.file else self.schemes)
        return ", ".join(dict.fromkeys(scheme.words for scheme in found)) or "GGUF's floats"

    def _read(self) -> tuple[list[_Packed], dict[str, Any]]:
        """The layers that are packed, and all other tensors by name. Raises ValueError."""
        if self.file is None:
            parts = tensors_of(self.folder or self.model)
        else:
            parts = gguf_models.parts_of(read_gguf(self.file), self.plain)
        layers, tensors = [], dict[str, Any]()
        for path, slices in parts.items():
            with reported(path):
                found = self._packed(path, slices)
            if found is not None:
                layers.append(found)
            plain = slices if found is None else slices.keys() & {"bias"}
            tensors.update({f"{path}.{last}".removeprefix("."): slices[last] for last in plain})
        if not layers and self.file is None:
            raise ValueError(f"config.json says that weights are {self.schemes[0].words}, and its files hold none")
        self.layers = layers
        return layers, tensors

    def _packed(self, path: str, slices: Mapping[str, Any]) -> _Packed | None:
        """A layer by the way in which it is packed; None: it is plain. Raises ValueError."""
        forms = {last: (part.get_dtype(), part.get_shape()) for last, part in slices.items()}
        layer = StoredLayer(path, forms, lambda last: slices[last][...])
        errors = []
        for scheme in (one for one in self.schemes if one.is_of(layer)):
            try:
                size = scheme.checked_size(layer)
            except ValueError as error:
                errors.append(error)
                continue
            scheme.check(layer)
            return _Packed(self.model, layer, scheme, size)
        if errors:
            raise errors[0]
        for last, (dtype, shape) in forms.items():
            if dtype not in _PLAIN or BESIDE.fullmatch(last):
                words = " or ".join(dict.fromkeys(scheme.words for scheme in self.schemes))
                raise ValueError(f"{last} is {dtype} {shape}, of no layer that is packed as {words}")
        return None

    def _place(
        self, layers: Sequence[_Packed], tensors: dict[str, Any], model: PreTrainedModel, dtype: torch.dtype
    ) -> None:
        """Adds the weights of layers to the tensors of a plain checkpoint of `model`. Raises ValueError."""
        names = model.state_dict()
        place = places_in(model, names)
        if self.file is not None:
            _check_places({*tensors, *(f"{one.layer.path}.weight" for one in layers)}, model, place)
        for packed in layers:
            layer, name = packed.layer, f"{packed.layer.path}.weight"
            found, converted = place(name)
            tensors[name] = _Dequantized(packed, dtype)
            path = found.removesuffix(".weight")
            if converted is not None or found not in names:
                continue
            linear, wanted = model.get_submodule(path), tuple(names[found].shape)
            if isinstance(linear, Conv1D):
                raise ValueError(f"{name} is packed, and {type(model).__name__} has it as a Conv1D, not as nn.Linear")
            if wanted != packed.size:
                raise ValueError(
                    f"config.json does not fit the weights: {name} is {list(packed.size)} in the weights and "
                    f"{list(wanted)} by config.json"
                )
            if "bias" in layer.forms and f"{path}.bias" not in names and bool(layer.read("bias").any()):
                raise ValueError(f"{layer.path}.bias is not zero, and the model has no such bias")
            make = packed.scheme.kept(linear, self.device, dtype) if type(linear) is nn.Linear else None
            if make is not None:
                self.kept[path] = packed, make
                tensors[name] = torch.zeros((), dtype=dtype).expand(packed.size)


def _check_places(names: Iterable[str], model: PreTrainedModel, place: Callable[[str], tuple[str, str | None]]) -> None:
    """Raises ValueError for a tensor that the model does not have."""
    known = model.state_dict()
    for name in names:
        found, converted = place(name)
        if converted is None and found not in known:
            raise ValueError(f"it holds {name}, which {type(model).__name__} has not by its facts")


@dataclass(slots=True)
class _Rounded:
    """A plain checkpoint that is loaded as what was made of it."""

    config: ModelConfig
    hf_config: Any
    device: torch.device
    checkpoint: _Checkpoint | None = None
    ends: ExitStack = field(default_factory=ExitStack)

    def open(self, auto_class: Any, dtype: torch.dtype) -> Source:
        """Raises ConfigError and ModelError."""
        folder = rounded_once(self.config, self.hf_config, auto_class, self.ends)
        try:
            schemes = compressed_tensors.schemes(
                json.loads((folder / "config.json").read_bytes())["quantization_config"]
            )
            self.checkpoint = _Checkpoint(self.config.model, None, self.hf_config, schemes, self.device, str(folder))
            return self.checkpoint.open(auto_class, dtype)
        except (KeyError, ValueError, ModelError) as error:
            reason = f"it was rounded into {folder}, which is damaged now: delete that, and start again"
            raise ModelError(f"--model {self.config.model}: {reason} ({first_line(error)})") from error

    def settle(self, module: Any, device: torch.device) -> None:
        assert self.checkpoint is not None, "it was opened"
        self.checkpoint.settle(module, device)
        self.ends.close()
