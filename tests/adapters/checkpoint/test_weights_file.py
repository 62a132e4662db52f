"""Tensors as views of a file: what safetensors reads, without what it keeps."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_serve.adapters.checkpoint.content import WEIGHTS_NAME
from lora_serve.adapters.checkpoint.weights import open_weights
from lora_serve.core.errors import InvalidAdapterError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    values = torch.arange(24, dtype=torch.float32)
    tensors = {
        "odd": torch.tensor([7], dtype=torch.float16),  # what follows is not aligned
        "table": values.reshape(4, 6),
        "half": values.to(torch.bfloat16),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    return tmp_path


def test_every_tensor_is_as_safetensors_reads_it(folder: Path) -> None:
    file, expected = open_weights(folder), load_file(folder / WEIGHTS_NAME)
    assert set(file.tensors) == set(expected)
    for name, tensor in expected.items():
        found = file.get_tensor(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_unaligned_tensor_is_read_too(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'  # 54 bytes: the values begin at byte 62
    values = torch.tensor([1.5, -2.0])
    content = len(header).to_bytes(8, "little") + header + values.numpy().tobytes()
    (tmp_path / WEIGHTS_NAME).write_bytes(content)
    assert torch.equal(open_weights(tmp_path).get_tensor("a"), values)


def test_what_is_written_to_a_tensor_is_not_in_the_file(folder: Path) -> None:
    before = (folder / WEIGHTS_NAME).read_bytes()
    open_weights(folder).get_tensor("table").fill_(9)
    assert (folder / WEIGHTS_NAME).read_bytes() == before


def test_tensor_outlives_the_file_that_was_opened(folder: Path) -> None:
    tensor = open_weights(folder).get_tensor("table")
    gc.collect()
    assert float(tensor.sum()) == sum(range(24))


def test_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_NAME).write_bytes(b"")
    with pytest.raises(InvalidAdapterError, match="truncated"):
        open_weights(tmp_path)


def test_nothing_is_kept_of_what_was_read(folder: Path) -> None:
    """A thousand reads leave no thousand objects behind."""
    open_weights(folder).get_tensor("table")
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        for _ in range(1000):
            open_weights(folder).get_tensor("table")
        gc.collect()
        grown = tracemalloc.take_snapshot().compare_to(before, "filename")
    finally:
        tracemalloc.stop()
    assert sum(item.count_diff for item in grown) < 500
