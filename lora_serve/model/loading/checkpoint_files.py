"""A checkpoint's files of weights, and where the model of transformers has what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from lora_serve.model.loading.transformers_import import without_compiler


class SkipInit(TorchFunctionMode):
    """Leaves tensors of the meta device uninitialised, as a checkpoint will fill them; others are initialised as ever.

    `torch.arange`, from which models compute the frequencies of their positions, counts on the CPU: on that device it,
    and each division by its numbers, would import torch's symbolic shapes and sympy, a third of a second.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = named.get("tensor", args[0] if args else None)
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        if func is torch.arange and _is_meta(named.get("device")):
            named = {**named, "device": "cpu"}
        return func(*args, **named)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def without_numbers(auto_class: Any, config: Any) -> Any:
    """The model of a config, on the meta device."""
    with suppress(ImportError, AttributeError, RuntimeError), SkipInit(), without_compiler(), torch.device("meta"):
        return auto_class.from_config(config)
    with torch.device("meta"):  # a model that asks the compiler for more, or mixes a range with numbers of this device
        return auto_class.from_config(config)


def weight_files(model: str) -> Sequence[Path]:
    """The files of weights of a folder or hub id, as transformers chooses them. Raises OSError."""
    if Path(model).is_dir() and not any(Path(model).glob("*.safetensors")):
        raise OSError("it has no weights in safetensors, the one form that is read")
    if (whole := cached_file(model, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)) is not None:
        return [Path(whole)]
    index = cached_file(model, SAFE_WEIGHTS_INDEX_NAME)
    files: list[str] = get_checkpoint_shard_files(model, index)[0]  # type: ignore[no-untyped-call]
    return [Path(file) for file in files]


def tensors_of(model: str) -> dict[str, dict[str, Any]]:
    """The tensors of a folder or hub id, by the path of their module and last name, as slices that are read when they
    are asked for. Raises OSError and SafetensorError.
    """
    parts: dict[str, dict[str, Any]] = {}
    for file in weight_files(model):
        stored: Any = safe_open(file, "pt")
        for name in stored.keys():  # noqa: SIM118 - it is no mapping
            path, of_weight, last = name.partition(".weight.")  # as bitsandbytes names what lies beside
            path, _, last = (path, "", f"weight.{last}") if of_weight else name.rpartition(".")
            parts.setdefault(path, {})[last] = stored.get_slice(name)
    return parts


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The table of a file of safetensors that the library opens, and where the tensors' bytes begin."""
    length = int.from_bytes(file.read(8), "little")
    table = json.loads(file.read(length))
    table.pop("__metadata__", None)
    return table, 8 + length


def places_in(model: PreTrainedModel, names: dict[str, Any]) -> Callable[[str], tuple[str, str | None]]:
    """By a checkpoint's name of a tensor: the model's, of those in `names`; and the pattern of what computes it of such
    tensors, None if it is the tensor itself.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    return lambda name: rename_source_key(name, renamings, converters, model.base_model_prefix, names)


@contextmanager
def reported(place: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """Inside the block, what is wrong with the files is said to be of this place, as an error of this kind."""
    try:
        yield
    except ValueError as error:
        raise kind(f"{place}: {error}") from error
