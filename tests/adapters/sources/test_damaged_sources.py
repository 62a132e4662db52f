"""What a source says of a content is held against what came; drops of bytes hold no transfer for ever."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import os
import socket
import ssl
import tarfile
import threading
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pytest
from aiohttp import web
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from lora_serve.adapters.sources import folder as folder_module
from lora_serve.adapters.sources.archive_url import ArchiveUrlSource
from lora_serve.adapters.sources.base import AdapterSource, no_progress, of_hub, of_s3
from lora_serve.adapters.sources.connections import Timeouts
from lora_serve.adapters.sources.filesystem import FilesystemSource
from lora_serve.adapters.sources.folder import FolderSource
from lora_serve.adapters.sources.hub import HubSource
from lora_serve.adapters.sources.table import SourceTable
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InvalidAdapterError,
    InvalidRequestError,
    PayloadTooLargeError,
)
from tests.certificates import make_certificate
from tests.fake_hub import FakeHub
from tests.http_thread import serving

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG: b'{"r": 1}', WEIGHTS: Random(0).randbytes(50_000)}
DAMAGED = FILES | {WEIGHTS: FILES[WEIGHTS][:-1] + b"?"}
LIMIT = 10**6


def fetched(source: AdapterSource, text: str, tmp_path: Path) -> dict[str, bytes]:
    """The files that came; after an error nothing is left."""
    target = tmp_path / "store" / "target"
    target.mkdir(parents=True)
    try:
        SourceTable({text.partition(":")[0] if "://" in text else "": source}).fetch(text, target, LIMIT)
        return {path.name: path.read_bytes() for path in target.iterdir()}
    except BaseException:
        assert not any((tmp_path / "store").iterdir())
        raise


def tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def b64(kind: str, content: bytes) -> str:
    return base64.b64encode(hashlib.new(kind, content).digest()).decode()


S3 = {"x-amz-request-id": "1"}
HEADERS: dict[str, Callable[[bytes], dict[str, str]]] = {
    "content_digest": lambda c: {"Content-Digest": f"md5=:AAAA:, sha-256=:{b64('sha256', c)}:"},
    "repr_digest": lambda c: {"Repr-Digest": f"sha-512=:{b64('sha512', c)}:"},
    "content_md5": lambda c: {"Content-MD5": b64("md5", c)},
    "etag_of_s3": lambda c: S3 | {"ETag": f'"{hashlib.md5(c).hexdigest()}"'},
    "digest": lambda c: {"Digest": f"unixsum=1, SHA-256={b64('sha256', c)}"},
    "digests": lambda c: {"Digest": f"md5={b64('md5', c)},sha={b64('sha1', c)}"},
    "google": lambda c: {"x-goog-hash": f"crc32c=AAAAAA==,md5={b64('md5', c)}", "ETag": '"0"'},
    "google_coded": lambda c: {"x-goog-stored-content-encoding": "identity", "x-goog-hash": f"md5={b64('md5', c)}"},
    "crc32_of_s3": lambda c: {"x-amz-checksum-crc32": base64.b64encode(zlib.crc32(c).to_bytes(4, "big")).decode()},
    "sha256_of_s3": lambda c: {"x-amz-checksum-sha256": b64("sha256", c)},
    "checksum_of_s3": lambda c: S3 | {"x-amz-checksum-sha256": b64("sha256", c), "ETag": '"0"'},
}


@contextmanager
def answering(headers: Mapping[str, str], body: bytes) -> Iterator[tuple[ArchiveUrlSource, str]]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body, headers=headers)

    app = web.Application()
    app.router.add_get("/adapter.tar", answer)
    with serving(app) as url:
        yield ArchiveUrlSource([url]), f"{url}/adapter.tar"


@pytest.mark.parametrize("name", HEADERS)
def test_answer_of_a_url_is_held_against_its_headers(name: str, tmp_path: Path) -> None:
    headers = HEADERS[name](tar(FILES))
    with answering(headers, tar(FILES)) as (source, url):
        assert fetched(source, url, tmp_path / "a") == FILES
    with answering(headers, tar(DAMAGED)) as (source, url), pytest.raises(InvalidAdapterError, match="damaged"):
        fetched(source, url, tmp_path / "b")


@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": '"' + "0" * 32 + '"'},  # not S3's: it may be anything
        S3 | {"ETag": '"' + "0" * 32 + '-2"'},
        S3 | {"ETag": '"' + "0" * 32 + '"', "x-amz-server-side-encryption": "aws:kms"},
        S3 | {"ETag": '"' + "0" * 32 + '"', "x-amz-server-side-encryption-customer-algorithm": "AES256"},
        S3 | {"x-amz-checksum-sha256": b64("sha256", b""), "x-amz-checksum-type": "COMPOSITE"},
        {"Content-Digest": "crc32c=:AAAA:"},
        {"Content-Digest": "?"},
        {"Content-MD5": "AAAA"},
        {"Digest": "sha-256=?, md5, id-sha-256=AAAA"},
        {"x-goog-hash": "crc32c=AAAAAA=="},
        {"x-goog-hash": f"md5={b64('md5', b'')}", "x-goog-stored-content-encoding": "gzip"},
        {"x-amz-checksum-crc32": "AAAAAA==", "x-amz-checksum-type": "COMPOSITE"},
        {"Content-Encoding": "identity"},
        {"Content-Encoding": "aws-chunked"},
    ],
)
def test_what_is_no_checksum_of_the_content_is_not_taken_for_one(headers: dict[str, str], tmp_path: Path) -> None:
    with answering(headers, tar(FILES)) as (source, url):
        assert fetched(source, url, tmp_path) == FILES


def zipped(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


CODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "X-Gzip": gzip.compress,
    "aws-chunked, gzip": gzip.compress,
    "deflate": zlib.compress,
}


@pytest.mark.parametrize("pack", [tar, zipped, lambda files: gzip.compress(tar(files))], ids=["tar", "zip", "tgz"])
@pytest.mark.parametrize("coding", CODINGS)
def test_answer_is_decoded_once_to_the_end_of_its_coding(
    coding: str, pack: Callable[[Mapping[str, bytes]], bytes], tmp_path: Path
) -> None:
    body = CODINGS[coding](pack(FILES))
    headers = {"Content-Encoding": coding, "Content-MD5": b64("md5", body)}
    with answering(headers, body) as (source, url):
        assert fetched(source, url, tmp_path / "whole") == FILES
    for number, damaged in enumerate((body[:-4] + bytes(4), body[:-4], body[:-1], body + b"garbage", body[:100])):
        refusal = pytest.raises(InvalidAdapterError, match="came damaged")
        with answering({"Content-Encoding": coding}, damaged) as (source, url), refusal:
            fetched(source, url, tmp_path / str(number))


@pytest.mark.parametrize("coding", ["br", "gzip, gzip"])
def test_answer_under_another_coding_is_refused_in_words(coding: str, tmp_path: Path) -> None:
    refusal = pytest.raises(InvalidRequestError, match="must be gzip, deflate or none")
    with answering({"Content-Encoding": coding}, tar(FILES)) as (source, url), refusal:
        fetched(source, url, tmp_path)


def test_decoded_answer_is_bounded(tmp_path: Path) -> None:
    bomb, refusal = gzip.compress(bytes(50 * LIMIT)), pytest.raises(PayloadTooLargeError)
    with answering({"Content-Encoding": "gzip"}, bomb) as (source, url), refusal:
        fetched(source, url, tmp_path)


def git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.mark.parametrize("etag", [git, lambda c: hashlib.sha256(c).hexdigest(), lambda c: hashlib.sha1(c).hexdigest()])
def test_files_of_a_hub_are_held_against_its_etags(etag: Callable[[bytes], str], tmp_path: Path) -> None:
    hub = FakeHub(etag_of=etag)
    hub.repos["org/adapter"] = dict(FILES)
    with serving(hub.app()) as url:
        assert fetched(HubSource(url), "hf://org/adapter", tmp_path / "a") == FILES
        hub.damage = lambda path, content: DAMAGED[path]
        with pytest.raises(InvalidAdapterError, match=rf"{WEIGHTS} came damaged"):
            fetched(HubSource(url), "hf://org/adapter", tmp_path / "b")


def test_etag_of_another_kind_says_nothing() -> None:
    assert of_hub(None) is None
    assert of_hub('"abc"') is None
    assert of_hub("x" * 40) is None
    assert of_s3({"etag": '"' + "0" * 32 + '"'}, "bucket--use1-az4--x-s3") is None


class DeclaringFileSystem(DirFileSystem):  # type: ignore[misc]
    """Local folders as buckets whose objects come with checksums, and damaged."""

    protocol = "declaring"
    async_impl = False

    def __init__(self, root: str, form: str, damaged: bool, **options: Any) -> None:
        super().__init__(path=root, fs=LocalFileSystem(), skip_instance_cache=True, **options)
        self.form, self.damaged = form, damaged
        if form == "s3":
            self.call_s3 = self._head

    def info(self, path: str, **options: Any) -> Any:
        found = super().info(path, **options)
        content = FILES.get(path.rpartition("/")[2], b"")
        forms = {
            "gs": {"md5Hash": b64("md5", content)},
            "az": {"content_settings": {"content_md5": bytearray(hashlib.md5(content).digest())}},
        }
        return found | forms.get(self.form, {})

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        content = (DAMAGED if self.damaged else FILES)[path.rpartition("/")[2]][start:end]
        return content[:-1] if self.damaged and self.form == "short" else content

    def _head(self, method: str, Bucket: str, Key: str, ChecksumMode: str) -> Any:  # noqa: N803
        assert (method, Bucket, ChecksumMode) == ("head_object", "b", "ENABLED")
        content = FILES[Key.rpartition("/")[2]]
        return {"ResponseMetadata": {"HTTPHeaders": {"etag": f'"{hashlib.md5(content).hexdigest()}"'}}}


@pytest.mark.parametrize(
    ("form", "error"),
    [("s3", InvalidAdapterError), ("gs", InvalidAdapterError), ("az", InvalidAdapterError),
     ("short", AdapterUnavailableError)],
)  # fmt: skip
def test_objects_are_held_against_their_sizes_and_checksums(form: str, error: type[Exception], tmp_path: Path) -> None:
    fsspec.register_implementation("declaring", DeclaringFileSystem, clobber=True)
    folder = tmp_path / "root" / "b" / "adapter"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)

    def source(damaged: bool) -> AdapterSource:
        options = {"root": str(tmp_path / "root"), "form": form, "damaged": damaged}
        return FilesystemSource("declaring", "package", options)

    assert fetched(source(False), "declaring://b/adapter", tmp_path / "a") == FILES
    with pytest.raises(error, match=r"damaged|short"):
        fetched(source(True), "declaring://b/adapter", tmp_path / "b")


class HangingFileSystem(AsyncFileSystem):  # type: ignore[misc]
    """One whose reads never end."""

    protocol = "hanging"

    async def _info(self, path: str, **options: Any) -> Any:
        return {"type": "file", "size": 100, "name": path}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        await asyncio.sleep(60)
        return b""


def test_read_of_an_object_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("hanging", HangingFileSystem, clobber=True)
    monkeypatch.setattr("lora_serve.adapters.sources.filesystem._READ_SECONDS", 0.1)
    with pytest.raises(AdapterUnavailableError, match="Timeout"):
        fetched(FilesystemSource("hanging", "package"), "hanging://b/adapter", tmp_path)


@pytest.mark.parametrize("change", [-1, 1])
def test_file_of_a_folder_that_changes_while_it_is_read_is_refused(
    change: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "root" / "adapter"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    plain = folder_module.pieces_of

    def changing(file: Any) -> Iterator[bytes]:
        pieces = plain(file)
        yield next(pieces)
        if os.fstat(file.fileno()).st_size > 1000:
            os.truncate(folder / WEIGHTS, len(FILES[WEIGHTS]) + change)
        yield from pieces

    monkeypatch.setattr("lora_serve.adapters.regular_file.CHUNK_BYTES", 10_000)
    monkeypatch.setattr(folder_module, "pieces_of", changing)
    with pytest.raises(AdapterUnavailableError, match="changed"):
        fetched(FolderSource([tmp_path / "root"]), str(folder), tmp_path)


@contextmanager
def dripping(start: bytes, drop: bytes) -> Iterator[str]:
    """A server that says `start` at once, then drop after drop, as long as somebody listens."""
    is_over = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            connection, _ = listener.accept()
            with connection:
                connection.recv(2**16)
                connection.sendall(start)
                while not is_over.wait(0.01):
                    connection.sendall(drop)
        except OSError:
            pass  # the client has hung up

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        is_over.set()
        listener.close()
        thread.join(10)


OK = b"HTTP/1.1 200 OK\r\n"
BODY = OK + b"Content-Length: 500000\r\n\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "drop", "timeouts", "words"),
    [
        (b"", b"H", Timeouts(headers=0.3), "too long"),
        (OK + b"X-Long: ", b"x", Timeouts(headers=0.3), "too long"),
        (OK, b"X-More: 1\r\n", Timeouts(headers=0.3), "too long|HTTPException"),
        (BODY, b"x", Timeouts(window=0.3), "too slowly"),
        (BODY, b"x", Timeouts(total=0.3), "too long"),
        (CHUNKED, b"1\r\nx\r\n", Timeouts(window=0.3), "too slowly"),
        (CHUNKED + b"1;", b"x", Timeouts(window=0.3), "too slowly"),
    ],
    ids=["status", "header", "headers", "slow_body", "long_body", "slow_chunks", "slow_chunk_size"],
)
def test_answer_in_drops_is_given_up(start: bytes, drop: bytes, timeouts: Timeouts, words: str, tmp_path: Path) -> None:
    with dripping(start, drop) as url:
        started = time.monotonic()
        with pytest.raises(AdapterUnavailableError, match=words):
            fetched(ArchiveUrlSource([url], timeouts), f"{url}adapter.tar", tmp_path)
        assert time.monotonic() - started < 5


def test_transfer_of_any_source_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def fetch(self, source: str, target: Path, limit: int, progress: Callable[[int], None]) -> str:
            while True:
                progress(0)

    monkeypatch.setattr("lora_serve.adapters.sources.table.DEFAULT_TIMEOUTS", Timeouts(total=0.05))
    assert no_progress(0) is None
    with pytest.raises(AdapterUnavailableError, match="too long"):
        fetched(Slow(), "s3://b/x", tmp_path)


def test_answer_over_tls_is_read_and_held_against_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_certificate(tmp_path / "certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    trusting = made.client_context()
    monkeypatch.setattr(ssl, "create_default_context", lambda: trusting)
    bodies = [tar(FILES), tar(DAMAGED)]

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=bodies.pop(0), headers=HEADERS["content_digest"](tar(FILES)))

    app = web.Application()
    app.router.add_get("/adapter.tar", answer)
    with serving(app, context) as url:
        assert fetched(ArchiveUrlSource([url]), f"{url}/adapter.tar", tmp_path / "a") == FILES
        with pytest.raises(InvalidAdapterError, match="damaged"):
            fetched(ArchiveUrlSource([url]), f"{url}/adapter.tar", tmp_path / "b")


def test_fast_answer_is_not_taken_for_a_slow_one(tmp_path: Path) -> None:
    with answering({}, tar(FILES)) as (_, url):
        source = ArchiveUrlSource([url.rpartition("/")[0]], Timeouts(window=1e-9, window_bytes=1))
        assert fetched(source, url, tmp_path) == FILES
