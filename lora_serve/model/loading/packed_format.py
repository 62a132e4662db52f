"""The contract of packed formats: which fields config.json may have, and which tensors a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_serve.model.loading.kept_linear import Keep, kept_packed
from lora_serve.model.loading.packed_weight import CodedWeight, PackedWeight, Scales

FLOATS = ("F32", "BF16", "F16")
NOTHING: tuple[Any, ...] = (None, {}, [], "", False)


class Kind:
    """All values of one kind: a table of fields may name it beside single values."""

    def __init__(self, words: str, holds: Callable[[Any], bool]) -> None:
        self._words, self._holds = words, holds

    def __eq__(self, other: object) -> bool:
        return self._holds(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return self._words


WHOLE = Kind("a whole number above 0", lambda value: type(value) is int and value > 0)
ANY = (Kind("anything", lambda value: True),)  # of a field on which the meaning of the numbers does not depend
Fields = Mapping[str, tuple[Any, ...]]  # by name; None in its values: the field may be left out


def check_fields(place: str, found: Any, fields: Fields, words: str) -> None:
    """Raises ValueError for a field, of the one in config.json that `place` names, that is unknown or of another value
    than `fields` allow. `words`: the format.
    """
    if not isinstance(found, Mapping):
        raise ValueError(f"{place} is {found!r}, not fields")
    for name in (*fields, *found):
        value = found.get(name)
        if name not in fields:
            if value not in NOTHING:
                raise ValueError(f"{place}.{name} is {value!r}, a field not known of {words}")
        elif value not in fields[name]:
            raise ValueError(
                f"{place}.{name} is {value!r}; of {words} served is {' or '.join(map(repr, fields[name]))}"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor beside a layer's numbers as it must be: its types as safetensors names them, and shapes."""

    types: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_needed: bool = True


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer's tensors in the files."""

    path: str
    forms: Mapping[str, tuple[str, list[int]]]  # by last name: type as safetensors names it, and shape
    read: Callable[[str], Tensor]  # by last name


class Scheme(ABC):
    """One way in which config.json says that layers are packed. The files say which layers are."""

    words: str  # the format and its kind, for messages: "gptq, 4 bits"
    bits: int
    numbers: str  # the last name of the tensor of codes
    types: tuple[str, ...] = ("I32",)  # of it

    @property
    def kind(self) -> str:
        """As `--quantization` names it: "int4"."""
        return "fp8" if "F8_E4M3" in self.types else f"int{self.bits}"

    def is_of(self, layer: StoredLayer) -> bool:
        """True if the layer has the tensor of codes of this way."""
        return self.numbers in layer.forms and layer.forms[self.numbers][0] in self.types

    def checked_size(self, layer: StoredLayer) -> tuple[int, int]:
        """Outputs and inputs by the headers of the files. Raises ValueError for tensors that contradict each other."""
        if len(layer.forms[self.numbers][1]) != 2:
            raise ValueError(f"{self.numbers} is {layer.forms[self.numbers][1]}, no matrix")
        size = self.size(layer)
        if min(size) < 1:
            raise ValueError(f"its size is {list(size)}")
        parts = self.parts(*size, layer)
        for name, part in parts.items():
            if name not in layer.forms:
                if part.is_needed:
                    raise ValueError(f"the files lack {name}")
                continue
            dtype, shape = layer.forms[name]
            if dtype not in part.types or tuple(shape) not in part.shapes:
                shapes = " or ".join(str(list(one)) for one in part.shapes)
                raise ValueError(f"{name} is {dtype} {shape}; of {list(size)} it is {' or '.join(part.types)} {shapes}")
        if unknown := layer.forms.keys() - parts.keys() - {self.numbers, "bias"}:
            raise ValueError(f"{min(unknown)} is not known of it")
        return size

    def size(self, layer: StoredLayer) -> tuple[int, int]:
        """Outputs and inputs, where the tensor of codes has as many. Raises ValueError."""
        num_outputs, num_inputs = layer.forms[self.numbers][1]
        return num_outputs, num_inputs

    @abstractmethod
    def parts(self, num_outputs: int, num_inputs: int, layer: StoredLayer) -> Mapping[str, Part]:
        """The tensors, by last name, beside the codes of the layer, which is of that size. Raises ValueError."""

    @abstractmethod
    def check(self, layer: StoredLayer) -> None:
        """Looks at what lies beside the codes of a layer whose tensors are as they must be. Raises ValueError."""

    @abstractmethod
    def weight(self, layer: StoredLayer) -> PackedWeight | CodedWeight:
        """The layer's weight. Raises ValueError."""

    def kept(self, like: nn.Linear, device: torch.device, dtype: torch.dtype) -> Keep | None:
        """A function that makes such a layer of the model's `dtype` with the weight as it is packed; None: there is no
        product of it.
        """
        return None


class Scaled(Scheme):
    """A way whose numbers are integers or floats of few bits, less zero points, times scales."""

    @abstractmethod
    def scales(self, layer: StoredLayer) -> Scales:
        """The numbers beside the codes of a layer whose tensors are as they must be. Raises ValueError."""

    @abstractmethod
    def codes(self, layer: StoredLayer) -> Tensor:
        """[out, in], see `PackedWeight`. Raises ValueError."""

    def check(self, layer: StoredLayer) -> None:
        self.scales(layer).check(self.bits)

    def weight(self, layer: StoredLayer) -> PackedWeight:
        return PackedWeight(self.codes(layer), self.scales(layer))

    def kept(self, like: nn.Linear, device: torch.device, dtype: torch.dtype) -> Keep | None:
        return kept_packed(device, dtype)


def num_groups(num_inputs: int, group_size: int | None) -> int:
    """The groups of a layer's inputs; None: they are one. Raises ValueError."""
    size = group_size or num_inputs
    if num_inputs % size:
        raise ValueError(f"groups of {size} do not divide its {num_inputs} inputs")
    return num_inputs // size
