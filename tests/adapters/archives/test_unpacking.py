from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import subprocess
import tarfile
import tempfile
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_serve.adapters.archives.unpacking import unpack
from lora_serve.core.errors import InvalidAdapterError, PayloadTooLargeError
from tests.attempts import in_some_attempt

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: b'{"r": 1}', WEIGHTS: bytes(range(256)) * 5}
LIMIT = 10**6

Members = dict[str, bytes]


def tar(members: Members, mode: str = "w", form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode, format=form) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tar_gz(members: Members) -> bytes:
    return tar(members, "w:gz")


def ustar(members: Members) -> bytes:
    return tar(members, form=tarfile.USTAR_FORMAT)


def gnu(members: Members) -> bytes:
    return tar(members, form=tarfile.GNU_FORMAT)


def zipped(members: Members, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def stored(members: Members) -> bytes:
    return zipped(members, zipfile.ZIP_STORED)


SIDES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
FORMATS = [tar, tar_gz, ustar, gnu, zipped, stored]
Packed = Callable[[Members], bytes]


def unpacked(content: bytes, tmp_path: Path, limit: int = LIMIT) -> Members:
    (tmp_path / "upload").write_bytes(content)
    folder = Path(tempfile.mkdtemp(prefix="staged", dir=tmp_path))
    try:
        unpack(tmp_path / "upload", folder, limit)
    finally:
        assert set(os.listdir(folder)) <= {CONFIG, WEIGHTS, *SIDES}
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("pack", FORMATS)
@pytest.mark.parametrize("prefix", ["", "./", "my-adapter/", "./my-adapter/", "é" * 60 + "/"])
def test_two_files_at_the_top_or_in_one_folder_are_read(pack: Packed, prefix: str, tmp_path: Path) -> None:
    extras = {"README.md": b"# hello", "special_tokens_map.json": b"{}", "checkpoint-5/deep/" + WEIGHTS: b"older"}
    extras |= {f"checkpoint-5/deep/{name}": b"older" for name in SIDES}
    files = {**FILES, **{name: name.encode() for name in SIDES}}
    assert unpacked(pack({prefix + name: content for name, content in {**extras, **files}.items()}), tmp_path) == files


@pytest.mark.parametrize("pack", FORMATS)
def test_folders_as_members_are_passed_over(pack: Packed, tmp_path: Path) -> None:
    content = pack({"a/" + name: content for name, content in FILES.items()})
    buffer = io.BytesIO(content)
    if pack in (zipped, stored):
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.mkdir("empty")
    elif pack is not tar_gz:
        with tarfile.open(fileobj=buffer, mode="a") as archive:
            info = tarfile.TarInfo("empty")
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
    assert unpacked(buffer.getvalue(), tmp_path) == FILES


def test_archive_made_by_the_tar_program_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, content in FILES.items():
        (tmp_path / "in" / name).write_bytes(content)
    for flags, form in (("czf", "gnu"), ("cf", "pax"), ("cf", "ustar"), ("cf", "v7")):
        command = ["tar", f"--format={form}", "-C", tmp_path, f"-{flags}", tmp_path / "out", "in"]
        subprocess.run(command, check=True)
        assert unpacked((tmp_path / "out").read_bytes(), tmp_path) == FILES


@pytest.mark.parametrize("form", ["gnu", "oldgnu", "pax"])
@pytest.mark.parametrize("flags", [["--listed-incremental=snapshot"], ["-V", "/a/../label"], ["-V", "x" * 90]])
def test_incremental_and_labelled_archive_is_read(form: str, flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    for name, content in FILES.items():
        (tmp_path / "in" / name).write_bytes(content)
    subprocess.run(["tar", f"--format={form}", *flags, "-czf", "out", "in"], cwd=tmp_path, check=True)
    assert unpacked((tmp_path / "out").read_bytes(), tmp_path) == FILES


def test_labels_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError, match="no end"):
        unpacked(gzip.compress(header("label", 0, b"V") * 9000 + tar(FILES)), tmp_path, limit=10**8)


@pytest.mark.parametrize("pack", FORMATS)
@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
def test_missing_file_is_named(pack: Packed, missing: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError, match=missing):
        unpacked(pack({name: content for name, content in FILES.items() if name != missing}), tmp_path)


def test_pickle_instead_of_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError, match="pickle"):
        unpacked(tar({CONFIG: b"{}", "adapter_model.bin": b"x"}), tmp_path)


@pytest.mark.parametrize("pack", FORMATS)
@pytest.mark.parametrize("name", ["/" + WEIGHTS, "../" + WEIGHTS, "a/../../" + WEIGHTS, "a\\..\\x", "../README.md"])
def test_names_that_point_outside_are_refused(pack: Packed, name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError, match="points outside"):
        unpacked(pack({name: b"x", **FILES}), tmp_path)
    assert set(os.listdir(tmp_path)) == {"upload", *(n for n in os.listdir(tmp_path) if n.startswith("staged"))}


