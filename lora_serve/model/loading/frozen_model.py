"""Loads a transformers model as it is: its own class, safetensors only, frozen, on its device."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from lora_serve.core.config import ModelConfig
from lora_serve.core.errors import LoraServeError, ModelError, on_one_line
from lora_serve.core.gguf_file import gguf_of, read_gguf
from lora_serve.core.model_spec import KernelDescription, ModelSpec
from lora_serve.model.loading.checkpoint_files import SkipInit
from lora_serve.model.loading.gguf_models import config_of
from lora_serve.model.loading.number_type import (
    NumberType,
    QuantizationPlan,
    Source,
    number_type,
    plan_quantization,
    resident_bytes,
    stored_parts,
    stored_type,
)
from lora_serve.model.loading.observation import Observation, first_line
from lora_serve.model.loading.packed_checkpoints import plan_packed
from lora_serve.model.loading.transformers_import import without_compiler
from lora_serve.model.native import library

_log = logging.getLogger(__name__)
MAX_LAYERS = 4096
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def check_num_layers(model: str, hf_config: Any) -> None:
    """Raises ModelError for an impossible number of layers."""
    layers = getattr(hf_config.get_text_config(), "num_hidden_layers", 1)
    if not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        raise ModelError(f"--model {model}: num_hidden_layers of config.json is {layers!r}, not 1 to {MAX_LAYERS}")


def shape_that_differs(model: str, build: Callable[[], nn.Module]) -> str:
    """Names the first weight of a folder whose shape differs from that in the module of `build`; else empty."""
    with torch.device("meta"):
        wanted = {name: list(tensor.shape) for name, tensor in build().state_dict().items()}
    for name, _, shape in stored_parts(model):
        if wanted.get(name, shape) != shape:
            return f"{name} is {shape} in the weights and {wanted[name]} by config.json"
    return ""


def check_no_more_layers(model: str, module: PreTrainedModel, info: Mapping[str, Any]) -> None:
    """Raises ModelError for weights named like the model's, with a layer number that the model does not have."""
    kinds = {_NUMBER.sub("#", name) for name in module.state_dict()}
    numbered = [name for name in info["unexpected_keys"] if _NUMBER.search(name)]
    beyond = sorted(name for name in numbered if _NUMBER.sub("#", name) in kinds)
    if beyond:
        raise ModelError(
            f"--model {model}: config.json does not fit the weights: they hold {beyond[0]}{_others(beyond)}, which is "
            "more than config.json speaks of (num_hidden_layers?)"
        )


def check_nothing_missing(model: str, missing: Iterable[str]) -> None:
    """Raises ModelError for weights that the checkpoint lacks."""
    lacking = sorted(missing)
    if lacking:
        raise ModelError(
            f"--model {model}: config.json does not fit the weights: they lack {lacking[0]}{_others(lacking)}"
        )


def _others(names: list[Any]) -> str:
    return f" (and {len(names) - 1} others)" if len(names) > 1 else ""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A plain transformers model, frozen, and the facts about it."""

    module: PreTrainedModel
    spec: ModelSpec
    observation: Observation
    device: torch.device
    by_call: tuple[nn.Module, ...] = ()  # modules that work positions out by the longest row, see `find_positions`


@dataclass(frozen=True, slots=True)
class FrozenModule:
    """The result of `load_frozen`."""

    module: PreTrainedModel
    missing: tuple[str, ...]  # parameters that the checkpoint does not hold: transformers drew them at random
    dtype: torch.dtype
    device: torch.device
    kernels: KernelDescription | None  # None: on a GPU


def read_model_config(config: ModelConfig) -> Any:
    """The model's config.json, or what the header of a GGUF file says in its place. Raises ModelError."""
    if (file := gguf_of(config.model)) is not None:
        return config_of(read_gguf(file))
    try:
        found = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a broken folder
        raise ModelError(f"--model {config.model}: config.json cannot be used: {on_one_line(error)}") from error
    check_num_layers(config.model, found)
    return found


def plan_loading(config: ModelConfig, hf_config: Any, device: torch.device) -> QuantizationPlan:
    """The way to load a model by its config.json. Raises ConfigError and ModelError."""
    return plan_packed(config, hf_config, device) or plan_quantization(config, hf_config, device)


