"""Uploads and registrations that were damaged on their way: refused in words, nothing stays, no version is made."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lora_serve.adapters.checkpoint.content import adapter_digest

NAMES = ("adapter_config.json", "adapter_model.safetensors")
URL = "/admin/adapters/acme/up"
JSON = {"Content-Type": "application/json"}
BOUNDARY = "a-boundary"


def tar_gz(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in NAMES:
            archive.add(folder / name, arcname=name)
    return buffer.getvalue()


def tar(folder: Path) -> bytes:
    return gzip.decompress(tar_gz(folder))


def multipart(folder: Path) -> bytes:
    head = '--{}\r\nContent-Disposition: form-data; name="files"; filename="{}"\r\n\r\n'
    parts = [head.format(BOUNDARY, name).encode() + (folder / name).read_bytes() + b"\r\n" for name in NAMES]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


MULTIPART = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def digest(body: bytes, algorithm: str = "sha-256") -> dict[str, str]:
    content = hashlib.new(algorithm.replace("-", ""), body).digest()
    return {"Content-Digest": f"{algorithm}=:{b64encode(content).decode()}:"}


async def put(
    session: aiohttp.ClientSession, body: bytes, headers: Mapping[str, str], query: str = ""
) -> tuple[int, Any]:
    async with session.put(URL + query, data=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def check_nothing_came_of_it(house: Any) -> None:
    await house.services.background.close()
    assert not any((house.store / "tmp").iterdir())
    assert not any((house.store / "blobs").iterdir())
    assert "acme/up" not in house.services.catalog.snapshot.entries


@pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionHeader")
@pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionParam")
@pytest.mark.parametrize("pack", [tar_gz, tar, multipart])
async def test_flipped_bit_is_refused_by_the_contents_digest(
    admin: aiohttp.ClientSession, house: Any, pack: Any
) -> None:
    body = pack(house.make_adapter("a"))
    headers = {**(MULTIPART if pack is multipart else {}), **digest(body)}
    for number, place in enumerate(range(0, len(body), len(body) // 45)):
        damaged = bytearray(body)
        damaged[place] ^= 1 << number % 8
        status, answer = await put(admin, bytes(damaged), headers)
        assert status in (400, 422), answer
    await check_nothing_came_of_it(house)
    assert (await put(admin, body, headers))[0] == 201


async def test_damaged_archive_is_422_and_a_cut_one_too(admin: aiohttp.ClientSession, house: Any) -> None:
    body = tar_gz(house.make_adapter("a"))
    for damaged in (body[:-8] + bytes(8), body[:-8], body[:-1], body[: len(body) // 2], body + b"x"):
        status, answer = await put(admin, damaged, {})
        assert (status, answer["error"]["code"]) == (422, "invalid_adapter"), answer
        assert "not a sound tar" in answer["error"]["message"]
    await check_nothing_came_of_it(house)


@pytest.mark.parametrize("algorithm", ["sha-256", "sha-512"])
async def test_content_digest_is_of_the_body_as_it_is_sent(
    admin: aiohttp.ClientSession, house: Any, algorithm: str
) -> None:
    body = tar(house.make_adapter("a"))
    packed = gzip.compress(body)
    coded = {"Content-Encoding": "gzip"}
    status, answer = await put(admin, packed, coded | digest(body, algorithm))
    assert (status, "Content-Digest" in answer["error"]["message"]) == (400, True)
    await check_nothing_came_of_it(house)
    assert (await put(admin, packed, coded | digest(packed, algorithm)))[0] == 201


@pytest.mark.many(5)
@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("", 201),
        ("md5=:AAAA:", 201),  # unknown here, so ignored
        ("unixsum=30637, sha=?1", 201),
        ("sha-256", 400),
        ("sha-256=:AAAA:", 400),
        ("sha-256=AAAA", 400),
        ("sha-256=:%%%:", 400),
        ("sha-256=:AAAA", 400),
        ("md5=:AAAA:, ", 400),
        ("SHA-256=:AAAA:", 400),
    ],
)
async def test_malformed_digest_is_400_and_an_unknown_one_is_ignored(
    admin: aiohttp.ClientSession, house: Any, header: str, status: int
) -> None:
    body = tar(house.make_adapter("a"))
    assert (await put(admin, body, {"Content-Digest": header}))[0] == status


@pytest.mark.parametrize("pack", [tar, multipart])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_coded_upload_is_read_to_the_end_of_its_coding(
    admin: aiohttp.ClientSession, house: Any, pack: Any, coding: str
) -> None:
    whole = {"gzip": gzip.compress, "deflate": zlib.compress}[coding](pack(house.make_adapter("a")))
    headers = {**(MULTIPART if pack is multipart else {}), "Content-Encoding": coding}
    for damaged in (whole[:-4] + bytes(4), whole[:-4], whole[:-1], whole + b"garbage", whole[:100]):
        status, answer = await put(admin, damaged, headers)
        assert (status, coding in answer["error"]["message"]) == (400, True), answer
    await check_nothing_came_of_it(house)
    assert (await put(admin, whole, headers))[0] == 201


async def test_flipped_bit_of_a_coded_upload_is_refused_or_changes_nothing(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    folder = house.make_adapter("a")
    body = gzip.compress(multipart(folder))
    for number, place in enumerate(range(0, len(body), len(body) // 45)):
        damaged = bytearray(body)
        damaged[place] ^= 1 << number % 8
        status, answer = await put(admin, bytes(damaged), {**MULTIPART, "Content-Encoding": "gzip"})
        assert status in (400, 422) or answer["digest"] == adapter_digest(folder), place


async def test_multipart_that_ends_early_is_refused(admin: aiohttp.ClientSession, house: Any) -> None:
    body = multipart(house.make_adapter("a"))
    for size in (len(body) - 3, len(body) - 30, len(body) // 2, 10):
        status, answer = await put(admin, body[:size], MULTIPART)
        assert status == 400, answer
    await check_nothing_came_of_it(house)


async def test_deflate_without_its_header_is_400(admin: aiohttp.ClientSession, house: Any) -> None:
    packer = zlib.compressobj(wbits=-15)
    body = packer.compress(tar(house.make_adapter("a"))) + packer.flush()
    assert (await put(admin, body, {"Content-Encoding": "deflate"}))[0] == 400


async def test_unknown_coding_of_an_upload_is_415(admin: aiohttp.ClientSession, house: Any) -> None:
    assert (await put(admin, tar(house.make_adapter("a")), {"Content-Encoding": "br"}))[0] == 415


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_coded_json_is_read_to_the_end_of_its_coding(http: aiohttp.ClientSession, coding: str) -> None:
    text = b'{"prompt": "x", "max_tokens": 1}'
    whole = {"gzip": gzip.compress, "deflate": zlib.compress}[coding](text)
    headers = {**JSON, "Content-Encoding": coding}

    async def status_of(body: bytes, **more: str) -> int:
        async with http.post("/v1/completions", data=body, headers=headers | more) as answer:
            return answer.status

    assert await status_of(whole) == 200
    for damaged in (whole[:-4] + bytes(4), whole[:-4], whole[:-1], whole + b"x"):
        assert await status_of(damaged) == 400
    assert await status_of(whole, **digest(whole)) == 200
    assert await status_of(whole, **digest(text)) == 400


async def test_adapters_own_digest_is_compared_before_anything_is_stored(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    folder = house.make_adapter("a")
    other = "sha256:" + "0" * 64
    source = {"id": "acme/up", "source": str(folder)}
    for wrong in (other, "sha256:12", "md5:" + "0" * 64):
        status, answer = await put(admin, tar(folder), {}, f"?digest={wrong}")
        assert (status, answer["error"]["param"]) == (400, "digest"), answer
        async with admin.post("/admin/adapters", json={**source, "digest": wrong}) as reply:
            assert (reply.status, (await reply.json())["error"]["param"]) == (400, "digest")
    await check_nothing_came_of_it(house)
    right = adapter_digest(folder)
    status, card = await put(admin, tar(folder), {}, f"?digest={right}")
    assert (status, card["digest"]) == (201, right)
    async with admin.post("/admin/adapters", json={**source, "digest": right}) as reply:
        assert reply.status == 200


async def test_field_that_is_said_twice_is_refused(admin: aiohttp.ClientSession, house: Any) -> None:
    folder = house.make_adapter("a")
    right, wrong = adapter_digest(folder), "sha256:" + "0" * 64
    part = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="digest"\r\n\r\n{{}}\r\n'
    fields = {text: part.format(text).encode() for text in (right, wrong)}
    for query, body, headers in (
        (f"?digest={right}&digest={wrong}", tar(folder), {}),
        (f"?digest={wrong}&digest={right}", tar(folder), {}),
        (f"?digest={wrong}", fields[right] + multipart(folder), MULTIPART),
        ("", fields[wrong] + fields[right] + multipart(folder), MULTIPART),
    ):
        status, answer = await put(admin, body, headers, query)
        assert (status, answer["error"]["param"]) == (400, "digest"), answer
    async with admin.get("/admin/adapters?limit=1&limit=2") as answer:
        assert answer.status == 400
    await check_nothing_came_of_it(house)
    assert (await put(admin, fields[right] + multipart(folder), MULTIPART, f"?digest={right}"))[0] == 201
