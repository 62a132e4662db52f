"""The safetensors library is the oracle: what it writes is read, and whatever we accept it accepts too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from lora_serve.adapters.checkpoint.safetensors_header import HeaderBounds, read_header
from lora_serve.core.errors import InvalidAdapterError

TENSORS = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.ones(1, 1, dtype=torch.float16)}
GOOD = save(TENSORS, metadata={"format": "pt"})


def built(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes], str]:
    def reasons(content: bytes) -> str:
        path = tmp_path / "adapter_model.safetensors"
        path.write_bytes(content)
        with pytest.raises(InvalidAdapterError) as caught:
            read_header(path)
        return "; ".join(caught.value.reasons)

    return reasons


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    table = read_header(path)
    assert {name: tensor.shape for name, tensor in table.items()} == {"a": (2, 3), "b": (4,), "c": (1, 1)}
    assert {tensor.dtype for tensor in table.values()} == {"F32", "BF16", "F16"}


@pytest.mark.parametrize("length", range(500, 680, 20))
def test_header_lengths_that_begin_like_a_pickle_are_no_pickles(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(built(json.dumps({"a": entry()}).encode().ljust(length), bytes(8)))
    assert read_header(path).keys() == {"a"}


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        (b" ", b""),
        (b"\n", b""),
        (b"", b"\n"),
        (b"", b"\t  "),
        (b"", b" " * 4097),
        (b"", b" " * 3_000_000),
        (b" ", b" "),
    ],
)
def test_header_padded_in_another_way_than_the_format_says_is_refused(
    refused: Callable[[bytes], str], before: bytes, behind: bytes
) -> None:
    text = json.dumps({"a": entry()}).encode()
    assert "header" in refused(built(before + text + behind, bytes(8)))


@pytest.mark.parametrize("size", [0, 7, 4096])
def test_header_padded_with_spaces_is_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(built(json.dumps({"a": entry()}).encode() + b" " * size, bytes(8)))
    assert read_header(path).keys() == {"a"}
    assert library_accepts(path)


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 20, len(GOOD) // 2, len(GOOD) - 1])
def test_truncated_file_is_refused(refused: Callable[[bytes], str], cut: int) -> None:
    assert "truncated" in refused(GOOD[:cut])


def test_bytes_after_the_last_tensor_are_refused(refused: Callable[[bytes], str]) -> None:
    assert "1 bytes after its last tensor" in refused(GOOD + b"x")


def test_git_lfs_pointer_is_recognised(refused: Callable[[bytes], str]) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    assert "git lfs pull" in refused(pointer)


def test_pickle_under_another_name_is_recognised(refused: Callable[[bytes], str], tmp_path: Path) -> None:
    for modern in (True, False):
        torch.save(TENSORS, tmp_path / "x.bin", _use_new_zipfile_serialization=modern)
        assert "pickle" in refused((tmp_path / "x.bin").read_bytes())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (built(b"not json"), "not valid JSON"),
        (built([]), "not a JSON object"),
        (built({}), "no tensors"),
        (built({"__metadata__": {"format": "pt"}}), "no tensors"),
        (built({"__metadata__": {"n": 1}, "a": entry()}, bytes(8)), "__metadata__"),
        (built(b'{"a": {}, "a": {}}'), "twice"),
        (built({"a": entry(dtype="I8", offsets=(0, 2))}, bytes(2)), "dtype 'I8'"),
        (built({"a": entry(dtype=["F32"])}, bytes(8)), "dtype"),
        (built({"a": entry(shape=(-2,))}, bytes(8)), "sizes"),
        (built({"a": entry(shape=(True, 2))}, bytes(8)), "sizes"),
        (built({"a": entry(shape=(2.0,))}, bytes(8)), "sizes"),
        (built({"a": entry(shape=(1,) * 9, offsets=(0, 4))}, bytes(4)), "sizes"),
        (built({"a": entry(shape=(2**40,), offsets=(0, 2**42))}, bytes(8)), "sizes"),
        (built({"a": entry(offsets=(0, 7))}, bytes(8)), "needs 8 bytes"),
        (built({"a": entry(offsets=(8, 0))}, bytes(8)), "needs 8 bytes"),
        (built({"a": entry(offsets=(0, 8, 8))}, bytes(8)), "two numbers"),
        (built({"a": entry(offsets=(0, 8)), "b": entry(offsets=(4, 12))}, bytes(12)), "overlaps"),
        (built({"a": entry(offsets=(0, 8)), "b": entry(offsets=(0, 8))}, bytes(8)), "overlaps"),
        (built({"a": entry(offsets=(0, 8)), "b": entry(offsets=(12, 20))}, bytes(20)), "hole of 4 bytes"),
        (built({"a": entry(offsets=(4, 12))}, bytes(12)), "hole of 4 bytes"),
        (built({"a": entry() | {"extra": 1}}, bytes(8)), "must hold"),
        (built({"a": 7}), "must hold"),
        (b"\xff" * 100, "claims"),
        (b"<!DOCTYPE html><html>not found</html>", "not a safetensors file"),
    ],
)
def test_every_lie_in_a_header_is_refused(refused: Callable[[bytes], str], content: bytes, words: str) -> None:
    assert words in refused(content)


def accepted(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        read_header(path)
    except InvalidAdapterError:
        return False
    return True


def library_accepts(path: Path) -> bool:
    return all(tensor is not None for tensor in load_file(path).values())


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    assert not accepted(tmp_path / "x", content)


@given(st.dictionaries(st.text(max_size=3), st.builds(
    entry,
    st.sampled_from(["F32", "BF16", "F64", None]),
    st.lists(st.integers(-1, 3), max_size=2),
    st.lists(st.integers(-1, 24), max_size=3),
), max_size=3), st.integers(0, 24))  # fmt: skip
def test_what_we_accept_the_library_accepts(tmp_path: Path, header: dict[str, Any], num_bytes: int) -> None:
    path = tmp_path / "x.safetensors"
    if accepted(path, built(header, bytes(num_bytes))):
        assert library_accepts(path)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_one_flipped_byte_is_refused_or_still_a_sound_file(tmp_path: Path, place: int, value: int) -> None:
    path = tmp_path / "x.safetensors"
    if accepted(path, GOOD[:place] + bytes([value]) + GOOD[place + 1 :]):
        assert library_accepts(path)


def test_header_that_fits_no_adapter_is_not_even_parsed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(built(b"{" * 1001))
    with pytest.raises(InvalidAdapterError, match="a header of 1001 bytes"):
        read_header(path, HeaderBounds(num_tensors=10, num_bytes=1000))


def test_names_that_are_too_many_are_not_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(built({f"{i}": "no entry" for i in range(11)}))
    with pytest.raises(InvalidAdapterError, match="has 11 tensors"):
        read_header(path, HeaderBounds(num_tensors=10, num_bytes=1000))
