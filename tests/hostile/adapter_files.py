"""A small sound adapter of the canaries' world, and ways to ruin it: archives, headers, configs, values."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Files = dict[str, bytes]


def files_of(folder: Path) -> Files:
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


def tar(files: Mapping[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            _add(archive, name, content)
    return buffer.getvalue()


def tar_with(files: Mapping[str, bytes], *members: tarfile.TarInfo) -> bytes:
    """The files and further members without content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            _add(archive, name, content)
        for member in members:
            archive.addfile(member)
    return buffer.getvalue()


def member(name: str, kind: bytes, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, size
    return info


def zipped(files: Mapping[str, bytes], *, mode: int = 0o600) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, content)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def lying_zip(files: Files) -> bytes:
    """Sizes in the directory that are not those of the content."""
    sound = zipped(files)
    size = struct.pack("<I", len(files[WEIGHTS]))
    return sound.replace(size, struct.pack("<I", 7))


ARCHIVES: dict[str, Callable[[Files], bytes]] = {
    "link_to_passwd": lambda f: tar_with({CONFIG: f[CONFIG]}, member(WEIGHTS, tarfile.SYMTYPE, "/etc/passwd")),
    "hard_link_outside": lambda f: tar_with({CONFIG: f[CONFIG]}, member(WEIGHTS, tarfile.LNKTYPE, "../../admin_key")),
    "link_folder": lambda f: tar_with(f, member("out", tarfile.SYMTYPE, "/tmp")),
    "device": lambda f: tar_with({CONFIG: f[CONFIG]}, member(WEIGHTS, tarfile.CHRTYPE)),
    "block_device": lambda f: tar_with({CONFIG: f[CONFIG]}, member(WEIGHTS, tarfile.BLKTYPE)),
    "fifo": lambda f: tar_with({CONFIG: f[CONFIG]}, member(WEIGHTS, tarfile.FIFOTYPE)),
    "sparse": lambda f: tar_with({CONFIG: f[CONFIG]}, member(WEIGHTS, tarfile.GNUTYPE_SPARSE, size=2**40)),
    "parent": lambda f: tar({f"../{name}": content for name, content in f.items()}),
    "parent_deep": lambda f: tar({f"a/../../{name}": content for name, content in f.items()}),
    "absolute": lambda f: tar({f"/{name}": content for name, content in f.items()}),
    "windows": lambda f: zipped({f"..\\{name}": content for name, content in f.items()}),
    "zip_parent": lambda f: zipped({f"../../{name}": content for name, content in f.items()}),
    "zip_link": lambda f: zipped({CONFIG: f[CONFIG], WEIGHTS: b"/etc/passwd"}, mode=0o120777),
    "zip_lies": lying_zip,
    "zip_cut": lambda f: zipped(f)[:-30],
    "zip_in_zip": lambda f: zipped({"inner.zip": zipped(f)}),
    "tar_in_tar": lambda f: tar({"inner.tar": tar(f)}),
    "gzip_of_gzip": lambda f: gzip.compress(gzip.compress(tar(f))),
    "gzip_of_zip": lambda f: gzip.compress(zipped(f)),
    "gzip_of_nothing": lambda f: gzip.compress(b""),
    "gzip_bomb": lambda f: gzip.compress(bytes(2**26)),
    "tar_bomb": lambda f: tar({CONFIG: f[CONFIG], WEIGHTS: bytes(2**26)}, "w:gz"),
    "zip_bomb": lambda f: _deflated({CONFIG: f[CONFIG], WEIGHTS: bytes(2**26)}),
    "config_bomb": lambda f: tar({CONFIG: b" " * 2**26, WEIGHTS: f[WEIGHTS]}, "w:gz"),
    "many_members": lambda f: tar({**{f"junk/{i}": b"" for i in range(5000)}, **f}),
    "duplicate": lambda f: tar_with(f, member(CONFIG, tarfile.REGTYPE)),
    "claims_a_terabyte": lambda f: tar(f)[:512].replace(b"0000000", b"7777777", 1) + bytes(1024),
    "long_names": lambda f: tar({f"{i}" + "a" * 600_000: b"" for i in range(2)} | f),
    "only_config": lambda f: tar({CONFIG: f[CONFIG]}),
    "only_weights": lambda f: tar({WEIGHTS: f[WEIGHTS]}),
    "other_case": lambda f: tar({name.upper(): content for name, content in f.items()}),
    "pickle": lambda f: tar({CONFIG: f[CONFIG], "adapter_model.bin": b"\x80\x04."}),
    "html": lambda f: b"<!DOCTYPE html><html>404</html>",
    "empty": lambda f: b"",
    "random": lambda f: bytes(range(256)) * 40,
    "seven_zip": lambda f: b"7z\xbc\xaf\x27\x1c" + bytes(100),
    "rar": lambda f: b"Rar!\x1a\x07\x00" + bytes(100),
    "zstd": lambda f: b"\x28\xb5\x2f\xfd" + bytes(100),
}


