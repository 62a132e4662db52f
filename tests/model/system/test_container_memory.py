"""A container's memory limit counts, not the machine's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_serve.model.system import device_memory
from lora_serve.model.system.process import free_in_container

STAT = "anon 300\nfile 500\nactive_file 100\ninactive_file 200\nshmem 50\n"


def group(folder: Path, limit: str, version: int = 2) -> Path:
    """A control group with 1000 bytes in use, of which 300 are copies of files."""
    names = ("memory.max", "memory.current", "memory.stat")
    if version == 1:
        names = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")
        (folder / "memory").mkdir()
    for name, text in zip(names, (limit, "1000\n", STAT), strict=True):
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_what_is_left_below_the_limit_is_free_and_copies_of_files_are_too(tmp_path: Path, version: int) -> None:
    assert free_in_container(group(tmp_path, "4000\n", version)) == 3300


def test_more_in_use_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    assert free_in_container(group(tmp_path, "500\n")) == 0


def test_no_limit_is_none(tmp_path: Path) -> None:
    assert free_in_container(group(tmp_path, "max\n")) is None
    assert free_in_container(tmp_path / "nowhere") is None


def test_smaller_of_machine_and_container_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = device_memory.free_memory(torch.device("cpu"))
    monkeypatch.setattr(device_memory, "free_in_container", lambda: 12345)
    assert device_memory.free_memory(torch.device("cpu")) == 12345
    monkeypatch.setattr(device_memory, "free_in_container", lambda: 2**60)
    assert device_memory.free_memory(torch.device("cpu")) > machine / 2
