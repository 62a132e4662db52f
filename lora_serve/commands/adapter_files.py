"""Sends an upload's files as multipart, streamed from disk: read once for the digest, then once for the socket."""

from __future__ import annotations

import asyncio
import hashlib
import io
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from lora_serve.adapters.http_content import CONTENT_DIGEST, content_digest
from lora_serve.commands.output import Output, plain
from lora_serve.core.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

    from lora_serve.commands.admin_client import AdminClient, Reply

REQUIRED = ("adapter_config.json", "adapter_model.safetensors")
OPTIONAL = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
ARCHIVE_ENDINGS = (".tar", ".tar.gz", ".tgz", ".zip")


class CountedFile(io.FileIO):
    """A file that calls `on_read` with the bytes of each read, on a thread of the HTTP client."""

    def __init__(self, path: Path, on_read: Callable[[int], None]) -> None:
        super().__init__(path, "rb")
        self.on_read = on_read

    def read(self, size: int | None = -1, /) -> bytes:
        taken = super().read(-1 if size is None else size)
        self.on_read(len(taken))
        return taken


class IdleTimeout:
    """Cancels the block with TimeoutError `seconds` after it was last renewed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._limit = asyncio.timeout(seconds)
        self._is_over = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        await self._limit.__aexit__(kind, error, trace)

    def renew(self) -> None:
        """Starts the time anew; from any thread."""
        self._loop.call_soon_threadsafe(self._renew)

    def _renew(self) -> None:
        if not self._is_over and not self._limit.expired():
            self._limit.reschedule(self._loop.time() + self._seconds)


def files_of(path: Path) -> dict[str, Path]:
    """Name in the form -> file: a folder's files, or one archive. Raises ConfigError."""
    if path.is_file():
        # The server looks at an archive's first bytes; the ending only says that it is one.
        return {"adapter" + next(filter(path.name.endswith, ARCHIVE_ENDINGS), ".tar"): path}
    if not path.is_dir():
        raise ConfigError(f"PATH: {path} is neither a folder nor an archive")
    if missing := [name for name in REQUIRED if not (path / name).is_file()]:
        is_pickle = (path / "adapter_model.bin").is_file()
        why = ": adapter_model.bin is a pickle, save the adapter as safetensors" if is_pickle else ""
        raise ConfigError(f"PATH: {path} holds no {' and no '.join(missing)}{why}")
    return {name: path / name for name in (*REQUIRED, *OPTIONAL) if (path / name).is_file()}


async def send_files(
    client: AdminClient, path: str, files: dict[str, Path], texts: dict[str, str], output: Output
) -> Reply:
    """Sends files and form fields by PUT, with a progress bar and a Content-Digest that the server checks.

    Raises ConfigError, CommandError.

    There is no limit to the whole time; the upload is given up when nothing has moved for the client's timeout.
    """
    return await client.patiently(lambda: _send(client, path, files, texts, output))


async def _send(client: AdminClient, path: str, files: dict[str, Path], texts: dict[str, str], output: Output) -> Reply:
    try:
        async with IdleTimeout(client.timeout) as timeout, AsyncExitStack() as stack:
            opened = {name: stack.enter_context(_open(file, lambda _: timeout.renew())) for name, file in files.items()}
            form = _form(opened.items(), texts)
            headers = {CONTENT_DIGEST: await _digest(form)}
            progress = stack.enter_context(output.progress())
            total = sum(file.stat().st_size for file in files.values())
            task = progress.add_task(plain(path.rpartition("/")[2]), total=total)

            def on_read(num_bytes: int) -> None:
                progress.advance(task, num_bytes)
                timeout.renew()

            for file in opened.values():
                file.on_read = on_read
            return await client.call("PUT", path, form=form, headers=headers)
    except TimeoutError as error:
        raise client.no_answer() from error


async def _digest(form: aiohttp.MultipartWriter) -> str:
    """The digest of the whole body as it will be sent."""
    hashing = _Hashing()
    await form.write(cast("aiohttp.abc.AbstractStreamWriter", hashing))
    return content_digest(hashing.content)


class _Hashing:
    """A stream writer that hashes a body instead of sending it."""

    def __init__(self) -> None:
        self.content = hashlib.sha256()

    async def write(self, chunk: bytes) -> None:
        self.content.update(chunk)


def _open(path: Path, on_read: Callable[[int], None]) -> CountedFile:
    try:
        return CountedFile(path, on_read)
    except OSError as error:
        raise ConfigError(f"PATH: {path} cannot be read: {error.strerror}") from error


def _form(files: Iterable[tuple[str, CountedFile]], texts: dict[str, str]) -> aiohttp.MultipartWriter:
    import aiohttp

    form = aiohttp.MultipartWriter("form-data")
    for name, text in texts.items():
        form.append(text).set_content_disposition("form-data", name=name)
    for name, file in files:
        part = form.append(file, {"Content-Type": "application/octet-stream"})
        part.set_content_disposition("form-data", name="files", filename=name)
    return form
