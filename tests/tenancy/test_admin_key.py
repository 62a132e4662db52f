"""The admin key: where it comes from, and that it stays secret."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

from lora_serve.core.errors import ConfigError
from lora_serve.tenancy import admin_key
from lora_serve.tenancy.admin_key import AdminKey, check_key_file, load_admin_key


def test_key_is_made_at_the_first_start_and_kept(tmp_path: Path) -> None:
    store = tmp_path / "store"
    first = load_admin_key(None, store)
    secret = (store / "admin_key").read_text().strip()
    assert len(secret) >= 43  # 256 bits in base64
    assert first.matches(secret)
    assert load_admin_key(None, store).matches(secret)


def test_key_file_is_for_its_owner_only(tmp_path: Path) -> None:
    load_admin_key(None, tmp_path)
    assert stat.S_IMODE((tmp_path / "admin_key").stat().st_mode) == 0o600
    (tmp_path / "admin_key").chmod(0o644)
    load_admin_key(None, tmp_path)
    assert stat.S_IMODE((tmp_path / "admin_key").stat().st_mode) == 0o600


def test_new_key_is_flushed_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a loss of power takes it, and the next start makes another than the operator has noted."""
    flushed: list[set[str]] = []
    monkeypatch.setattr(admin_key, "flush", lambda path: flushed.append({file.name for file in path.iterdir()}))
    load_admin_key(None, tmp_path)
    assert len(flushed) == 1
    assert "admin_key" in flushed[0]


def test_copy_that_a_killed_start_left_is_removed(tmp_path: Path) -> None:
    load_admin_key(None, tmp_path)
    left = tmp_path / ".admin_key.0123456789abcdef"
    os.link(tmp_path / "admin_key", left)
    load_admin_key(None, tmp_path)
    assert not left.exists()
    os.link(tmp_path / "admin_key", left)
    load_admin_key("configured-key", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["admin_key"]


def test_two_stores_have_two_keys(tmp_path: Path) -> None:
    load_admin_key(None, tmp_path / "a")
    load_admin_key(None, tmp_path / "b")
    assert (tmp_path / "a" / "admin_key").read_text() != (tmp_path / "b" / "admin_key").read_text()


def test_log_names_the_place_and_not_the_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        key = load_admin_key(None, tmp_path)
    assert str(tmp_path / "admin_key") in caplog.text
    secret = (tmp_path / "admin_key").read_text().strip()
    assert secret not in caplog.text
    assert secret not in repr(key)


def test_configured_key_wins_and_writes_nothing(tmp_path: Path) -> None:
    key = load_admin_key("configured-key", tmp_path)
    assert key.matches("configured-key")
    assert not key.matches("configured-kez")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("offered", ["", "x" * 100_000, "schlüssel", "\udcff"])
def test_any_text_may_be_offered(offered: str) -> None:
    assert not AdminKey.of("right-key").matches(offered)


def test_broken_key_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "admin_key").write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        load_admin_key(None, tmp_path)


def test_check_before_the_start_refuses_a_broken_key_file_and_makes_none(tmp_path: Path) -> None:
    check_key_file(tmp_path)
    assert list(tmp_path.iterdir()) == []
    load_admin_key(None, tmp_path)
    check_key_file(tmp_path)
    (tmp_path / "admin_key").write_bytes(b"\xff" * 43)
    with pytest.raises(ConfigError, match="cannot be used"):
        check_key_file(tmp_path)


def test_store_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        load_admin_key(None, tmp_path / "file" / "store")
