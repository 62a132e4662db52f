"""Archives that were damaged on their way: refused, or the very same files come out of them."""

from __future__ import annotations

import gzip
import io
import struct
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lora_serve.adapters.archives.unpacking import unpack
from lora_serve.core.errors import InvalidAdapterError, PayloadTooLargeError
from tests.adapters.archives.test_unpacking import (
    CONFIG,
    WEIGHTS,
    Members,
    Packed,
    gnu,
    stored,
    tar,
    tar_gz,
    ustar,
    zipped,
)
from tests.tiers import num_examples

FILES = {CONFIG: b'{"r": 1}', "README.md": b"read me " * 30, WEIGHTS: Random(0).randbytes(700)}
TAKEN = {name: FILES[name] for name in (CONFIG, WEIGHTS)}


def piped(files: Members) -> bytes:
    """A zip whose sizes and CRCs stand behind the members, as a writer makes it that cannot go back."""

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return pipe.getvalue()


def two_members(files: Members) -> bytes:
    """One tar in two gzip members, as pigz and bgzip write them."""
    whole = tar(files)
    return gzip.compress(whole[:700]) + gzip.compress(whole[700:])


CHECKED: tuple[Packed, ...] = (tar_gz, two_members, zipped, stored, piped)  # formats with checksums of the content


def outcome(content: bytes) -> Members | None:
    """The files that come out; None: refused."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "archive").write_bytes(content)
        folder = Path(scratch) / "folder"
        folder.mkdir()
        try:
            unpack(Path(scratch) / "archive", folder, 10**6)
        except (InvalidAdapterError, PayloadTooLargeError):
            return None
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def flips(content: bytes, num: int) -> Iterator[bytes]:
    """Copies with one bit flipped, spread over all of it, its first and last 24 bytes taken whole."""
    places = {*range(24), *range(len(content) - 24, len(content)), *range(24, len(content), len(content) // num)}
    for number, place in enumerate(sorted(places)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << number % 8
        yield bytes(damaged)


@pytest.mark.parametrize("pack", CHECKED)
def test_flipped_bit_is_refused_or_changes_nothing(pack: Packed) -> None:
    content = pack(FILES)
    assert outcome(content) == TAKEN
    found = [outcome(damaged) for damaged in flips(content, 120)]
    assert all(files in (None, TAKEN) for files in found)
    assert found.count(None) > len(found) // 3


@settings(max_examples=5 * num_examples())
@given(st.sampled_from(CHECKED), st.integers(0, 10**6), st.integers(1, 255))
@example(tar_gz, 8, 1)  # harmless: how hard the compressor tried
def test_any_damaged_byte_is_refused_or_changes_nothing(pack: Packed, place: int, difference: int) -> None:
    content = bytearray(pack(FILES))
    content[place % len(content)] ^= difference
    assert outcome(bytes(content)) in (None, TAKEN)


@pytest.mark.parametrize("pack", [tar, ustar, gnu])
def test_flipped_bit_in_a_tars_headers_is_refused_or_changes_nothing(pack: Packed) -> None:
    """The content of a plain tar has no checksum: that is what Content-Digest is for."""
    content = pack(FILES)
    starts = [at for at in range(0, len(content), 512) if content[at + 257 : at + 262] == b"ustar"]
    assert len(starts) >= len(FILES)
    for at in starts:
        for place in range(at, at + 512, 5):
            damaged = bytearray(content)
            damaged[place] ^= 1 << place % 8
            assert outcome(bytes(damaged)) in (None, TAKEN)


@pytest.mark.parametrize("pack", [tar_gz, two_members])
@pytest.mark.parametrize("damage", ["zeroed", "without_8", "without_4", "without_1", "length", "garbage", "half"])
def test_gzip_whose_trailer_is_not_right_is_refused(pack: Packed, damage: str) -> None:
    content = pack(FILES)
    damaged = {
        "zeroed": content[:-8] + bytes(8),
        "without_8": content[:-8],
        "without_4": content[:-4],
        "without_1": content[:-1],
        "length": content[:-4] + struct.pack("<I", 1),
        "garbage": content + b"\x00\x00garbage",
        "half": content + gzip.compress(b"more")[:-3],
    }[damage]
    assert outcome(damaged) is None


@pytest.mark.parametrize("pack", [tar, ustar, gnu])
def test_tar_without_its_end_or_with_more_behind_it_is_refused(pack: Packed) -> None:
    content = pack(FILES)
    end = len(content.rstrip(b"\0")) + -len(content.rstrip(b"\0")) % 512
    assert outcome(content[: end + 1024]) == TAKEN
    for damaged in (content[:end], content[: end + 512], content[: end + 1023], content + b"x", content + content):
        assert outcome(damaged) is None


@pytest.mark.parametrize("pack", [*CHECKED, tar])
def test_archive_cut_off_anywhere_is_refused_or_changes_nothing(pack: Packed) -> None:
    content = pack(FILES)
    for cut in range(1, len(content), 41):
        assert outcome(content[:-cut]) in (None, TAKEN)


def test_member_of_a_zip_that_is_passed_over_is_held_against_its_crc_too() -> None:
    content = bytearray(stored(FILES))
    content[content.index(b"read me ") + 3] ^= 1
    assert outcome(bytes(content)) is None


@pytest.mark.parametrize("pack", [zipped, stored, piped])
def test_local_header_that_differs_from_the_directory_is_refused(pack: Packed) -> None:
    content = pack(FILES)
    start = content.index(WEIGHTS.encode()) - 30
    crc = struct.pack("<I", zlib.crc32(FILES[WEIGHTS]))
    places = [start + 6, start + 8] + ([content.index(crc)] if pack is piped else [start + 14, start + 18, start + 22])
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 2
        assert outcome(bytes(damaged)) is None


@pytest.mark.parametrize("pack", [zipped, stored, piped])
def test_zip_with_anything_before_or_behind_it_is_refused(pack: Packed) -> None:
    content = pack(FILES)
    for damaged in (content + b"x", content + bytes(30), pack({"a": b""}) + content):
        assert outcome(damaged) is None
    with_comment = bytearray(content + b"a comment")
    with_comment[len(content) - 2 : len(content)] = struct.pack("<H", 9)
    assert outcome(bytes(with_comment)) == TAKEN
    assert outcome(bytes(with_comment[:-1])) is None


def test_archives_of_the_usual_programs_are_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, content in FILES.items():
        (tmp_path / "in" / name).write_bytes(content)
    (tmp_path / "in" / "deep").mkdir()
    commands = {
        "blocks": ["tar", "-b", "200", "-cf", "out", "in"],
        "piped": ["sh", "-c", "tar -c in | gzip -9 > out"],
        "no_name": ["sh", "-c", "tar -c in | gzip -n > out"],
    }
    for command in commands.values():
        subprocess.run(command, check=True, cwd=tmp_path)
        assert outcome((tmp_path / "out").read_bytes()) == TAKEN