def _deflated(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def header_of(weights: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(weights[:8], "little")
    return json.loads(weights[8 : 8 + size]), weights[8 + size :]


def built(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def changed(change: Callable[[dict[str, Any], str], object]) -> Callable[[bytes], bytes]:
    """Weights whose header `change(header, name of a tensor)` has edited in place."""

    def apply(weights: bytes) -> bytes:
        header, data = header_of(weights)
        change(header, next(name for name in sorted(header) if name != "__metadata__"))
        return built(header, data)

    return apply


def _renamed(header: dict[str, Any], name: str) -> None:
    header[name + "\u0000"] = header.pop(name)


def _twice(weights: bytes) -> bytes:
    header, data = header_of(weights)
    text = json.dumps(header).encode()
    return built(text[:-1] + b", " + text[1:], data)


def _filled(pattern: bytes) -> Callable[[bytes], bytes]:
    def apply(weights: bytes) -> bytes:
        header, data = header_of(weights)
        return built(header, pattern * (len(data) // len(pattern)))

    return apply


WEIGHT_FILES: dict[str, Callable[[bytes], bytes]] = {
    "header_too_long": lambda w: (2**40).to_bytes(8, "little") + w[8:],
    "header_length_max": lambda w: b"\xff" * 8 + w[8:],
    "header_length_0": lambda w: bytes(8) + w[8:],
    "header_not_json": lambda w: built(b"{" * 100, w[-100:]),
    "header_deep": lambda w: built(b'{"a":' * 50_000, b""),
    "header_list": lambda w: built([], b""),
    "header_utf_16": lambda w: built('{"a": 1}'.encode("utf-16"), b""),
    "header_number": lambda w: built(b"1e999", b""),
    "name_twice": _twice,
    "name_with_nul": changed(_renamed),
    "offsets_overlap": changed(lambda h, n: h[n].update(data_offsets=[0, h[n]["data_offsets"][1] + 4])),
    "offsets_backwards": changed(lambda h, n: h[n].update(data_offsets=h[n]["data_offsets"][::-1])),
    "offsets_negative": changed(lambda h, n: h[n].update(data_offsets=[-4, 4])),
    "offsets_a_terabyte": changed(lambda h, n: h[n].update(shape=[2**38], data_offsets=[0, 2**40])),
    "offsets_missing": changed(lambda h, n: h[n].pop("data_offsets")),
    "offsets_text": changed(lambda h, n: h[n].update(data_offsets=["0", "8"])),
    "shape_negative": changed(lambda h, n: h[n].update(shape=[-1, -1])),
    "shape_overflows": changed(lambda h, n: h[n].update(shape=[2**32, 2**32])),
    "shape_empty": changed(lambda h, n: h[n].update(shape=[])),
    "shape_zero": changed(lambda h, n: h[n].update(shape=[0, 4])),
    "shape_many": changed(lambda h, n: h[n].update(shape=[1] * 1000)),
    "shape_text": changed(lambda h, n: h[n].update(shape="4,4")),
    "dtype_unknown": changed(lambda h, n: h[n].update(dtype="F1024")),
    "dtype_wrong": changed(lambda h, n: h[n].update(dtype="BF16")),
    "dtype_list": changed(lambda h, n: h[n].update(dtype=["F32"])),
    "tensor_gone": changed(lambda h, n: h.pop(n)),
    "tensor_of_nothing": changed(lambda h, n: h.update({n + ".extra": h[n]})),
    "metadata_nested": changed(lambda h, n: h.update(__metadata__={"a": {"b": 1}})),
    "truncated": lambda w: w[:-1],
    "truncated_in_header": lambda w: w[:40],
    "seven_bytes": lambda w: w[:7],
    "empty": lambda w: b"",
    "longer": lambda w: w + bytes(8),
    "nan": _filled(b"\x00\x00\xc0\x7f"),
    "infinite": _filled(b"\x00\x00\x80\x7f"),
    "negative_infinite": _filled(b"\x00\x00\x80\xff"),
    "zeroes": _filled(bytes(4)),
    "largest_numbers": _filled(b"\xff\xff\x7f\x7f"),
    "pickle": lambda w: b"\x80\x04\x95" + w,
    "torch_zip": lambda w: zipped({"archive/data.pkl": b"\x80\x02."}),
    "numpy": lambda w: b"\x93NUMPY\x01\x00" + w,
    "gguf": lambda w: b"GGUF\x03\x00\x00\x00" + w,
    "lfs_pointer": lambda w: b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    "html": lambda w: b"<!DOCTYPE html><html><body>Sign in</body></html>",
    "elf": lambda w: b"\x7fELF" + w,
}

CONFIGS: dict[str, Any] = {
    "rank_100_000": {"r": 100_000},
    "rank_negative": {"r": -4},
    "rank_zero": {"r": 0},
    "rank_text": {"r": "4"},
    "rank_huge": {"r": 2**80},
    "rank_fraction": {"r": 4.5},
    "rank_pattern_huge": {"rank_pattern": {"q_proj": 100_000}},
    "rank_pattern_bomb": {"rank_pattern": {f"p{i}": 4 for i in range(100_000)}},
    "rank_pattern_regex": {"rank_pattern": {"(?!z)(.*)*(.*)*(.*)*(.*)*(.*)*x": 4}},
    "alpha_text": {"lora_alpha": "inf"},
    "alpha_huge": {"lora_alpha": 1e300},
    "alpha_list": {"lora_alpha": [8]},
    "targets_regex": {"target_modules": "^(([a-z])+.)+[A-Z]([a-z])+$"},
    "targets_regex_nested": {"target_modules": "(a|a)*(a|a)*(a|a)*b"},
    "targets_regex_broken": {"target_modules": "("},
    "targets_regex_long": {"target_modules": "(" * 5000 + ")" * 5000},
    "targets_backreference": {"target_modules": r"(.*)\1\1\1\1\1x"},
    "targets_number": {"target_modules": 7},
    "targets_nothing": {"target_modules": []},
    "targets_unknown": {"target_modules": ["no_such_module"]},
    "targets_parent": {"target_modules": ["../q_proj"]},
    "targets_many": {"target_modules": [f"m{i}" for i in range(100_000)]},
    "layers_regex": {"layers_to_transform": [0], "layers_pattern": "(a+)+$"},
    "layers_huge": {"layers_to_transform": [2**70]},
    "type_unknown": {"peft_type": "PROMPT_TUNING"},
    "type_class": {"peft_type": "os.system"},
    "task": {"task_type": "SEQ_CLS"},
    "pissa": {"init_lora_weights": "pissa_niter_999999999"},
    "corda": {"init_lora_weights": "corda"},
    "loftq": {"init_lora_weights": "loftq"},
    "init_object": {"init_lora_weights": {"__reduce__": "os.system"}},
    "megatron": {"megatron_config": {"module": "os"}},
    "replication": {"layer_replication": [[0, 1_000_000_000]]},
    "bias_unknown": {"bias": "everything"},
    "saved_modules": {"modules_to_save": ["lm_head", "no_such"]},
    "saved_modules_text": {"modules_to_save": "lm_head"},
    "trained_tokens_huge": {"trainable_token_indices": [2**60]},
    "trained_tokens_negative": {"trainable_token_indices": {"embed_tokens": [-1]}},
    "invocation_negative": {"alora_invocation_tokens": [-1]},
    "invocation_huge": {"alora_invocation_tokens": [10**9]},
    "dora_text": {"use_dora": "yes"},
    "rslora_number": {"use_rslora": 5},
    "unknown_setting": {"run_this": "import os"},
    "deep": {"metadata": json.loads("[" * 200 + "]" * 200)},
}
CONFIG_TEXTS: dict[str, bytes] = {
    "empty": b"",
    "nan_alpha": b'{"peft_type": "LORA", "r": 4, "lora_alpha": NaN, "target_modules": ["q_proj"]}',
    "infinite_alpha": b'{"peft_type": "LORA", "r": 4, "lora_alpha": 1e999, "target_modules": ["q_proj"]}',
    "rank_twice": b'{"peft_type": "LORA", "r": 4, "r": 100000, "target_modules": ["q_proj"]}',
    "deep": b"[" * 100_000,
    "digits": b'{"r": ' + b"9" * 100_000 + b"}",
    "not_utf_8": b'{"peft_type": "\xff"}',
    "surrogate": b'{"peft_type": "\\ud800"}',
    "yaml": b"!!python/object/apply:os.system [id]",
    "list": b"[]",
    "html": b"<html>",
}
