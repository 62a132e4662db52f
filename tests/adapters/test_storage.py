"""Where the files of adapters pass on their way from a shared registry to this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.adapters.storage import is_noted, note_position, open_storage
from lora_serve.core.config import AdapterConfig
from lora_serve.core.settings import Settings


def test_what_comes_from_redis_passes_through_the_store_alone_where_a_restart_cleans_up(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "there is no such folder"))
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    digest = adapter_digest(folder)
    settings = Settings(model="unused", store=tmp_path / "store", redis_url=redis_url)
    with open_storage(settings.part(AdapterConfig)) as storage:
        storage.store.put(digest, folder)
        storage.disk.delete(digest)
        with storage.store.open(digest) as found:
            assert adapter_digest(found) == digest
        assert storage.disk.has(digest)
        killed = storage.disk.tmp / "left by a process that was killed"
        killed.mkdir()
        storage.disk.sweep(frozenset(), lambda *_: True)
        assert list(storage.disk.tmp.iterdir()) == []


def test_noted_position_is_the_last_one_whether_longer_or_shorter(tmp_path: Path) -> None:
    for position in (Position("e" * 32, 10, "h" * 32), Position("e" * 32, 9, "h"), Position(), Position("e", 2**40)):
        assert not is_noted(tmp_path, position)
        note_position(tmp_path, position)
        assert is_noted(tmp_path, position)
