"""A tar, tar.gz or zip behind an http(s) URL that begins as --adapter-url allows.

Uses the standard library's client: it blocks, as this floor does, and follows no redirects, proxies or cookies by
itself, so that every hop is checked here.
"""

from __future__ import annotations

import functools
import http.client
import logging
import re
import socket
import ssl
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, unquote_to_bytes, urljoin, urlsplit

from lora_serve.adapters.archives.unpacking import unpack
from lora_serve.adapters.http_content import Decoder, ExpectedDigests, decoder_for
from lora_serve.adapters.sources.base import CHUNK_BYTES, Checksum, Intake, OnBytes, checked, of_base64, of_s3, refuse
from lora_serve.adapters.sources.connections import (
    DEFAULT_TIMEOUTS,
    TimedSocket,
    Timeouts,
    TransferClock,
    connect_outward,
)
from lora_serve.adapters.stores.files import scratch_folder
from lora_serve.core.errors import (
    AdapterUnavailableError,
    ConfigError,
    InvalidAdapterError,
    InvalidRequestError,
    UnsupportedMediaError,
)

WHAT = "The URL's answer"
_INSTANCE_DIGESTS = {"md5": "md5", "sha": "sha1", "sha-256": "sha256", "sha-512": "sha512"}  # RFC 3230, 5843
_STORED_AS_SENT = ("", "aws-chunked")  # the second: set at uploads to S3; some stores keep it
_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
_PLAIN = re.compile(r"[!-\[\]-~]+")  # printable ASCII, no space, no backslash
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_ESCAPED_AGAIN = re.compile(r"%(2e|2f|5c|25|00)", re.IGNORECASE)
MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_HEADERS = {"User-Agent": "lora-serve", "Accept": "*/*", "Accept-Encoding": "identity", "Connection": "close"}
_log = logging.getLogger(__name__)


