"""How long a blob stays that no catalog names, whatever the clock says meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lora_serve.adapters.stores.disk_tables import OrphanedBlobs
from lora_serve.core.errors import AdapterUnavailableError

NOW = 1_800_000_000.0  # Unix seconds
DAY = 86400.0
DIGEST = "sha256:" + "a" * 64


class Orphans(OrphanedBlobs):
    """Orphans under a clock that is set by hand."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(tmp_path / "unnamed")
        self._monkeypatch = monkeypatch
        self._blob = tmp_path / "blobs" / ("a" * 64)

    def taken_at(self, seconds: float) -> None:
        self._set(seconds)
        self._blob.mkdir(parents=True)
        self.take(self._blob)

    def is_kept_at(self, seconds: float) -> bool:
        """Whether a start at this time leaves the blob."""
        self._set(seconds)
        self.expire(30)
        return [digest for digest, _ in self.all()] == [DIGEST]

    def _set(self, seconds: float) -> None:
        self._monkeypatch.setattr(time, "time", lambda: seconds)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orphans:
    return Orphans(tmp_path, monkeypatch)


@pytest.mark.parametrize("wrong", [5.0, NOW + 400 * DAY], ids=["not set", "a year ahead"])
def test_days_of_an_orphan_that_was_taken_by_a_wrong_clock_begin_once_it_is_right(kept: Orphans, wrong: float) -> None:
    kept.taken_at(wrong)
    assert kept.is_kept_at(wrong + 60)
    assert kept.is_kept_at(NOW)
    assert kept.is_kept_at(NOW + 29 * DAY)
    assert not kept.is_kept_at(NOW + 31 * DAY)


def test_a_folder_that_cannot_be_read_is_an_error_in_words(kept: Orphans, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    kept.taken_at(NOW)
    assert kept.digests() == (DIGEST,)
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(AdapterUnavailableError, match=r"unnamed cannot be read: Permission denied"):
        kept.digests()
