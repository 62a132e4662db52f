"""PUT /admin/adapters/{id}: the two files as multipart (a tokenizer.json, if it adds tokens, and the chat template
beside them), or a tar, tar.gz or zip of them. Streamed to disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from aiohttp import BodyPartReader, MultipartReader, StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError

from lora_serve.adapters.archives.unpacking import unpack
from lora_serve.adapters.checkpoint.content import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SIDE_NAMES,
    TEMPLATE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
)
from lora_serve.adapters.http_content import CONTENT_DIGEST
from lora_serve.adapters.sources.base import RegistrationProgress, Stage, Staged
from lora_serve.adapters.stores.files import remove_folder
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InvalidRequestError,
    PayloadTooLargeError,
    SlowRequestError,
    UnsupportedMediaError,
)
from lora_serve.server.admin.protocol import RegisterFields, UploadFields
from lora_serve.server.admin.registration import answer_registration, registration_for
from lora_serve.server.context import CONTEXT
from lora_serve.server.json_body import CHUNK_BYTES, BodyStream, check_fields, parse_json, read_query
from lora_serve.server.route import OtherBody
from lora_serve.server.services import SERVICES, Services

MAX_PARTS = 16
TIMELY_BYTES = 4096  # at least as many must come within every --body-timeout
MAX_FIELD_BYTES = 2**17
ARCHIVE_ENDINGS = (".tar", ".tar.gz", ".tgz", ".zip")
UNWRITABLE = "The adapter store cannot be written at present."
UNREADABLE = "The upload cannot be read; it is cut short or badly encoded."
FILE_NAMES = (CONFIG_NAME, WEIGHTS_NAME, *SIDE_NAMES)
BODY = OtherBody(
    content={
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    CONFIG_NAME: {"type": "string", "contentMediaType": "application/json"},
                    WEIGHTS_NAME: {"type": "string", "contentMediaType": "application/octet-stream"},
                    TOKENIZER_NAME: {"type": "string", "contentMediaType": "application/json"},
                    TOKENIZER_CONFIG_NAME: {"type": "string", "contentMediaType": "application/json"},
                    GENERATION_CONFIG_NAME: {"type": "string", "contentMediaType": "application/json"},
                    TEMPLATE_NAME: {"type": "string", "contentMediaType": "text/plain"},
                    **UploadFields.model_json_schema()["properties"],
                },
                "required": [CONFIG_NAME, WEIGHTS_NAME],
            }
        },
        **{
            kind: {"schema": {"type": "string", "contentMediaType": kind}}
            for kind in ("application/x-tar", "application/gzip", "application/zip")
        },
    },
    headers=(
        {
            "name": CONTENT_DIGEST,
            "in": "header",
            "description": "RFC 9530, of the body as it is sent: sha-256, sha-512; a body that it does not fit is "
            "refused",
            "schema": {"type": "string"},
        },
    ),
)


@dataclass(slots=True)
class Upload:
    """An upload under way: its files, its limits and what came so far."""

    folder: Path  # for the files
    archive: Path  # for an archive of them
    max_bytes: int
    timeout: float  # seconds for each TIMELY_BYTES
    progress: RegistrationProgress
    deadline: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))  # moved on with every chunk
    num_bytes: int = 0
    num_timely: int = 0  # of num_received, when the deadline was moved on last
    num_received: int = 0  # of the whole body, with the bytes between its files, as sent or decoded
    is_handed_over: bool = False  # the registration removes `folder`, perhaps after the request
    fields: dict[str, Any] = field(default_factory=dict)
    unpacking: Future[None] | None = None  # on a thread, which a client that leaves does not stop

    def hand_over(self) -> None:
        """Leave `folder` to the registration."""
        self.is_handed_over = True

    def receive(self, num_bytes: int) -> None:
        """Note how many bytes of the body came in all. Raises PayloadTooLargeError."""
        self.num_received = num_bytes
        self.progress.receive(self.num_received)
        if self.num_received - self.num_timely >= TIMELY_BYTES:  # an upload that comes in drops ends
            self.num_timely = self.num_received
            self.deadline.reschedule(asyncio.get_running_loop().time() + self.timeout)
        self.check(self.num_received - MAX_PARTS * MAX_FIELD_BYTES)

    def count(self, chunk: bytes) -> None:
        """Count bytes of files. Raises PayloadTooLargeError."""
        self.num_bytes += len(chunk)
        self.check(self.num_bytes)

    def check(self, num_bytes: int) -> None:
        """Raises PayloadTooLargeError."""
        if num_bytes > self.max_bytes:
            raise PayloadTooLargeError(f"The upload is larger than {self.max_bytes} bytes (--max-upload-size).")


async def upload_adapter(request: web.Request) -> web.StreamResponse:
    """Upload an adapter.

    201 with the card; 200 if this very content was there already. `tenant`, `pin`, `metadata`, `allow_noop` and
    `activate` are form fields or query parameters.
    """
    services, caller = request.app[SERVICES], request[CONTEXT].known_caller
    wanted = registration_for(services, caller, RegisterFields(id=request.match_info["id"], source="upload"))
    query = read_query(request)
    services.registrations.check(wanted.owner_in(services.catalog.snapshot))
    await services.quotas.begin_registration(caller)
    progress = RegistrationProgress(wanted.id, caller.scope, Stage.RECEIVING, total_bytes=request.content_length)
    with services.registering.listed(progress):
        async with _staged(services, progress) as upload:
            upload.fields.update(query)
            await _receive(request, upload)
            request[CONTEXT].enter_again()
            fields = _typed(wanted.id, check_fields(UploadFields, upload.fields))
            registration = registration_for(services, request[CONTEXT].known_caller, fields)
            if upload.archive.exists():
                owner = registration.owner_in(services.catalog.snapshot)
                upload.unpacking = services.registrations.submit(lambda: _unpack(upload), owner)
                await asyncio.wrap_future(upload.unpacking)
            uploaded = Staged(upload.folder, registration.source)
            return await answer_registration(request, registration, progress, uploaded, upload.hand_over)


@asynccontextmanager
async def _staged(services: Services, progress: RegistrationProgress) -> AsyncIterator[Upload]:
    """Private folders, gone afterwards. Made and given up without an `await`, at which a cancellation could come."""
    try:
        folder, aside = services.registry.new_folder(), services.registry.new_folder()
    except OSError as error:
        raise AdapterUnavailableError(UNWRITABLE) from error
    timeout = services.config.body_timeout
    upload = Upload(folder, aside / "archive", services.adapter_config.max_upload_size, timeout, progress)
    try:
        yield upload
    except ConnectionError:
        raise
    except OSError as error:
        raise AdapterUnavailableError(UNWRITABLE) from error
    finally:
        leftovers = [aside] if upload.is_handed_over else [aside, folder]
        services.background.start(_remove(leftovers, upload.unpacking), "removing an upload's files")


def _unpack(upload: Upload) -> None:
    if any(upload.folder.iterdir()):
        raise InvalidRequestError("The upload holds an archive and files beside it: send one or the other.")
    unpack(upload.archive, upload.folder, upload.max_bytes)


async def _remove(folders: list[Path], unpacking: Future[None] | None) -> None:
    """Remove folders once nothing is unpacked into them any more."""
    if unpacking is not None:
        await asyncio.gather(asyncio.wrap_future(unpacking), return_exceptions=True)
    for folder in folders:
        await asyncio.to_thread(remove_folder, folder)


async def _receive(request: web.Request, upload: Upload) -> None:
    upload.check((request.content_length or 0) - MAX_PARTS * MAX_FIELD_BYTES)
    try:
        async with asyncio.timeout(upload.timeout) as upload.deadline:
            await _receive_content(request, upload)
    except TimeoutError:
        raise SlowRequestError(f"Hardly a byte of the upload came for {upload.timeout:g} s (--body-timeout).") from None
    except (ValueError, web.RequestPayloadError, HttpProcessingError) as error:
        raise InvalidRequestError(UNREADABLE) from error


async def _receive_content(request: web.Request, upload: Upload) -> None:
    body = BodyStream(request, upload.receive)
    if request.content_type.startswith("multipart/"):
        await _receive_parts(MultipartReader(request.headers, cast(StreamReader, body)), upload)
        async for _ in body.chunks():  # to its end, where the digests are checked
            pass
    elif request.content_type.endswith("json"):
        raise UnsupportedMediaError("Upload multipart/form-data, or a tar, tar.gz or zip as it is.")
    else:  # an archive; its own first bytes say which, as clients rarely send the right type
        await _write(upload.archive, body.chunks(), upload)


async def _receive_parts(reader: MultipartReader, upload: Upload) -> None:
    for _ in range(MAX_PARTS):
        part = await _next_part(reader)
        if part is None:
            return
        if not isinstance(part, BodyPartReader):
            raise InvalidRequestError("A part of the upload is itself multipart.")
        await _receive_part(part, upload)
    raise InvalidRequestError(f"The upload has more than {MAX_PARTS} parts.")


async def _next_part(reader: MultipartReader) -> MultipartReader | BodyPartReader | None:
    """The next part; None at the end. Raises InvalidRequestError, ValueError, HttpProcessingError."""
    try:
        return await reader.next()
    except (AssertionError, RuntimeError) as error:  # of the reader, about a first part named _charset_
        raise InvalidRequestError(UNREADABLE) from error


async def _receive_part(part: BodyPartReader, upload: Upload) -> None:
    name = (part.filename or part.name or "").replace("\\", "/").rpartition("/")[2]
    target = name if name in FILE_NAMES else part.name
    if target in FILE_NAMES:
        await _write(upload.folder / target, _chunks(part), upload)
    elif name.endswith(ARCHIVE_ENDINGS):
        await _write(upload.archive, _chunks(part), upload)
    elif part.name in UploadFields.model_fields and part.filename is None:
        if upload.fields.setdefault(part.name, text := await _read_text(part)) != text:
            raise InvalidRequestError(f"The upload says `{part.name}` twice, and not the same.", param=part.name)
    else:
        raise InvalidRequestError(
            f"The upload's part {name[:100]!r} is not known: send {CONFIG_NAME} and {WEIGHTS_NAME}, or an archive."
        )


async def _chunks(part: BodyPartReader) -> AsyncIterator[bytes]:
    while chunk := await part.read_chunk(CHUNK_BYTES):
        yield chunk


async def _read_text(part: BodyPartReader) -> str:
    text = b""
    async for chunk in _chunks(part):
        text += chunk
        if len(text) > MAX_FIELD_BYTES:
            raise PayloadTooLargeError(f"The field `{part.name}` is larger than {MAX_FIELD_BYTES} bytes.")
    return text.decode("utf-8")


async def _write(path: Path, chunks: AsyncIterator[bytes], upload: Upload) -> None:
    """Write a file of a fixed name. Raises InvalidRequestError if the name comes twice."""
    with _new_file(path) as file:
        async for chunk in chunks:
            upload.count(chunk)
            await asyncio.to_thread(file.write, chunk)


def _new_file(path: Path) -> BinaryIO:
    """A new file, opened here and not in a thread: a cancellation in between would leave it open."""
    try:
        return path.open("xb")
    except FileExistsError:
        raise InvalidRequestError(f"The upload holds {path.name} twice.") from None


def _typed(name: str, fields: UploadFields) -> RegisterFields:
    """The fields as a JSON body would have them. Raises InvalidRequestError."""
    rest = fields.model_dump(exclude_none=True)
    if fields.metadata is not None:
        rest["metadata"] = parse_json(fields.metadata.encode("utf-8", "surrogatepass"), "metadata")
    return check_fields(RegisterFields, {"id": name, "source": "upload", **rest})
