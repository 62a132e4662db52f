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
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from lora_serve.adapters.stores.files import flush
from lora_serve.model.loading.checkpoint_files import places_in, read_header, reported, weight_files, without_numbers
from lora_serve.model.loading.number_type import FLOAT8
from lora_serve.model.loading.rounding import Rounding

# Last names that no plain layer has.
BESIDE = re.compile(
    r"weight_(scale|scale_inv|scale_2|global_scale|zero_point|g_idx|shape|packed)|input_scale|SCB|weight\..*|qweight"
    r"|qzeros|g_idx"
)
_ROUNDED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # as safetensors names them
_NAMES = {
    **{dtype: name for name, dtype in _ROUNDED.items()},
    torch.int32: "I32",
    torch.int64: "I64",
    FLOAT8: "F8_E4M3",
}
_LEFT = re.compile(r"\.|.*\.(bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|onnx_data|index\.json)$")  # files: hidden, or weights
_PIECE = 2**24  # bytes
_Part = tuple[str, Sequence[int], int]  # type as safetensors names it, shape, bytes


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
        module = without_numbers(auto_class, hf_config)
        files, is_expert_of = weight_files(model), _kinds_in(module)
        found, experts, plain = dict[str, Rounding | None](), set[str](), set[str]()
        for name, entry in (item for file in files for item in _table_of(file).items()):
            path, _, last = name.rpartition(".")
            if BESIDE.fullmatch(last):
                raise ValueError(f"it is quantised already: its files hold {name}")
            if last == "weight" and len(entry["shape"]) > 1:
                plain.add(path)
            elif len(entry["shape"]) > 2:
                plain.add(rf"re:{re.escape(path)}\..*")  # as vLLM asks for the experts of one stack
            if path in plain and len(entry["shape"]) == 2 and (is_expert := is_expert_of(name)) is not None:
                with reported(path):
                    if entry["dtype"] not in _ROUNDED:
                        raise ValueError(f"its weight is {entry['dtype']}, not {', '.join(_ROUNDED)}")
                    found[name] = Rounding.of(kind, entry["shape"][1], group_size)
                experts.update([name] * is_expert)
        rules = [rule for name in experts if (rule := found[name]) is not None]
        smallest = min(rules, key=lambda rule: rule.group_size or 0) if rules and len(rules) == len(experts) else None
        found |= dict.fromkeys(experts, smallest)  # vLLM has one way for all of them
        roundings = {name: rule for name, rule in found.items() if rule is not None}
        if not roundings:
            words = "its layers are not nn.Linear, or of no width that can be rounded"
            raise ValueError(f"no layer can be quantised ({type(module).__name__}: {words})")
        head = module.get_output_embeddings()
        plain.update(path for path, part in module.named_modules() if part is head and head is not None)
        rounded = {name.removesuffix(".weight") for name in roundings}
        return cls(files, roundings, _config_of(roundings, sorted(plain - rounded)))

    def write(self, out: Path) -> str:
        """Writes all files into a new folder, which is there whole or not at all; returns what was done, in words.

        Raises OSError and ValueError.
        """
        total, source = defaultdict[str, float](float), self.files[0].parent
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as found:
            folder = Path(found) / out.name
            shutil.copytree(source, folder, ignore=lambda place, names: _left_out(names, place == str(source)))
            config = json.loads((source / "config.json").read_bytes()) | {"quantization_config": self.config}
            (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            weights = {name: one.name for one in self.files for name in self._write_file(one, folder / one.name, total)}
            if len(self.files) > 1:
                index = {"metadata": {"total_size": int(total["bytes"])}, "weight_map": weights}
                (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
            for path in (*folder.rglob("*"), folder):
                flush(path)
            folder.rename(out)
            flush(out.parent)
        kinds = (f"{count} in {rule}" for rule, count in Counter(self.roundings.values()).most_common())
        error = math.sqrt(total["errors"] / max(total["squares"], 1e-45))
        return (
            f"{len(self.roundings)} linear layers ({', '.join(kinds)}), {total['rounded'] / total['numbers']:.0%} of "
            f"all weights, with an error of {error:.2%} (root mean square); {total['bytes'] / 2**20:.1f} MiB"
        )

    def _write_file(self, source: Path, target: Path, total: dict[str, float]) -> list[str]:
        """Writes one file of weights, and adds to what is told of all; returns its tensors' names."""
        table = _table_of(source)
        stored: Any = safe_open(source, "pt")
        parts = self._parts(table)
        header, places = _header_of(parts)
        size = len(header) + sum(part[2] for part in parts.values())
        if shutil.disk_usage(target.parent).free < size:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {size / 2**20:.0f} MiB")
        with source.open("rb") as file, target.open("wb") as writer:
            start = read_header(file)[1]
            writer.write(header)
            for name, entry in table.items():
                if (rule := self.roundings.get(name)) is None:
                    begin, end = entry["data_offsets"]
                    file.seek(start + begin)
                    writer.seek(places[name])
                    for left in range(end - begin, 0, -_PIECE):
                        writer.write(file.read(min(_PIECE, left)))
                    continue
                with reported(name):
                    tensors, errors, squares = rule.tensors(stored.get_tensor(name))
                for last, tensor in tensors.items():
                    writer.seek(places[_beside(name, last)])
                    writer.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
                for key, value in (("errors", errors), ("squares", squares), ("rounded", math.prod(entry["shape"]))):
                    total[key] += value
        total["numbers"] += sum(math.prod(entry["shape"]) for entry in table.values())
        total["bytes"] += size
        return [*parts]

    def _parts(self, table: Mapping[str, Any]) -> dict[str, _Part]:
        """The tensors that stand for those of a file."""
        found = dict[str, _Part]()
        for name, entry in table.items():
            if (rule := self.roundings.get(name)) is None:
                found[name] = entry["dtype"], entry["shape"], entry["data_offsets"][1] - entry["data_offsets"][0]
                continue
            for last, (dtype, shape) in rule.forms(entry["shape"], _ROUNDED[entry["dtype"]]).items():
                found[_beside(name, last)] = _NAMES[dtype], shape, math.prod(shape) * dtype.itemsize
        return found


def _beside(name: str, last: str) -> str:
    return f"{name.removesuffix('weight')}{last}"


def _kinds_in(module: PreTrainedModel) -> Callable[[str], bool | None]:
    """By a name in the files: True if it is the weight of an expert that becomes one of a stack, False if that of a
    linear layer, None if it is neither or may not be rounded.
    """
    names, parts = module.state_dict(), dict(module.named_modules())
    place, head = places_in(module, names), module.get_output_embeddings()  # type: ignore[no-untyped-call]
    inside = set(module.get_decoder().modules()) - {head}  # type: ignore[no-untyped-call]
    for block in (part for part in parts.values() if hasattr(part, "experts")):
        inside -= {child for child in block.children() if type(child) is nn.Linear}  # its router

    def is_expert_of(name: str) -> bool | None:
        found, converted = place(name)
        part = parts.get(found.rpartition(".")[0])
        if found not in names or part not in inside:
            return None
        if converted is not None and names[found].dim() == 3 and not isinstance(part, nn.Conv1d):
            return True
        return False if type(part) is nn.Linear and found.endswith(".weight") else None

    return is_expert_of


def _config_of(roundings: Mapping[str, Rounding], ignored: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of compressed-tensors. All linear layers are of the first group, but for those that another
    one names.
    """
    rules = [rule for rule, _ in Counter(roundings.values()).most_common()]
    groups = {}
    for index, rule in enumerate(rules):
        own = sorted(name.removesuffix(".weight") for name, found in roundings.items() if found == rule)
        groups[f"group_{index}"] = rule.config_group(own if index else ["Linear"])
    head = {"quant_method": "compressed-tensors", "format": rules[0].form, "quantization_status": "compressed"}
    return {**head, "config_groups": groups, "ignore": [*ignored]}


def _table_of(file: Path) -> dict[str, Any]:
    """Raises OSError, and SafetensorError where the file is cut off."""
    with safe_open(file, "pt"), file.open("rb") as opened:
        return read_header(opened)[0]


def _header_of(parts: Mapping[str, _Part]) -> tuple[bytes, dict[str, int]]:
    """A file's beginning, and where in it each tensor begins: wide numbers first, so that each is aligned."""
    table, end = dict[str, Any](), 0
    for name in sorted(parts, key=lambda one: (-parts[one][2] / max(1, math.prod(parts[one][1])), one)):
        dtype, shape, size = parts[name]
        table[name] = {"dtype": dtype, "shape": [*shape], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **table}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    places = {name: 8 + len(text) + entry["data_offsets"][0] for name, entry in table.items()}
    return len(text).to_bytes(8, "little") + text, places


def _left_out(names: Sequence[str], is_model: bool) -> set[str]:
    """The files of a folder that are not copied: other forms of the weights, and the model's own, which are written."""
    return {name for name in names if _LEFT.match(name) or (is_model and name.endswith(".safetensors"))}
