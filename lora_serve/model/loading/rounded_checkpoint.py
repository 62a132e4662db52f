"""A plain checkpoint written anew with the weights of its linear layers rounded and packed, as compressed-tensors has
it. Tensors are read and written one by one: neither checkpoint is ever in memory.

Rounded are the text decoder's linear layers, and experts that are stored one by one. Embeddings, the output head,
routers, experts that are stored as one stack, and what no text runs through stay as they are.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from lora_serve.adapters.stores.files import flush
from lora_serve.model.loading.checkpoint_files import places_in, read_header, weight_files
from lora_serve.model.loading.number_type import FLOAT8
from lora_serve.model.loading.rounding import Rounding

# Last names that no plain layer has.
BESIDE = re.compile(r"weight_(scale|scale_inv|zero_point|g_idx|shape|packed)|input_scale|qweight|qzeros|g_idx")
_ROUNDED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors names them
_NAMES = {
    **{dtype: name for name, dtype in _ROUNDED.items()},
    torch.int32: "I32",
    torch.int64: "I64",
    FLOAT8: "F8_E4M3",
}
_LEFT = re.compile(r"\.|.*\.(bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|onnx_data|index\.json)$")  # files: hidden, or weights
_LINEAR, _EXPERT = "linear layer", "expert"
_PIECE = 2**24  # bytes


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of writing."""

    layers: Mapping[Rounding, int]  # how many were rounded so
    num_rounded: int  # weights
    num_numbers: int  # of the checkpoint, rounded or not
    num_bytes: int
    error: float  # root of the mean squared error, as a share of the weights'

    def __str__(self) -> str:
        kinds = (
            f"{count} in {way.kind}{f' in groups of {way.group_size}' if way.group_size else ''}"
            for way, count in sorted(self.layers.items(), key=lambda item: -item[1])
        )
        share = self.num_rounded / self.num_numbers
        return (
            f"{sum(self.layers.values())} layers ({', '.join(kinds)}), {share:.0%} of all weights, whose error is "
            f"{self.error:.2%} of them in the root mean square; {self.num_bytes / 2**20:.1f} MiB"
        )


