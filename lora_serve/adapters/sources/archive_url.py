"""A tar, tar.gz or zip behind an http(s) URL that begins as --adapter-url allows.

Uses the standard library's client: it blocks, as this floor does, and follows no redirects, proxies or cookies by
itself, so that every hop is checked here.
"""

from __future__ import annotations

import functools
import http.client
import logging
import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from lora_serve.adapters.archives.unpacking import unpack
from lora_serve.adapters.sources.answer_body import content_of
from lora_serve.adapters.sources.base import refuse
from lora_serve.adapters.sources.inner_addresses import connect_outward
from lora_serve.adapters.sources.intake import CHUNK_BYTES, Intake, Progress
from lora_serve.adapters.sources.timeouts import DEFAULT_TIMEOUTS, TimedSocket, Timeouts, TransferClock
from lora_serve.adapters.sources.url_rules import Url, join_url, parse_url
from lora_serve.adapters.stores.files import scratch_folder
from lora_serve.core.errors import AdapterUnavailableError, ConfigError, InvalidRequestError

MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"User-Agent": "lora-serve", "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
_log = logging.getLogger(__name__)


class ArchiveUrlSource:
    """See AdapterSource. `source`: an http(s) URL; its query may hold a signature, which is not kept."""

    def __init__(
        self, prefixes: Sequence[str], timeouts: Timeouts = DEFAULT_TIMEOUTS, allow_inner: bool = False
    ) -> None:
        """`allow_inner`: see `connect_outward`. Raises ConfigError."""
        self._allowed = tuple(map(_prefix, prefixes))
        self._allow_inner = allow_inner
        self._timeouts = timeouts

    @functools.cached_property
    def _tls(self) -> ssl.SSLContext:
        """Made when first needed: reading the system's certificates takes 20 ms of a start."""
        return ssl.create_default_context()

    def fetch(self, source: str, target: Path, limit: int, progress: Progress) -> str:
        url = self._checked(source)
        with scratch_folder(target.parent) as scratch:
            archive = scratch / "archive"
            self._download(url, archive, Intake(scratch, limit, progress))
            unpack(archive, target, limit)
        return str(url)

    def _checked(self, source: str) -> Url:
        if not self._allowed:
            raise refuse("URLs are not taken: start the server with --adapter-url PREFIX to allow some.")
        try:
            url = parse_url(source)
        except InvalidRequestError as error:
            raise refuse(f"`source`: {error}.") from None
        return self._allow(url)

    def _allow(self, url: Url) -> Url:
        if not any(url.is_below(prefix) for prefix in self._allowed):
            raise refuse("The URL does not lie below an allowed one (--adapter-url).")
        return url

    def _download(self, url: Url, archive: Path, intake: Intake) -> None:
        clock = TransferClock(self._timeouts)
        for _ in range(MAX_REDIRECTS + 1):
            with self._answer(url, clock) as answer:
                if answer.status not in _REDIRECTS:
                    _check_status(answer.status)
                    _receive(answer, url, archive, intake)
                    return
                url = self._next(url, answer.getheader("Location"))
        raise refuse(f"The URL leads over more than {MAX_REDIRECTS} redirects.")

    def _next(self, url: Url, location: str | None) -> Url:
        try:
            return self._allow(join_url(url, location or ""))
        except InvalidRequestError as error:
            raise refuse(f"The URL redirects to where it may not: {error}") from None

    @contextmanager
    def _answer(self, url: Url, clock: TransferClock) -> Iterator[http.client.HTTPResponse]:
        """The response to a GET of `url`, its body not read yet."""
        connection: Any = self._connection(url)
        connection.response_class = lambda sock, *a, **k: http.client.HTTPResponse(_timed(sock, clock), *a, **k)
        clock.begin_headers()
        try:
            connection.request("GET", url.target, headers=_HEADERS)
            answer = connection.getresponse()
            clock.begin_body()
            with answer:
                yield answer
        except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            raise _unreachable(error) from None
        finally:
            connection.close()

    def _connection(self, url: Url) -> http.client.HTTPConnection:
        host = url.host.strip("[]")
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = kind(host, url.port)
        try:
            connection.sock = connect_outward(host, url.port, self._timeouts.idle, self._allow_inner)
            if url.scheme == "https":
                connection.sock = self._tls.wrap_socket(connection.sock, server_hostname=host)
        except (OSError, UnicodeError) as error:  # also an unresolved name, and one that is none
            connection.close()
            raise _unreachable(error) from None
        return connection


def _timed(sock: socket.socket, clock: TransferClock) -> socket.socket:
    return cast("socket.socket", TimedSocket(sock, clock))


def _receive(answer: http.client.HTTPResponse, url: Url, archive: Path, intake: Intake) -> None:
    expected = answer.length  # None: chunked, or until the connection ends; the archive has its own end
    intake.check_size(expected or 0)
    intake.write(archive, content_of(_headers(answer), url.host, _chunks(answer, expected)))


def _headers(answer: http.client.HTTPResponse) -> dict[str, str]:
    """The headers by lower-case name, repeated ones joined (RFC 9110, 5.3)."""
    found: dict[str, str] = {}
    for name, value in answer.getheaders():
        key = name.lower()
        found[key] = f"{found[key]}, {value}" if key in found else value
    return found


def _chunks(answer: http.client.HTTPResponse, expected: int | None) -> Iterator[bytes]:
    """The body. Raises AdapterUnavailableError if it is shorter than its declared length."""
    left = expected
    while chunk := answer.read1(CHUNK_BYTES):
        left = None if left is None else left - len(chunk)
        yield chunk
    if left:
        raise AdapterUnavailableError("The URL's answer was cut short; try again.")


def _check_status(status: int) -> None:
    if status == 200:
        return
    if status >= 500 or status in (408, 425, 429):
        raise AdapterUnavailableError(f"The URL answers with status {status} at present.")
    raise refuse(f"The URL answers with status {status}.")


def _prefix(text: str) -> Url:
    try:
        url = parse_url(text)
    except InvalidRequestError as error:
        raise ConfigError(f"--adapter-url {text[:200]}: {error}") from None
    if url.query:
        raise ConfigError(f"--adapter-url {text[:200]}: a beginning has no query")
    return url


def _unreachable(error: Exception) -> AdapterUnavailableError:
    _log.warning("adapter URL: %r", error)
    return AdapterUnavailableError(f"The URL cannot be reached, or broke off ({type(error).__name__}); try again.")
