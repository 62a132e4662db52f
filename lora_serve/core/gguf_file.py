"""The header of a GGUF file: what it says of its model, and where its tensors lie.

Every length is compared with the file's own before anything of that length is made. Plain Python, as the process that
tokenises has no torch.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from lora_serve.core.errors import ConfigError, ModelError

_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
# ggml's number of a type -> its name, numbers in a block, and bytes of that. Floats are named as safetensors does.
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}  # fmt: skip
_PART_OF_SEVERAL = re.compile(r".*-\d{5}-of-\d{5}\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's type, shape with outputs first, and place in the file."""

    type: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file whose tensors lie within it, each in a place of its own."""

    path: Path
    facts: Mapping[str, Any]  # by key; a list of texts that nobody asked for is its length
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.facts["general.architecture"])


def gguf_of(model: str) -> Path | None:
    """The GGUF file that `--model` names: itself, or the only one of a folder without safetensors; else None.

    Raises ConfigError for a folder with several.
    """
    path = Path(model)
    try:
        if path.suffix == ".gguf" and path.is_file():
            return path
        files = sorted(path.glob("*.gguf")) if path.is_dir() and not any(path.glob("*.safetensors")) else []
    except (OSError, ValueError):  # no name that a file could have
        return None
    if len(files) > 1:
        raise ConfigError(f"--model: {model} holds {len(files)} GGUF files: name one of them, such as {files[0]}")
    return files[0] if files else None


def read_gguf(path: Path, texts: bool = False) -> GgufFile:
    """Reads a file's header; with `texts` also its lists of texts, which are the vocabulary. Raises ModelError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data, texts).read(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"--model {path}: it is no GGUF file that can be served: {error}") from error


class _Header:
    def __init__(self, data: mmap.mmap, texts: bool) -> None:
        self._data, self._size, self._texts, self._place = data, len(data), texts, 0

    def read(self, path: Path) -> GgufFile:
        """Raises ValueError."""
        if self._bytes(4, "magic") != b"GGUF":
            raise ValueError("it does not begin with the letters GGUF")
        version = self._number("I")
        if version.to_bytes(4, "big") in {known.to_bytes(4, "little") for known in _VERSIONS}:
            raise ValueError("its numbers are big endian")
        if version not in _VERSIONS:
            raise ValueError(f"it is of version {version}; served are {' and '.join(map(str, _VERSIONS))}")
        num_tensors, num_facts = self._count("tensors", 24), self._count("facts", 13)
        facts = dict[str, Any]()
        for _ in range(num_facts):
            key = self._text()
            if key in facts:
                raise ValueError(f"it says {key!r} twice")
            facts[key] = self._value(self._number("I"), key)
        _check_facts(facts, path)
        found = [self._tensor() for _ in range(num_tensors)]
        return GgufFile(path, facts, self._placed(found, facts.get("general.alignment", 32)))

    def _placed(self, found: list[tuple[str, GgufTensor]], alignment: Any) -> Mapping[str, GgufTensor]:
        """The tensors by name, their places counted from the file's begin."""
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = -(-self._place // alignment) * alignment
        tensors = dict[str, GgufTensor]()
        for name, one in found:
            if one.start % alignment or begin + one.start + one.num_bytes > self._size:
                raise ValueError(
                    f"{name} would lie at {begin + one.start} and be {one.num_bytes} bytes; the file has {self._size}"
                )
            if name in tensors:
                raise ValueError(f"it has two tensors {name}")
            tensors[name] = GgufTensor(one.type, one.shape, begin + one.start, one.num_bytes)
        in_order = sorted(tensors, key=lambda name: tensors[name].start)
        for former, latter in pairwise(in_order):
            if tensors[former].start + tensors[former].num_bytes > tensors[latter].start:
                raise ValueError(f"{former} and {latter} lie in one place")
        return tensors

    def _tensor(self) -> tuple[str, GgufTensor]:
        """Name and form, its place still counted from the first tensor's."""
        name, num_dimensions = self._text(), self._number("I")
        if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{name[:100]} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        number, start = self._number("I"), self._number("Q")
        if number not in TYPES:
            known = ", ".join(kind for kind, _, _ in TYPES.values())
            raise ValueError(f"{name[:100]} is of ggml's type {number}; served are {known}")
        kind, in_block, num_bytes = TYPES[number]
        if min(shape) < 1 or shape[-1] % in_block:
            raise ValueError(f"{name[:100]} is {list(shape)}, which are no blocks of {in_block}")
        return name, GgufTensor(kind, shape, start, prod(shape) // in_block * num_bytes)

    def _value(self, kind: int, key: str) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _TEXT:
            return self._text()
        of = self._number("I") if kind == _ARRAY else None
        if of == _TEXT:
            count = self._count(f"texts of {key[:100]}", 8)
            if self._texts:
                return [self._text() for _ in range(count)]
            for _ in range(count):
                self._skip(self._number("Q"), key)
            return count
        if of not in _NUMBERS:
            raise ValueError(f"{key[:100]} is of a type that is not known")
        count = self._count(f"numbers of {key[:100]}", struct.calcsize(_NUMBERS[of]))
        return list(struct.unpack(f"<{count}{_NUMBERS[of]}", self._bytes(count * struct.calcsize(_NUMBERS[of]), key)))

    def _count(self, words: str, least: int) -> int:
        """A number of things of which each takes so many bytes at least."""
        count: int = self._number("Q")
        if count > (self._size - self._place) // least:
            raise ValueError(f"it would hold {count} {words}, for which it is too short")
        return count

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}"), "a number"))[0]

    def _text(self) -> str:
        return self._bytes(self._number("Q"), "a text").decode()

    def _bytes(self, count: int, words: str) -> bytes:
        begin = self._place
        self._skip(count, words)
        return self._data[begin : self._place]

    def _skip(self, count: int, words: str) -> None:
        if count > self._size - self._place:
            raise ValueError(f"it ends within its header ({words[:100]})")
        self._place += count


def _check_facts(facts: Mapping[str, Any], path: Path) -> None:
    """Raises ValueError for a file that is no whole model."""
    if not isinstance(facts.get("general.architecture"), str):
        raise ValueError("it does not say its general.architecture")
    if (kind := facts.get("general.type", "model")) != "model":
        raise ValueError(f"its general.type is {kind!r}, no model")
    if facts.get("split.count", 1) != 1 or _PART_OF_SEVERAL.fullmatch(path.name):
        raise ValueError("it is a part of several files: join them first (`llama-gguf-split --merge`)")
