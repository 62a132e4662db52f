"""One server's admin API over HTTP: calls in, JSON or a CommandError out; the key that is sent with them.

An upload's files are sent as multipart, streamed from disk: read once for the digest, then once for the socket.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlencode

import aiohttp

from lora_serve.adapters.http_content import CONTENT_DIGEST, content_digest
from lora_serve.commands.flags import DEFAULT_STORE
from lora_serve.commands.output import CommandError, ExitCode, Output, plain
from lora_serve.core.errors import ConfigError
from lora_serve.core.process import is_this_machine, store_of
from lora_serve.tenancy.admin_key import FILE_NAME

CONNECT_SECONDS = 10.0
ANSWERS = {"id", "data", "alias", "name", "tenant"}  # every answer of the admin API has one of these fields
PREFIX = "The adapter cannot be served: "  # what a server's InvalidAdapterError begins with; its reasons follow
KEY_HINT = "give the server's admin key by --admin-key, LORA_SERVE_ADMIN_KEY or --store"
URL_HINT = "another server is named by --url or LORA_SERVE_URL"

if TYPE_CHECKING:
    from aiohttp.connector import AddrInfoType


@dataclass(frozen=True, slots=True)
class AdminReply:
    """A successful answer: `status` below 300, `data` its JSON."""

    status: int
    data: dict[str, Any]


@dataclass(slots=True)
class AdminClient:
    """An async context manager. `timeout`: seconds from the last byte sent to the answer's next byte."""

    url: str
    admin_key: str | None = field(repr=False)
    timeout: float
    note: Callable[[str], None] = field(default=lambda line: None, repr=False)  # between two attempts
    is_asked: bool = False  # a request was sent, or tried
    _session: aiohttp.ClientSession | None = None
    _sockets: list[socket.socket] = field(default_factory=list, repr=False)

    async def __aenter__(self) -> Self:
        headers = {} if self.admin_key is None else {"Authorization": f"Bearer {self.admin_key}"}
        connect = min(self.timeout, CONNECT_SECONDS)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=self.timeout)
        connector = aiohttp.TCPConnector(socket_factory=self._new_socket)
        self._session = aiohttp.ClientSession(headers=headers, timeout=limits, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        for one in self._sockets:
            with suppress(OSError):  # most are closed by now
                one.shutdown(socket.SHUT_RDWR)  # else what was not sent yet would keep it open
        await self._session.close()

    def _new_socket(self, address: AddrInfoType) -> socket.socket:
        family, kind, protocol = address[:3]
        made = socket.socket(family, kind, protocol)
        self._sockets.append(made)
        return made

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: dict[str, Any] | None = None,
        form: aiohttp.MultipartWriter | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AdminReply:
        """Sends one request; a form is not sent again after a failure. Raises CommandError."""
        url = self.url + path + (f"?{urlencode(query)}" if query else "")
        if form is not None:
            return await self._call(method, url, data=form, headers=headers)
        return await self.patiently(lambda: self._call(method, url, json=body, headers=headers))

    async def patiently(self, attempt: Callable[[], Awaitable[AdminReply]]) -> AdminReply:
        """Repeats a call that was answered with 429 and Retry-After, for no longer than the client's timeout."""
        left = self.timeout
        while True:
            try:
                return await attempt()
            except CommandError as error:
                if error.retry_after is None or error.retry_after > left:
                    raise
                left -= error.retry_after
                self.note(f"{error.lines[0]} Waiting for {error.retry_after:g} s.")
                await asyncio.sleep(error.retry_after)

    async def _call(self, method: str, url: str, **options: Any) -> AdminReply:
        assert self._session is not None
        self.is_asked = True
        try:
            async with self._session.request(method, url, allow_redirects=False, **options) as answer:
                return self._reply(answer, await answer.read())
        except TimeoutError as error:
            raise self.no_answer() from error
        except aiohttp.ClientConnectorError as error:
            raise self._not_there(error) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise self._unreachable(str(error) or type(error).__name__) from error

    def no_answer(self) -> CommandError:
        return self._unreachable(f"no answer within {self.timeout:g} s (--timeout)")

    def _reply(self, answer: aiohttp.ClientResponse, text: bytes) -> AdminReply:
        try:
            data = json.loads(text)
        except ValueError:
            data = None
        if answer.status >= 400:
            raise refusal(self.url, answer.status, data, answer.headers)
        if answer.status >= 300 or not (isinstance(data, dict) and ANSWERS & data.keys()):
            raise self._unreachable(f"what answers there ({answer.status}) is not lora-serve's admin API")
        return AdminReply(answer.status, data)

    def _not_there(self, error: aiohttp.ClientConnectorError) -> CommandError:
        if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
            return self._unreachable(str(error))
        reason = error.strerror or str(error.os_error)
        return CommandError(
            ExitCode.UNREACHABLE, f"cannot connect to {self.url}: is the server running? ({reason})", URL_HINT
        )

    def _unreachable(self, reason: str) -> CommandError:
        return CommandError(ExitCode.UNREACHABLE, f"{self.url} cannot be reached: {reason}")


def refusal(url: str, status: int, body: Any, headers: Mapping[str, str]) -> CommandError:
    """The error for the answer of 400 and above of the server at `url`; `body` is its JSON, None if it sent none."""
    first, *rest = _lines(status, body)
    lines = [f"{url}: {first}", *rest]
    if status == 401 or (status == 403 and "needs a key" in first):
        lines.append(KEY_HINT)
    if wait := headers.get("Retry-After"):
        lines.append(f"try again in {wait[:20]} s (Retry-After)")
    retry_after = float(wait) if status == 429 and wait and wait.isdecimal() and not _is_wrong_key(body) else None
    codes = {404: ExitCode.NOT_FOUND, 503: ExitCode.UNAVAILABLE}
    return CommandError(codes.get(status, ExitCode.REFUSED), *lines, retry_after=retry_after)


def _is_wrong_key(body: Any) -> bool:
    """True for a wrong admin key, which no waiting mends."""
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and error.get("code") == "invalid_api_key"


def _lines(status: int, body: Any) -> list[str]:
    """The message; an adapter's reasons one per line."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    if not isinstance(message, str):
        return [f"the server answered {status}"]
    if not message.startswith(PREFIX):
        return message.splitlines() or [f"the server answered {status}"]
    return [PREFIX.strip(), *(f"- {reason}" for reason in message.removeprefix(PREFIX).split("; "))]


def find_admin_key(given: str | None, store: str | None, url: str) -> str | None:
    """The admin key, or None: the server then answers that it needs one.

    Without a named store it is the key file of the running server that listens at `url`, or else, if `url` is this
    machine's, of the environment's or the default store: no key file is read for another machine. Raises ConfigError,
    which never shows the key.
    """
    key = given if given is not None else os.environ.get("LORA_SERVE_ADMIN_KEY")
    if not key:
        key = _read(store, url)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigError("--admin-key: expected printable ASCII characters; the one given has others")
    return key


def _read(store: str | None, url: str) -> str | None:
    folder = Path(store) if store else store_of(url)
    if folder is None:
        if not is_this_machine(url):
            return None
        folder = Path(os.environ.get("LORA_SERVE_STORE") or DEFAULT_STORE)
    try:
        return (folder / FILE_NAME).read_text("ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


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


async def send_files(
    client: AdminClient, path: str, files: dict[str, Path], texts: dict[str, str], output: Output
) -> AdminReply:
    """Sends files and form fields by PUT, with a progress bar and a Content-Digest that the server checks.

    Raises ConfigError, CommandError.

    There is no limit to the whole time; the upload is given up when nothing has moved for the client's timeout.
    """
    return await client.patiently(lambda: _send(client, path, files, texts, output))


async def _send(
    client: AdminClient, path: str, files: dict[str, Path], texts: dict[str, str], output: Output
) -> AdminReply:
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
    form = aiohttp.MultipartWriter("form-data")
    for name, text in texts.items():
        form.append(text).set_content_disposition("form-data", name=name)
    for name, file in files:
        part = form.append(file, {"Content-Type": "application/octet-stream"})
        part.set_content_disposition("form-data", name="files", filename=name)
    return form