@dataclass(frozen=True, slots=True)
class PlainCheckpoint:
    """The files of a plain checkpoint, and what is to be done with them."""

    files: Sequence[Path]
    roundings: Mapping[str, Rounding]  # by the name of a weight in the files
    config: Mapping[str, Any]  # of what is written: `quantization_config`

    @classmethod
    def find(
        cls, model: str, hf_config: Any, auto_class: Any, kind: str, group_size: int | None = None
    ) -> PlainCheckpoint:
        """Looks at all files of a folder or hub id, short of the weights. Raises OSError and ValueError."""
        with torch.device("meta"):
            module = auto_class.from_config(hf_config)
        files, kind_of = weight_files(model), _kinds_in(module)
        found = dict[str, Rounding | None]()  # None: it stays plain
        experts, stacks = set[str](), set[str]()
        for name, entry in (item for file in files for item in _table_of(file).items()):
            path, _, last = name.rpartition(".")
            if BESIDE.fullmatch(last):
                raise ValueError(f"it is quantised already: its files hold {name}")
            if last != "weight" and len(entry["shape"]) > 2:
                stacks.add(rf"re:{re.escape(path)}\..*")  # as vLLM asks for the experts of one
            if last != "weight" or len(entry["shape"]) < 2:
                continue
            found[name] = None
            if len(entry["shape"]) != 2 or (layer := kind_of(name)) is None:
                continue
            if entry["dtype"] not in _ROUNDED:
                raise ValueError(f"{name} is {entry['dtype']}, no plain weight of {', '.join(_ROUNDED)}")
            try:
                found[name] = Rounding.of(kind, entry["shape"][1], group_size)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            if layer == _EXPERT:
                experts.add(name)
        ways = {found[name] for name in experts}
        smallest = None if None in ways else min(ways, key=lambda way: way.group_size or 0, default=None)
        found |= dict.fromkeys(experts, smallest)  # vLLM has one way for all of them
        roundings = {name: way for name, way in found.items() if way is not None}
        if not roundings:
            words = "its layers are not nn.Linear, or of no width that can be rounded"
            raise ValueError(f"no layer can be quantised ({type(module).__name__}: {words})")
        head = module.get_output_embeddings()
        heads = [path for path, part in module.named_modules() if part is head and head is not None]
        plain = {name.removesuffix(".weight") for name in found.keys() - roundings.keys()}
        return cls(files, roundings, _config_of(roundings, sorted({*plain, *heads, *stacks})))

    def write(self, out: Path) -> Summary:
        """Writes all files into a new folder, which is there whole or not at all. Raises OSError and ValueError."""
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as found:
            folder = Path(found) / out.name
            folder.mkdir()
            source = self.files[0].parent
            _copy_beside(source, folder)
            config = json.loads((source / "config.json").read_bytes()) | {"quantization_config": self.config}
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            written = [self._write_file(file, folder / file.name) for file in self.files]
            num_bytes = sum(one.num_bytes for one in written)
            if len(self.files) > 1:
                weights = {name: file.name for file, one in zip(self.files, written, strict=True) for name in one.names}
                index = {"metadata": {"total_size": num_bytes}, "weight_map": weights}
                (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
            for path in (*folder.rglob("*"), folder):
                flush(path)
            folder.rename(out)
            flush(out.parent)
        errors, squares = (sum(getattr(one, name) for one in written) for name in ("errors", "squares"))
        count = sum(one.num_rounded for one in written), sum(one.num_numbers for one in written)
        return Summary(Counter(self.roundings.values()), *count, num_bytes, math.sqrt(errors / max(squares, 1e-45)))

    def _write_file(self, source: Path, target: Path) -> _Written:
        table, stored = _table_of(source), safe_open(source, "pt")  # type: ignore[no-untyped-call]
        header, places = _header_of({name: part for one in table for name, part in self._parts(one, table[one])})
        found = _Written([*places])
        with source.open("rb") as file, target.open("wb") as writer:
            start = read_header(file)[1]
            _reserve(writer, len(header) + max(end for _, end in places.values()))
            writer.write(header)
            for name, entry in table.items():
                found.num_numbers += math.prod(entry["shape"])
                begin, end = entry["data_offsets"]
                if (way := self.roundings.get(name)) is None:
                    file.seek(start + begin)
                    writer.seek(len(header) + places[name][0])
                    _copy(file, writer, end - begin)
                    continue
                try:
                    tensors, errors, squares = way.tensors(stored.get_tensor(name))
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
                found.errors, found.squares = found.errors + errors, found.squares + squares
                found.num_rounded += math.prod(entry["shape"])
                for last, tensor in tensors.items():
                    writer.seek(len(header) + places[f"{name.removesuffix('weight')}{last}"][0])
                    writer.write(_bytes_of(tensor))
            found.num_bytes = os.fstat(writer.fileno()).st_size
        return found

    def _parts(self, name: str, entry: Mapping[str, Any]) -> Iterator[tuple[str, _Part]]:
        """The tensors that stand for one of a file."""
        if (way := self.roundings.get(name)) is None:
            begin, end = entry["data_offsets"]
            yield name, (entry["dtype"], entry["shape"], end - begin)
            return
        for last, (dtype, shape) in way.forms(entry["shape"], _ROUNDED[entry["dtype"]]).items():
            yield f"{name.removesuffix('weight')}{last}", (_NAMES[dtype], shape, math.prod(shape) * dtype.itemsize)


_Part = tuple[str, Sequence[int], int]  # type as safetensors names it, shape, bytes


@dataclass(slots=True)
class _Written:
    """One file."""

    names: list[str]
    num_rounded: int = 0
    num_numbers: int = 0
    num_bytes: int = 0
    errors: float = 0.0
    squares: float = 0.0


def _kinds_in(module: PreTrainedModel) -> Callable[[str], str | None]:
    """By a name in the files: _LINEAR if it is the weight of a linear layer that may be rounded, _EXPERT if one of a
    stack of such, else None.
    """
    names, parts = module.state_dict(), dict(module.named_modules())
    place, head = places_in(module, names), module.get_output_embeddings()  # type: ignore[no-untyped-call]
    routers = {
        child for part in parts.values() if hasattr(part, "experts") for child in part.children() if _is_plain(child)
    }
    inside = set(module.get_decoder().modules())  # type: ignore[no-untyped-call]

    def kind_of(name: str) -> str | None:
        found, converted = place(name)
        part = parts.get(found.rpartition(".")[0])
        if found not in names or part not in inside or part in routers or part is head:
            return None
        if converted is not None and names[found].dim() == 3 and not isinstance(part, nn.Conv1d):
            return _EXPERT
        return _LINEAR if _is_plain(part) and found.endswith(".weight") else None

    return kind_of


def _is_plain(part: Any) -> bool:
    return type(part) is nn.Linear


def _config_of(roundings: Mapping[str, Rounding], ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors. All linear layers are of the first group, but for those that another
    one names.
    """
    groups = dict[Rounding, list[str]]()
    for name, way in roundings.items():
        groups.setdefault(way, []).append(name.removesuffix(".weight"))
    ways = sorted(groups, key=lambda way: -len(groups[way]))
    targets = [["Linear"], *(sorted(groups[way]) for way in ways[1:])]
    pairs = zip(ways, targets, strict=True)
    return {
        "quant_method": "compressed-tensors",
        "format": ways[0].form,
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": way.config_group(names) for i, (way, names) in enumerate(pairs)},
        "ignore": [*ignored],
    }


def _table_of(file: Path) -> dict[str, Any]:
    """Raises OSError, and SafetensorError where the file is cut off."""
    with safe_open(file, "pt"), file.open("rb") as opened:  # type: ignore[no-untyped-call]
        return read_header(opened)[0]


def _header_of(parts: Mapping[str, _Part]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """A file's beginning, and where behind it each tensor lies: wide numbers first, so that each is aligned."""
    table, places, end = dict[str, Any](), dict[str, tuple[int, int]](), 0
    for name in sorted(parts, key=lambda one: (-parts[one][2] / max(1, math.prod(parts[one][1])), one)):
        dtype, shape, size = parts[name]
        places[name] = end, end + size
        table[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [*places[name]]}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **table}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def _reserve(file: BinaryIO, size: int) -> None:
    """Takes the room of a whole file, where the system can. Raises OSError if there is none."""
    file.truncate(size)
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> None:
    for start in range(0, count, _PIECE):
        target.write(source.read(min(_PIECE, count - start)))


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def _copy_beside(source: Path, target: Path, left: str = ".safetensors") -> None:
    """Copies what is no weight of the model: tokenizer, chat template, and modules in folders of their own."""
    for path in source.iterdir():
        if _LEFT.match(path.name) or path.suffix == left:
            continue
        if path.is_file():
            shutil.copyfile(path, target / path.name)
        elif path.is_dir() and not path.is_symlink():
            (target / path.name).mkdir()
            _copy_beside(path, target / path.name, left="")
