"""Notes of running servers: for their owner only, gone at the end, passed over when the process is gone."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from lora_serve.commands.admin_client import find_admin_key
from lora_serve.commands.flags import DEFAULT_URL, named_urls, urls_here
from lora_serve.core.process import PatientThreads, noted_server, running_servers, store_of

URL = "http://127.0.0.1:8123"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("URL", "STORE", "ADMIN_KEY"):
        monkeypatch.delenv(f"LORA_SERVE_{name}", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "state" / "lora_serve" / "servers"


def keep_key(store: Path, key: str) -> Path:
    store.mkdir()
    (store / "admin_key").write_text(f"{key}\n")
    return store


def test_server_is_noted_for_its_owner_as_long_as_it_runs(state: Path, tmp_path: Path) -> None:
    with noted_server(URL, Path("store")):
        (file,) = state.iterdir()
        assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(state.stat().st_mode)) == (0o600, 0o700)
        (note,) = running_servers()
        assert (note.url, note.store, note.pid) == (URL, str(tmp_path / "store"), os.getpid())
        assert urls_here() == [URL]
    assert list(state.iterdir()) == []
    assert urls_here() == [DEFAULT_URL]


def test_commands_find_the_key_of_the_server_that_listens_there(tmp_path: Path) -> None:
    keep_key(tmp_path / "adapters_store", "key-of-the-default-store")
    with noted_server(URL, keep_key(tmp_path / "elsewhere", "key-of-that-server")):
        assert find_admin_key(None, None, URL) == "key-of-that-server"
        assert find_admin_key(None, None, "http://localhost:8123/prefix") == "key-of-that-server"
        assert find_admin_key(None, None, "http://127.0.0.1:8124") == "key-of-the-default-store"
        assert find_admin_key(None, None, "http://example.org:8123") is None
        assert find_admin_key(None, "adapters_store", URL) == "key-of-the-default-store"
        assert find_admin_key("key-of-the-flag", None, URL) == "key-of-the-flag"
    assert store_of(URL) is None


def test_environment_names_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named_urls() == []
    monkeypatch.setenv("LORA_SERVE_URL", "http://a:1,http://b:2")
    assert named_urls() == ["http://a:1", "http://b:2"]


def test_notes_of_processes_that_are_gone_are_passed_over_and_removed(state: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with noted_server(URL, Path("store")):
        note = json.loads((state / f"{os.getpid()}.json").read_text())
    stale = {
        f"{gone.pid}.json": json.dumps(note | {"pid": gone.pid}),
        f"{os.getppid()}.json": json.dumps(note | {"pid": os.getppid(), "ticks": 1}),  # its number was given again
        "1.json": "no JSON",
        "2.json": json.dumps(note | {"pid": "x"}),
        "3.json": "[]",
    }
    for name, text in stale.items():
        (state / name).write_text(text)
    assert running_servers() == []
    with noted_server(URL, Path("store")):
        assert [file.name for file in state.iterdir()] == [f"{os.getpid()}.json"]


def test_server_starts_where_nothing_can_be_noted(state: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    with noted_server(URL, Path("store")):
        assert running_servers() == []


NO_THREAD = RuntimeError("can't start new thread")


def test_work_waits_for_the_threads_that_are_there() -> None:
    held = threading.Event()
    with PatientThreads(4) as threads:
        first = threads.submit(held.wait)
        with mock.patch.object(threading.Thread, "start", side_effect=NO_THREAD):
            second = threads.submit(lambda: 7)
        assert not second.done()
        held.set()
        assert (first.result(10), second.result(10)) == (True, 7)


@mock.patch.object(threading.Thread, "start", side_effect=NO_THREAD)
def test_work_is_refused_while_there_is_no_thread_at_all(start: mock.Mock) -> None:
    with PatientThreads(4) as threads, pytest.raises(RuntimeError, match="new thread"):
        threads.submit(lambda: 7)