@pytest.mark.parametrize("pack", FORMATS)
def test_two_files_of_one_name_are_refused(pack: Packed, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError, match="twice"):
        unpacked(pack({"a/" + CONFIG: b"{}", **{f"b/{name}": content for name, content in FILES.items()}}), tmp_path)


@pytest.mark.parametrize("pack", FORMATS)
def test_checkpoints_below_a_trainers_files_are_passed_over(pack: Packed, tmp_path: Path) -> None:
    checkpoint = {f"checkpoint-10/{name}": b"old" for name in (*FILES, *SIDES)}
    for members in ({**checkpoint, **FILES}, {**FILES, **checkpoint}):
        assert unpacked(pack(members), tmp_path) == FILES


@pytest.mark.parametrize("pack", FORMATS)
def test_files_in_two_folders_are_refused(pack: Packed, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError, match="different folders"):
        unpacked(pack({"a/" + CONFIG: b"{}", "b/" + WEIGHTS: b"x"}), tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.BLKTYPE])
def test_links_and_devices_in_a_tar_are_refused(kind: bytes, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo(WEIGHTS)
        info.type, info.linkname = kind, "/etc/passwd"
        archive.addfile(info)
    with pytest.raises(InvalidAdapterError, match="link or device"):
        unpacked(buffer.getvalue(), tmp_path)


def test_member_without_a_name_is_passed_over(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(""), b"")
        for name, data in FILES.items():
            archive.writestr(name, data)
    assert unpacked(buffer.getvalue(), tmp_path) == FILES


def commented(comment: bytes) -> bytes:
    """A zip with this comment, which Python's own writer would change."""
    content = zipped(FILES)
    return content[:-2] + len(comment).to_bytes(2, "little") + comment


@pytest.mark.parametrize(
    "comment", [b"made by hand", b"PK\5\6", b"a PK\5\6 b" * 9, b"PK\5\6" + bytes(30), b"PK\5\6" * 16383]
)
def test_comment_of_a_zip_may_hold_anything(comment: bytes, tmp_path: Path) -> None:
    assert unpacked(commented(comment), tmp_path) == FILES


def test_zip_whose_comment_is_another_end_is_refused(tmp_path: Path) -> None:
    for comment in (zipped({})[-22:], zipped(FILES)):
        with pytest.raises(InvalidAdapterError, match="twice"):
            unpacked(commented(comment), tmp_path)


def test_links_in_a_zip_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        info = zipfile.ZipInfo(WEIGHTS)
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(InvalidAdapterError, match="link or device"):
        unpacked(buffer.getvalue(), tmp_path)


@pytest.mark.parametrize("pack", FORMATS)
def test_content_beyond_the_limit_is_refused(pack: Packed, tmp_path: Path) -> None:
    content = pack({CONFIG: b"{}", WEIGHTS: bytes(1000)})
    with pytest.raises(PayloadTooLargeError):
        unpacked(content, tmp_path, limit=1001)
    assert unpacked(content, tmp_path, limit=1002)[WEIGHTS] == bytes(1000)


@pytest.mark.parametrize(
    ("pack", "name", "refused_as"),
    [
        (tar_gz, WEIGHTS, PayloadTooLargeError),
        (tar_gz, "padding.txt", PayloadTooLargeError),
        (zipped, WEIGHTS, PayloadTooLargeError),
        (zipped, "padding.txt", PayloadTooLargeError),
    ],
)
def test_compression_bomb_costs_neither_memory_nor_disk(
    pack: Packed, name: str, refused_as: type[Exception], tmp_path: Path
) -> None:
    content = pack({name: bytes(64 * 2**20), CONFIG: b"{}"})
    assert len(content) < 2**20
    tracemalloc.start()
    with pytest.raises(refused_as):
        unpacked(content, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 2**20
    assert sum(path.stat().st_size for path in tmp_path.rglob(WEIGHTS)) <= LIMIT


@pytest.mark.parametrize("pack", [tar_gz, zipped])
@pytest.mark.parametrize("name", [CONFIG, "generation_config.json"])
def test_small_file_that_is_large_takes_no_disk(pack: Packed, name: str, tmp_path: Path) -> None:
    content = pack({CONFIG: b"{}", WEIGHTS: b"w", name: bytes(8 * 2**20)})
    files = unpacked(content, tmp_path, limit=16 * 2**20)
    assert len(files[name]) == 2**20 + 1  # which shows that it is too large


def header(name: str, size: int, kind: bytes) -> bytes:
    block = bytearray(512)
    block[: len(name)] = name.encode()
    block[124:136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block[156:157] = kind
    block[257:263] = b"ustar\0"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def test_extended_header_bomb_is_refused_before_it_is_read(tmp_path: Path) -> None:
    for kind in (b"x", b"L", b"g", b"K"):
        content = gzip.compress(header("x", 300 * 2**20, kind) + bytes(20 * 2**20))
        tracemalloc.start()
        with pytest.raises(InvalidAdapterError, match="extended header"):
            unpacked(content, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
        tracemalloc.stop()


@pytest.mark.parametrize(("kind", "count"), [(tarfile.XHDTYPE, 70), (tarfile.XGLTYPE, 9000)])
def test_extended_headers_without_end_are_refused(kind: bytes, count: int, tmp_path: Path) -> None:
    info = tarfile.TarInfo("extended")
    info.type, info.size = kind, 65535 if kind == tarfile.XHDTYPE else 0
    header = (
        info.tobuf(tarfile.USTAR_FORMAT) + b"65535 a=".ljust(info.size, b"a")[: info.size] + b"\0" * (-info.size % 512)
    )
    with pytest.raises(InvalidAdapterError, match="no end"):
        unpacked(gzip.compress(header * count + tar(FILES)), tmp_path, limit=10**8)


def test_pax_headers_of_tiny_records_are_refused_soon(tmp_path: Path) -> None:
    one = header("x", 65536, b"x") + b"4 =\n" * 16384
    content = gzip.compress(one * 60 + tar(FILES))

    def refuse() -> None:
        began = time.process_time()
        with pytest.raises(InvalidAdapterError, match="more than 50000 records"):
            unpacked(content, tmp_path, limit=10**8)
        assert time.process_time() - began < 1

    in_some_attempt(refuse)
    assert unpacked(one * 2 + tar(FILES), tmp_path) == FILES


@pytest.mark.parametrize("content", [b"", b"x"])
def test_gzip_of_very_many_members_with_hardly_any_content_is_refused_soon(content: bytes, tmp_path: Path) -> None:
    start = tar({CONFIG: bytes(10**6)})[:512]  # a header, to which the content would belong
    archive = gzip.compress(start) + gzip.compress(content, mtime=0) * 500_000

    def refuse() -> None:
        began = time.process_time()
        with pytest.raises(InvalidAdapterError, match="too many members"):
            unpacked(archive, tmp_path, limit=10**8)
        assert time.process_time() - began < 0.5

    in_some_attempt(refuse)


@pytest.mark.parametrize("size", [4096, 65280])
def test_gzip_of_many_members_with_content_is_unpacked(size: int, tmp_path: Path) -> None:
    """bgzip's members have 65280 bytes; the last one is empty."""
    files = {CONFIG: FILES[CONFIG], WEIGHTS: Random(1).randbytes(8_000_000)}
    whole = tar(files)
    parts = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert unpacked(b"".join(map(gzip.compress, [*parts, b""])), tmp_path, limit=10**7) == files


@pytest.mark.parametrize("size", [1, 40, 70_000])
def test_zeros_behind_the_members_of_a_gzip_and_between_them_are_passed_over(size: int, tmp_path: Path) -> None:
    """Tapes and block devices pad with them."""
    whole = tar(FILES)
    parts = [gzip.compress(whole[:700]), gzip.compress(whole[700:])]
    assert unpacked(bytes(size).join([*parts, b""]), tmp_path) == FILES


def test_tar_whose_first_name_begins_like_a_zip_is_a_tar(tmp_path: Path) -> None:
    assert unpacked(tar({f"PKU-adapter/{name}": content for name, content in FILES.items()}), tmp_path) == FILES


def test_damaged_tar_header_is_refused(tmp_path: Path) -> None:
    content = bytearray(ustar(FILES))
    content[0] ^= 1
    with pytest.raises(InvalidAdapterError, match="checksum"):
        unpacked(bytes(content), tmp_path)


@pytest.mark.parametrize("size", [2**87, 2**62, 2**40, 1000])
def test_member_that_claims_more_than_there_is_is_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError, match="truncated"):
        unpacked(header(WEIGHTS, size, b"0") + bytes(512), tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        b"9999999 path=x\n",
        b"x path=y\n",
        b"5",
        b"20 GNU.sparse.map=1\n",
        b"11 size=-5\n",
        b"0 path=a\n",
        b"90path=x\n7 a=bc\n",
    ],
)
def test_broken_pax_records_are_refused(record: bytes, tmp_path: Path) -> None:
    content = header("x", len(record), b"x") + record.ljust(512, b"\0") + header(WEIGHTS, 0, b"0")
    with pytest.raises(InvalidAdapterError, match="sound"):
        unpacked(content, tmp_path)


@pytest.mark.parametrize(("kind", "content"), [(b"L", b""), (b"L", b"\0a"), (b"x", b"8 path=\n")])
def test_empty_name_in_an_extended_header_is_refused(kind: bytes, content: bytes, tmp_path: Path) -> None:
    """Python's tarfile takes it for the name, POSIX for none."""
    told = header("x", len(content), kind) + (content.ljust(512, b"\0") if content else b"")
    with pytest.raises(InvalidAdapterError, match="empty name"):
        unpacked(told + tar(FILES), tmp_path)


def test_headers_that_stand_before_no_member_or_name_all_members_are_refused(tmp_path: Path) -> None:
    sound, end = tar(FILES).rstrip(b"\0"), bytes(1024)
    sound += bytes(-len(sound) % 512)
    assert unpacked(header("x", 0, b"g") + sound + end, tmp_path) == FILES
    for kind in (b"x", b"L", b"g", b"K"):
        with pytest.raises(InvalidAdapterError, match="before no member"):
            unpacked(sound + header("x", 0, kind) + end, tmp_path)
    with pytest.raises(InvalidAdapterError, match="all members"):
        unpacked(header("x", 9, b"g") + b"9 size=1\n".ljust(512, b"\0") + sound + end, tmp_path)


def test_zip_with_a_huge_directory_is_refused(tmp_path: Path) -> None:
    content = stored({f"{number:>0100}": b"" for number in range(8000)})
    with pytest.raises(InvalidAdapterError, match="directory is too long"):
        unpacked(content, tmp_path)


@pytest.mark.parametrize("pack", [tar, stored])
def test_too_many_members_are_refused(pack: Packed, tmp_path: Path) -> None:
    with pytest.raises(InvalidAdapterError, match="1000 members"):
        unpacked(pack({str(number): b"" for number in range(1001)}), tmp_path)


def test_encrypted_or_exotic_zip_is_refused(tmp_path: Path) -> None:
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with pytest.raises(InvalidAdapterError, match="deflate"):
            unpacked(zipped(FILES, method), tmp_path)
    encrypted = bytearray(stored(FILES))
    at = encrypted.index(b"PK\x01\x02")
    encrypted[at + 8] |= 1
    with pytest.raises(InvalidAdapterError, match="encrypted"):
        unpacked(bytes(encrypted), tmp_path)


@pytest.mark.parametrize("pack", FORMATS)
def test_archive_cut_anywhere_is_refused(pack: Packed, tmp_path: Path) -> None:
    content = pack(FILES)
    end = content.rfind(FILES[WEIGHTS][-64:]) + 64 if pack in (tar, ustar, gnu, stored) else len(content) - 8
    for cut in range(0, end, 97):
        with pytest.raises(InvalidAdapterError):
            unpacked(content[:cut], tmp_path)


def test_other_formats_are_refused_in_words(tmp_path: Path) -> None:
    for content in (b"", b"hello", bz2.compress(tar(FILES)), lzma.compress(tar(FILES)), gzip.compress(b"hello")):
        with pytest.raises(InvalidAdapterError):
            unpacked(content, tmp_path)


def test_other_compression_is_named(tmp_path: Path) -> None:
    whole = tar(FILES)
    zstd, lz4 = b"\x28\xb5\x2f\xfd" + whole, b"\x04\x22\x4d\x18" + whole
    for name, content in {"bzip2": bz2.compress(whole), "xz": lzma.compress(whole), "zstd": zstd, "lz4": lz4}.items():
        with pytest.raises(InvalidAdapterError, match=f"compressed with {name}, which is not supported"):
            unpacked(content, tmp_path)
    assert unpacked(tar({f"BZh91AY&SY/{name}": content for name, content in FILES.items()}), tmp_path) == FILES


def test_tar_without_an_end_is_refused_in_words(tmp_path: Path) -> None:
    whole = ustar(FILES)
    end = len(whole.rstrip(b"\0")) + -len(whole.rstrip(b"\0")) % 512
    with pytest.raises(InvalidAdapterError, match="without the two blocks of zeros at its end"):
        unpacked(whole[:end], tmp_path)
    with pytest.raises(InvalidAdapterError, match="lacks the second block of its end"):
        unpacked(whole[: end + 512], tmp_path)


@given(st.sampled_from([b"", b"PK\x03\x04", b"PK\x05\x06", b"\x1f\x8b\x08"]), st.binary(max_size=600))
def test_random_bytes_are_refused(tmp_path: Path, start: bytes, rest: bytes) -> None:
    with pytest.raises(InvalidAdapterError):
        unpacked(start + rest, tmp_path)


@given(
    st.sampled_from(FORMATS), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_damaged_archive_is_refused_or_gives_only_our_two_names(
    tmp_path: Path, pack: Packed, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(pack(FILES))
    for place, value in changes:
        content[place % len(content)] = value
    try:
        found = unpacked(bytes(content), tmp_path)
    except (InvalidAdapterError, PayloadTooLargeError):
        return
    assert found.keys() == FILES.keys()
