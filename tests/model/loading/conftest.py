"""What the tests of loading share."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.model.loading import rounded_once


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of rounded checkpoints, which are not kept in this user's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(rounded_once, "cache_folder", lambda: folder)
    return folder / "quantized"
