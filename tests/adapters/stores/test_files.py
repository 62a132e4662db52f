"""Private folders, and what is flushed of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.adapters.stores import files
from lora_serve.adapters.stores.files import make_private


def test_new_folder_is_flushed_into_each_parent_that_got_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a loss of power takes the whole store, whatever was flushed in it."""
    flushed: list[Path] = []
    monkeypatch.setattr(files, "flush", flushed.append)
    make_private(tmp_path / "store" / "blobs")
    assert sorted(flushed) == [tmp_path, tmp_path / "store"]
    make_private(tmp_path / "store" / "blobs")
    make_private(tmp_path / "store" / "tmp")
    assert flushed[2:] == [tmp_path / "store"]


def test_parent_that_may_not_be_read_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may let this user make files, and not list them."""

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(files, "flush", refuse)
    assert make_private(tmp_path / "store").is_dir()
