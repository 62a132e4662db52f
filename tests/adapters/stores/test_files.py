"""Private folders, durable files, and the monitor of a store's folder."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path

import pytest

from lora_serve.adapters.stores import files
from lora_serve.adapters.stores import files as module
from lora_serve.adapters.stores.files import StoreMonitor, make_private
from lora_serve.core.errors import StoreUnwritableError


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


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[OSError]:
    """What writing raises, as long as there is something in it."""
    raised: list[OSError] = []
    sound = module.write_and_drop

    def write(folder: Path) -> None:
        if raised:
            raise raised[0]
        sound(folder)

    monkeypatch.setattr(module, "write_and_drop", write)
    return raised


def test_a_try_leaves_nothing(tmp_path: Path) -> None:
    assert StoreMonitor(tmp_path).test()
    assert list(tmp_path.iterdir()) == []


def test_each_change_is_said_once_in_words_without_paths(
    tmp_path: Path, broken: list[OSError], caplog: pytest.LogCaptureFixture
) -> None:
    monitor = StoreMonitor(tmp_path)
    with caplog.at_level(logging.INFO):
        for error in (None, None, OSError(errno.ENOSPC, "x", str(tmp_path)), OSError(errno.EDQUOT, "x"), None, None):
            broken[:] = [error] if error else []
            assert monitor.test() is (error is None)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "No space left on device" in caplog.messages[0]
    assert str(tmp_path) not in caplog.text


def test_change_is_refused_until_a_try_succeeds_and_the_next_one_is_taken_at_once(
    tmp_path: Path, broken: list[OSError]
) -> None:
    monitor = StoreMonitor(tmp_path)
    monitor.check()
    broken.append(OSError(errno.EROFS, "x"))
    monitor.check()  # nobody has looked
    monitor.test()
    with pytest.raises(StoreUnwritableError, match="Read-only file system") as caught:
        monitor.check()
    assert caught.value.retry_after > 0
    broken.clear()
    monitor.check()
    assert monitor.problem is None


def test_what_is_owed_is_made_up_for_in_its_order_and_counts_until_then(tmp_path: Path) -> None:
    monitor, done, is_ready = StoreMonitor(tmp_path), [], threading.Event()

    def second() -> None:
        if not is_ready.is_set():
            raise OSError(errno.EACCES, "x")
        done.append("second")

    monitor.retry_when_writable("the first", lambda: done.append("first"))
    monitor.retry_when_writable("the second", second)
    assert not monitor.test()
    assert monitor.problem == "the store cannot be written (the second): Permission denied"
    is_ready.set()
    assert monitor.test()
    assert monitor.test()
    assert done == ["first", "second"]


def test_thread_finds_out_by_itself_in_both_directions(
    tmp_path: Path, broken: list[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVAL", 0.01)
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monitor = StoreMonitor(tmp_path)
    monitor.start()
    try:
        for error in ([OSError(errno.ENOSPC, "x")], []):
            broken[:] = error
            wait = threading.Event()
            while (monitor.problem is None) == bool(error):
                wait.wait(0.005)
    finally:
        monitor.close()
