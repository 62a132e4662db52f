"""An upload as multipart/form-data, as it comes off the wire. Nothing lies beside the files of fixed names."""

from __future__ import annotations

import asyncio
import atexit
import random
from collections.abc import Iterator
from typing import Any, cast

from aiohttp import web
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy

from lora_serve.core.errors import (
    InvalidAdapterError,
    InvalidRequestError,
    PayloadTooLargeError,
    SlowRequestError,
    UnsupportedMediaError,
)
from lora_serve.server.admin.protocol import UploadFields
from lora_serve.server.admin.upload import FILE_NAMES, Upload, _receive, _typed, _unpack
from lora_serve.server.json_body import check_fields
from tests.fuzz.files import empty_folder
from tests.fuzz.mutating import Bytes
from tests.fuzz.unpacked import FILES, SIDES
from tests.hostile.adapter_files import tar, zipped

ERRORS = (InvalidAdapterError, InvalidRequestError, PayloadTooLargeError, SlowRequestError, UnsupportedMediaError)
MAX_BYTES = 2**16
LOOP = asyncio.new_event_loop()
atexit.register(LOOP.close)


class Protocol:
    """What aiohttp's stream asks of a connection."""

    _reading_paused = False

    def pause_reading(self, *given: Any, **more: Any) -> None: ...
    def resume_reading(self, *given: Any, **more: Any) -> None: ...


class Request:
    """The parts of a request that reading an upload needs."""

    def __init__(self, kind: str, body: bytes, step: int) -> None:
        self.headers = CIMultiDictProxy(CIMultiDict({"Content-Type": kind}))
        self.content_type = kind.partition(";")[0].strip().lower()
        self.content_length = None
        self.content = StreamReader(cast("Any", Protocol()), 2**16, loop=LOOP)
        for at in range(0, len(body), step):
            self.content.feed_data(body[at : at + step])
        self.content.feed_eof()


class Counted:
    def receive(self, num_bytes: int) -> None: ...


async def _upload(kind: str, body: bytes, step: int) -> None:
    with empty_folder() as folder, empty_folder() as aside:
        upload = Upload(folder, aside / "archive", MAX_BYTES, 60.0, cast("Any", Counted()))
        await _receive(cast(web.Request, Request(kind, body, step)), upload)
        _typed("acme/a", check_fields(UploadFields, upload.fields))
        if upload.archive.exists():
            _unpack(upload)
        assert {file.name for file in folder.iterdir()} <= set(FILE_NAMES)
        assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES


def fuzz(data: bytes) -> None:
    """The first byte says how the body is cut; a line with its Content-Type; the body."""
    kind, _, body = data[1:].partition(b"\n")
    text = kind.decode("latin-1")
    if not text.isprintable():  # aiohttp lets no such header in
        return
    LOOP.run_until_complete(_upload(text, body, 1 + (data or b"\0")[0]))


def _form(parts: dict[str, bytes], boundary: bytes = b"b", head: bytes = b"") -> bytes:
    pieces = [
        b'--%s\r\nContent-Disposition: form-data; name="%s"; filename="%s"\r\n%s\r\n%s\r\n'
        % (boundary, name.encode(), name.encode(), head, content)
        for name, content in parts.items()
    ]
    return b"".join(pieces) + b"--%s--\r\n" % boundary


def seeds() -> Iterator[bytes]:
    kind = b"multipart/form-data; boundary=b\n"
    yield b"\xff" + kind + _form(FILES)
    yield b"\x03" + kind + _form({**FILES, "tokenizer.json": b"{}"}, head=b"Content-Type: application/json\r\n")
    yield b"\xff" + kind + _form({"a.tar": tar({**FILES, **SIDES}, "w:gz")})
    yield b"\xff" + kind + _form({"a.zip": zipped(FILES)}, head=b"Content-Transfer-Encoding: binary\r\n")
    field = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    yield b"\x20" + kind + field % (b"pin", b"true") + field % (b"metadata", b'{"a": "b"}') + _form(FILES)
    yield b"\x20" + kind + field % (b"pin", b"true") + field % (b"pin", b"false") + _form(FILES)
    yield b"\x20" + kind + _form(FILES, head=b"Content-Encoding: gzip\r\n")
    yield b"\x20" + kind + _form(FILES, head=b"Content-Transfer-Encoding: base64\r\n")
    yield b"\x20" + kind + _form(FILES, head=b"Content-Type: multipart/mixed; boundary=c\r\n")
    yield b"\x20application/x-tar\n" + tar(FILES)
    yield b"\x20application/json\n{}"


_LINES = (
    b"Content-Length: 3",
    b"Content-Encoding: deflate",
    b"Content-Transfer-Encoding: quoted-printable",
    b"X: \xff",
    b"",
    b'Content-Disposition: form-data; name="metadata"',
    b"Content-Type: text/plain; charset=utf-7",
    b"--b",
    b"--b--",
    b"--",
    b"Content-Disposition: form-data; name*=utf-8''pin; filename*=utf-8''..%2Fadapter_config.json",
    b"Content-Disposition: x",
    b'Content-Disposition: form-data; name="adapter_model.safetensors"; filename="../../a"',
    b" folded",
    b":",
    b"a" * 9000,
)


def mutate(data: bytes, max_bytes: int, seed: int, mutate_bytes: Bytes) -> bytes:
    """Lines of the body, or any byte."""
    rng = random.Random(seed)
    if rng.random() < 0.4:
        return mutate_bytes(data, max_bytes)
    lines = data.split(b"\r\n")
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randrange(len(lines))
        match rng.randrange(4):
            case 0:
                lines.insert(at, rng.choice(_LINES))
            case 1:
                lines.insert(at, rng.choice(lines))
            case 2 if len(lines) > 1:
                del lines[at]
            case _:
                lines[at] = rng.choice(_LINES)
    return b"\r\n".join(lines)[:max_bytes]
