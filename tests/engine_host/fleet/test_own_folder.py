"""The folder of a replica's copies."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lora_serve.engine_host.fleet.replica_engine import own_folder


def age(folder: Path) -> None:
    os.utime(folder, (time.time() - 3600,) * 2)


def test_folders_of_replicas_that_ended_are_removed_and_no_others(tmp_path: Path) -> None:
    parent = tmp_path / "new" / "parent"
    running, lock = own_folder(parent)
    ended, ended_lock = own_folder(parent)
    just_ended, just_ended_lock = own_folder(parent)
    (ended / "blobs").mkdir()
    ended_lock.close()
    just_ended_lock.close()
    for folder in (running, ended):
        age(folder)
    third, third_lock = own_folder(parent)
    assert sorted(parent.iterdir()) == sorted([running, just_ended, third])
    assert third.stat().st_mode & 0o777 == 0o700
    lock.close()
    third_lock.close()


def test_folder_behind_a_link_stays(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "lora_serve-link").symlink_to(tmp_path / "mine")
    age(tmp_path / "mine")
    os.utime(tmp_path / "parent" / "lora_serve-link", (0, 0), follow_symlinks=False)
    _, lock = own_folder(tmp_path / "parent")
    assert (tmp_path / "mine").is_dir()
    lock.close()
