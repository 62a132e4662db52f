"""Checks the body of a URL's response, as sent, against the checksums in its headers, and decodes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from lora_serve.adapters.http_content import Decoder, ExpectedDigests, decoder_for
from lora_serve.adapters.sources.base import refuse
from lora_serve.adapters.sources.checksum import Checksum, checked, of_base64, of_s3
from lora_serve.core.errors import InvalidAdapterError, InvalidRequestError, UnsupportedMediaError

WHAT = "The URL's answer"
_INSTANCE_DIGESTS = {"md5": "md5", "sha": "sha1", "sha-256": "sha256", "sha-512": "sha512"}  # RFC 3230, 5843
_STORED_AS_SENT = ("", "aws-chunked")  # the second: set at uploads to S3; some stores keep it


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