def load_frozen(config: ModelConfig, auto_class: Any) -> FrozenModule:
    """Loads the model of `config.model`, a folder or a hub id, by an auto class of transformers. Raises ModelError."""
    device = device_of(config.device)
    hf_config = read_model_config(config)
    try:
        plan = plan_loading(config, hf_config, device)
        asked = "as asked" if plan.dtype == config.dtype else f"for --quantization {config.quantization}"
        numbers = number_type(plan.dtype, hf_config, device, asked, stored_type(config.model))
        kernels = library.description(numbers.dtype) if device.type == "cpu" else None
        _log_numbers(numbers, kernels)
        source = Source(auto_class, config.model, plan.arguments)
        if plan.open is not None:
            source = plan.open(auto_class, numbers.dtype)
        module, info = _from_pretrained(source, numbers.dtype)
    except LoraServeError:
        raise
    except Exception as error:
        if "ignore_mismatched_sizes" in str(error):
            raise _unfitting(config, lambda: auto_class.from_config(hf_config)) from error
        raise ModelError(f"--model {config.model}: cannot be loaded: {first_line(error)}") from error
    check_no_more_layers(config.model, module, info)
    if not plan.arguments and (lost := [name for name in info["unexpected_keys"] if ".weight_scale" in name]):
        raise ModelError(
            f"--model {config.model}: its files hold {min(lost)}, and config.json has no quantization_config"
        )
    plan.settle(module, device)
    if not plan.arguments.get("device_map"):
        module.to(device)
    module.eval()
    module.requires_grad_(False)
    copy_from_files(module)
    return FrozenModule(module, tuple(sorted(info["missing_keys"])), numbers.dtype, device, kernels)


def copy_from_files(module: nn.Module) -> None:
    """Copies the parameters that no product takes out of the files that are mapped into memory.

    Weights of a checkpoint's own type are views of its file. Once those of the products are laid out anew nothing
    needs it any more, but a single norm that is still such a view would keep all its pages in the process's memory.
    """
    files = _mapped_files()
    for part in module.modules():
        for parameter in part.parameters(recurse=False) if files else ():
            is_taken = not isinstance(part, nn.Embedding) and parameter.dim() > 1
            if not is_taken and any(parameter.data_ptr() in file for file in files):
                parameter.data = parameter.data.clone()


def _mapped_files() -> list[range]:
    """The addresses at which files of weights are mapped; none where the kernel does not say."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    places = [line.split()[0].split("-") for line in lines if line.endswith(".safetensors")]
    return [range(int(start, 16), int(end, 16)) for start, end in places]


def _from_pretrained(source: Source, dtype: torch.dtype) -> Any:
    """The model, and transformers' report of its loading."""
    load = functools.partial(
        source.model_class.from_pretrained,
        source.name,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        attn_implementation="eager",
        output_loading_info=True,
        **source.arguments,
    )
    if "quantization_config" in source.arguments:  # torchao may compile its products
        return load()
    try:
        with without_compiler(), SkipInit():
            return load()
    except (ImportError, AttributeError, RuntimeError):  # a model whose code asks the compiler for more than its marks,
        return load()  # or computes with a range and with tensors of the meta device


def spec_of(config: ModelConfig, found: FrozenModule, observation: Observation, limit: int) -> ModelSpec:
    """The facts that models of every task have. `limit`: the tokens that this one knows positions for.

    Raises ModelError.
    """
    module = found.module
    text = module.config.get_text_config()
    return ModelSpec(
        name=config.model,
        architecture=type(module).__name__,
        vocab_size=int(text.vocab_size),
        max_model_len=config.length(limit),
        eos_token_ids=(),
        num_layers=text.num_hidden_layers,
        linears=observation.linears,
        num_bytes=resident_bytes(module),
        dtype=str(found.dtype).removeprefix("torch."),
        device=str(found.device),
        embeddings=observation.embeddings,
        modules=observation.parameters(module),
        transposed=observation.transposed,
        input_embedding=path_of(module, module.get_input_embeddings()) or "",
        kernels=found.kernels,
    )


def path_of(module: PreTrainedModel, part: nn.Module | None) -> str | None:
    """The place of a module in the model."""
    return next((path for path, candidate in module.named_modules() if candidate is part), None)


def _unfitting(config: ModelConfig, build: Callable[[], nn.Module]) -> ModelError:
    """The error for a weight of another shape, which transformers would draw at random instead."""
    with suppress(Exception):
        if words := shape_that_differs(config.model, build):
            return ModelError(f"--model {config.model}: config.json does not fit the weights: {words}")
    return ModelError(f"--model {config.model}: config.json does not fit the weights: shapes differ")


def device_of(name: str) -> torch.device:
    """The device of a name of --device. Raises ModelError for one that is not here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("--device cuda: no CUDA device is visible to torch; use --device cpu")
    return torch.device(name)


def _log_numbers(numbers: NumberType, kernels: KernelDescription | None) -> None:
    """Logs which numbers and kernels serve; loudly, if it is none of the kernels."""
    name = str(numbers.dtype).removeprefix("torch.")
    if kernels is None:
        _log.info("dtype: %s (%s)", name, numbers.reason)
    elif kernels.source == "torch":
        advice = "install gcc, or a wheel of lora-serve that brings kernels"
        if numbers.dtype == torch.float16:
            advice = "--dtype float32 has kernels"
        _log.warning(
            "dtype: %s (%s); kernels: NONE (%s): torch's own operators serve, many times slower; %s",
            name, numbers.reason, kernels.reason, advice,
        )  # fmt: skip
    else:
        words = {"shipped": "shipped", "compiled": "compiled here"}[kernels.source]
        _log.info("dtype: %s (%s); kernels: %s, %s", name, numbers.reason, kernels.level, words)
