"""Files are opened and read in one way: regular, in their own folder, by their size, never waiting."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_serve.adapters import regular_file
from lora_serve.adapters.regular_file import (
    ChangedFileError,
    copy_regular,
    filled,
    link_regular,
    open_regular,
    pieces_of,
    read_regular,
)
from lora_serve.adapters.stores.disk_tables import read_records

LIMIT = 10**7
CONTENT = bytes(range(256)) * 10_000  # more than one piece
PACKAGE = Path(regular_file.__file__).parents[1]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zeros_without_end(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link(path: Path) -> None:
    (path.parent / "right").write_bytes(CONTENT)
    path.symlink_to(path.parent / "right")


def circle(path: Path) -> None:
    path.symlink_to(path)


def folder(path: Path) -> None:
    path.mkdir()


def local_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def nothing(path: Path) -> None:
    pass


REFUSALS = "not a regular file|symbolic links|No such|a directory|was changed"
STRANGERS = [fifo, zeros_without_end, link, circle, folder, local_socket, nothing]


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.__name__)
def test_what_is_no_regular_file_is_refused_at_once(stranger: Callable[[Path], None], tmp_path: Path) -> None:
    path, num_open = tmp_path / "file", len(os.listdir("/proc/self/fd"))
    stranger(path)
    for read in (
        open_regular,
        lambda p: read_regular(p, LIMIT),
        lambda p: copy_regular(p, tmp_path / "c"),
        lambda p: link_regular(p, p),
    ):
        with pytest.raises(OSError, match=REFUSALS):
            read(path)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_file_in_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_bytes(CONTENT)
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match=REFUSALS):
        open_regular(tmp_path / "linked" / "file")
    assert read_regular(tmp_path / "real" / "file", LIMIT) == CONTENT


def test_regular_file_is_read_linked_and_copied_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    copy_regular(path, tmp_path / "copy")
    link_regular(path, tmp_path / "link")
    for each in (path, tmp_path / "copy", tmp_path / "link"):
        assert read_regular(each, LIMIT) == CONTENT
    assert (tmp_path / "link").samefile(path)
    memory = bytearray(len(CONTENT))
    with open_regular(path) as file:
        assert b"".join(bytes(piece) for piece in filled(file, memoryview(memory))) == memory == CONTENT
    (tmp_path / "empty").touch()
    assert read_regular(tmp_path / "empty", LIMIT) == b""


def test_file_that_is_larger_than_it_may_be_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    with pytest.raises(OSError, match="larger than 100 bytes"):
        read_regular(tmp_path / "file", 100)


def test_record_that_is_no_regular_file_is_an_empty_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"named-{'0' * 32}.json")
    (tmp_path / f"named-{'1' * 32}.json").symlink_to("/dev/zero")
    (tmp_path / f"named-{'2' * 32}.json").write_text("{}")
    assert read_records(tmp_path) == {"0" * 32: "", "1" * 32: "", "2" * 32: "{}"}


@pytest.mark.parametrize("change", [1, -1, 10**7, -len(CONTENT)])
def test_file_that_grows_or_shrinks_while_it_is_read_is_refused(change: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for read in (pieces_of, lambda file: filled(file, memoryview(bytearray(len(CONTENT))))):
        path.write_bytes(CONTENT)
        with open_regular(path) as file:
            pieces = read(file)
            next(pieces)
            os.truncate(path, max(len(CONTENT) + change, 0))
            with pytest.raises(ChangedFileError):
                list(pieces)


def test_file_that_says_it_is_empty_and_is_not_is_refused() -> None:
    with pytest.raises(ChangedFileError):
        read_regular(Path(f"/proc/{os.getpid()}/status"), LIMIT)


def test_link_of_a_file_that_was_exchanged_meanwhile_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, plain = tmp_path / "file", os.link
    path.write_bytes(CONTENT)

    def exchanged(source: Path, target: Path, **options: bool) -> None:
        source.unlink()
        os.mkfifo(source)
        plain(source, target, **options)

    monkeypatch.setattr(os, "link", exchanged)
    with pytest.raises(OSError, match=REFUSALS):
        link_regular(path, tmp_path / "target")
    assert not (tmp_path / "target").exists()


# Files of Ray's, of Linux's and of the base model, in which no adapter is.
OTHER_FILES = {f"engine_host/{name}.py" for name in ("fleet/cluster", "fleet/keeper", "fleet/node", "hosts/ray")}


def test_nothing_that_adapters_are_made_of_is_opened_in_another_way() -> None:
    reads = re.compile(r"\.open\(\"rb\"|\.read_bytes\(|\.read_text\(|copyfile|copy2|file_digest|safe_open\(|np\.load")
    found = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for part in ("adapters", "engine_host", "model/lora/host_adapter.py", "app/warm_set.py")
        for path in ([PACKAGE / part] if part.endswith(".py") else sorted((PACKAGE / part).rglob("*.py")))
        for line in path.read_text().splitlines()
        if reads.search(line) and str(path.relative_to(PACKAGE)) not in OTHER_FILES
    ]
    assert found == []