def content_of(headers: Mapping[str, str], host: str, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The decoded content; `headers` with lower-case names, repeated ones joined.

    Raises InvalidAdapterError if a checksum differs, InvalidRequestError for an unknown coding.
    """
    decoder = _decoder(headers)
    for checksum in dict.fromkeys(_said(headers, host)):
        chunks = checked(chunks, 0, checksum, "the URL's answer")
    try:
        for chunk in _digested(headers, chunks):
            yield from decoder.decode(chunk)
        decoder.finish()
    except InvalidRequestError as error:
        raise InvalidAdapterError([f"the URL's answer came damaged: {error}"]) from None


def _decoder(headers: Mapping[str, str]) -> Decoder:
    try:
        return decoder_for(_coding(headers.get("content-encoding", "")), WHAT)
    except UnsupportedMediaError as error:
        raise refuse(str(error)) from None


def _coding(header: str) -> str:
    names = [name.strip().lower() for name in header.split(",")]
    return ", ".join(name for name in names if name not in _STORED_AS_SENT)


def _said(headers: Mapping[str, str], host: str) -> Iterator[Checksum]:
    """The checksums in the headers; those that cannot be read are ignored."""
    found = [of_base64("md5", headers.get("content-md5"))]
    found += _listed(headers.get("digest", ""), _INSTANCE_DIGESTS)
    if _is_as_google_stores_it(headers):
        found += _listed(headers.get("x-goog-hash", ""), {"md5": "md5"})
    if headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT":
        found += [of_base64(kind, headers.get(f"x-amz-checksum-{kind}")) for kind in ("sha256", "crc32")]
    if "x-amz-request-id" in headers:
        found.append(of_s3(headers, host))
    yield from (checksum for checksum in found if checksum is not None)


def _listed(header: str, kinds: Mapping[str, str]) -> list[Checksum | None]:
    """The checksums of `name=BASE64, ...`; `kinds`: hashlib's name for each."""
    members = [member.strip().partition("=") for member in header.split(",")]
    return [of_base64(kinds[name.lower()], value) for name, _, value in members if name.lower() in kinds]


def _is_as_google_stores_it(headers: Mapping[str, str]) -> bool:
    """Google's hash is of the stored object, whose coding differs after transcoding."""
    stored = headers.get("x-goog-stored-content-encoding", headers.get("content-encoding", ""))
    return _plain(stored) == _plain(headers.get("content-encoding", ""))


def _plain(coding: str) -> str:
    return coding.strip().lower() or "identity"


def _digested(headers: Mapping[str, str], chunks: Iterable[bytes]) -> Iterator[bytes]:
    digests = [_digests(headers.get(name)) for name in ("content-digest", "repr-digest")]
    for chunk in chunks:
        for digest in digests:
            digest.update(chunk)
        yield chunk
    for digest in digests:
        digest.check()


def _digests(header: str | None) -> ExpectedDigests:
    try:
        return ExpectedDigests(header)
    except InvalidRequestError:  # a header of another meaning
        return ExpectedDigests(None)


@dataclass(frozen=True, slots=True)
class Url:
    """The parts of a request; `path` begins with "/" and is percent-encoded in one way only."""

    scheme: str
    host: str
    port: int
    path: str
    query: str

    def __str__(self) -> str:
        """The URL without its query, which may be a signature."""
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{self.host}{port}{self.path}"

    @property
    def target(self) -> str:
        """Path and query for the request line."""
        return f"{self.path}?{self.query}" if self.query else self.path

    def is_below(self, prefix: Url) -> bool:
        """True if `prefix` allows the URL: same scheme, host and port, and its path up to a "/"."""
        if (self.scheme, self.host, self.port) != (prefix.scheme, prefix.host, prefix.port):
            return False
        return self.path == prefix.path or self.path.startswith(prefix.path.rstrip("/") + "/")


def parse_url(text: str) -> Url:
    """The URL. Raises InvalidRequestError for text that is no http(s) URL or is ambiguous."""
    if not _PLAIN.fullmatch(text):
        raise refuse("the URL holds a character that must be percent-encoded")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise refuse("the URL cannot be read") from None
    if parts.scheme not in _PORTS:
        raise refuse("the URL is neither http:// nor https://")
    if "@" in parts.netloc:
        raise refuse("the URL holds credentials; they have no place there")
    match = _AUTHORITY.fullmatch(parts.netloc)
    port = int(match[2] or _PORTS[parts.scheme]) if match else 0
    if match is None or not 0 < port < 65536:
        raise refuse("the URL's host or port is not one")
    if parts.fragment or _BROKEN_ESCAPE.search(parts.query):
        raise refuse("the URL holds a # or a broken % escape")
    return Url(parts.scheme, match[1].lower().rstrip("."), port, _path(parts.path or "/"), parts.query)


def join_url(base: Url, location: str) -> Url:
    """The target of a redirect from `base`. Raises InvalidRequestError."""
    try:
        return parse_url(urljoin(f"{base}", location))
    except ValueError:
        raise refuse("the URL cannot be read") from None


def _path(path: str) -> str:
    if _BROKEN_ESCAPE.search(path):
        raise refuse("the URL holds a broken % escape")
    first, *segments = path.split("/")
    assert first == "", path
    if "" in segments[:-1]:
        raise refuse("the URL's path holds an empty part")
    return "/" + "/".join(map(_segment, segments))


def _segment(segment: str) -> str:
    """The segment in one normal form. A ".." is refused in every form that some server would accept."""
    raw = unquote_to_bytes(segment)
    plain = raw.decode("latin-1")
    if (
        plain.partition(";")[0] in (".", "..")
        or re.search(r"[/\\\x00-\x1f\x7f]", plain)
        or _ESCAPED_AGAIN.search(plain)
    ):
        raise refuse("the URL's path leads up, or hides what it means")
    return quote(raw, safe="!$&'()*+,;=:@~")


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

    def fetch(self, source: str, target: Path, limit: int, progress: OnBytes) -> str:
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
