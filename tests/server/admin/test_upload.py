"""PUT /admin/adapters/{id}: multipart and archives, streamed, bounded, cleaned up."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from lora_serve.server.background.tasks import MAX_WAITING

NAMES = ("adapter_config.json", "adapter_model.safetensors")
URL = "/admin/adapters/acme/up"


def form_of(folder: Path, **fields: str) -> aiohttp.FormData:
    form = aiohttp.FormData()
    for name in NAMES:
        form.add_field("files", (folder / name).read_bytes(), filename=name)
    for name, value in fields.items():
        form.add_field(name, value)
    return form


def tar_of(folder: Path, mode: str = "w:", prefix: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name in NAMES:
            archive.add(folder / name, arcname=prefix + name)
    return buffer.getvalue()


def zip_of(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in NAMES:
            archive.write(folder / name, name)
    return buffer.getvalue()


def leftovers(house: Any) -> list[Path]:
    tmp: Path = house.store / "tmp"
    return list(tmp.iterdir()) if tmp.exists() else []


async def nothing_left(house: Any) -> bool:
    """Once what runs in the background is done."""
    await house.services.background.close()
    return leftovers(house) == []


async def nothing_left_at_last(house: Any) -> None:
    """Wait until the server has seen that a client left, and is done with what it left."""
    async with asyncio.timeout(60):
        while not await nothing_left(house):
            await asyncio.sleep(0.005)


async def put(session: aiohttp.ClientSession, data: Any, url: str = URL, kind: str | None = None) -> tuple[int, Any]:
    headers = {} if kind is None else {"Content-Type": kind}
    async with session.put(url, data=data, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_two_files_as_multipart(admin: aiohttp.ClientSession, house: Any) -> None:
    folder = house.make_adapter("a")
    form = form_of(folder, tenant="globex", pin="true", metadata='{"a": 1}')
    status, card = await put(admin, form)
    assert status == 201, card
    assert (card["id"], card["tenant"], card["pinned"], card["metadata"]) == ("acme/up", "globex", True, {"a": 1})
    assert card["source"] == "upload"
    assert (await put(admin, form_of(folder, tenant="globex")))[0] == 200
    assert await nothing_left(house)


ARCHIVES: dict[str, Callable[[Path], bytes]] = {
    "tar": tar_of,
    "tar.gz": lambda folder: tar_of(folder, "w:gz"),
    "tar_with_a_folder": lambda folder: tar_of(folder, prefix="adapter/"),
    "zip": zip_of,
}


@pytest.mark.many(5)
@pytest.mark.parametrize("name", ARCHIVES)
@pytest.mark.parametrize("kind", ["application/octet-stream", "application/x-www-form-urlencoded"])
async def test_archive_as_the_body(admin: aiohttp.ClientSession, house: Any, name: str, kind: str) -> None:
    """curl --data-binary sends the second type."""
    data = ARCHIVES[name](house.make_adapter("a"))
    status, card = await put(admin, data, f"{URL}?pin=true&tenant=globex", kind)
    assert (status, card.get("pinned"), card.get("tenant")) == (201, True, "globex"), card
    assert await nothing_left(house)


async def test_archive_as_a_part(admin: aiohttp.ClientSession, house: Any) -> None:
    form = aiohttp.FormData()
    form.add_field("file", tar_of(house.make_adapter("a"), "w:gz"), filename="adapter.tar.gz")
    assert (await put(admin, form))[0] == 201


async def test_uploaded_content_is_the_same_version_as_registered_by_path(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    ref = await house.register("acme/up", seed=7)
    status, card = await put(admin, form_of(house.make_adapter("other", seed=7)))
    assert (status, card["digest"], card["version"]) == (200, ref.digest, 1)


def broken_cases(folder: Path) -> dict[str, tuple[Any, str | None, int]]:
    one = aiohttp.FormData()
    one.add_field("files", b"{}", filename=NAMES[0])
    twice = form_of(folder)
    twice.add_field("files", b"{}", filename=NAMES[0])
    unknown = form_of(folder)
    unknown.add_field("files", b"x", filename="../../etc/passwd")
    many = form_of(folder)
    for _ in range(20):
        many.add_field("tenant", "x")
    both = form_of(folder)
    both.add_field("file", tar_of(folder), filename="adapter.tar")
    long_field = form_of(folder, metadata="x" * 200_000)
    charset = b'--%s\r\nContent-Disposition: form-data; name="_charset_"\r\n\r\n%s\r\n--%s--\r\n'
    long_boundary = b"x" * 70
    return {
        "nothing": (b"", None, 422),
        "no_archive": (b"hello world" * 100, None, 422),
        "cut_short": (tar_of(folder, "w:gz")[:-200], None, 422),
        "json": (b"{}", "application/json", 415),
        "one_file": (one, None, 422),
        "twice": (twice, None, 400),
        "archive_beside_files": (both, None, 400),
        "unknown_part": (unknown, None, 400),
        "many_parts": (many, None, 400),
        "long_field": (long_field, None, 413),
        "wrong_pin": (form_of(folder, pin="perhaps"), None, 400),
        "wrong_metadata": (form_of(folder, metadata="{"), None, 400),
        "metadata_list": (form_of(folder, metadata="[]"), None, 400),
        "no_boundary": (b"x", "multipart/form-data", 400),
        "broken_multipart": (b"--x\r\nnonsense", "multipart/form-data; boundary=x", 400),
        "charset": (charset % (b"x", b"utf-8", b"x"), "multipart/form-data; boundary=x", 400),
        "long_charset": (charset % (b"x", b"c" * 60, b"x"), "multipart/form-data; boundary=x", 400),
        "charset_and_long_boundary": (
            charset % (long_boundary, b"utf-8", long_boundary),
            f"multipart/form-data; boundary={long_boundary.decode()}",
            400,
        ),
        "too_large": (io.BytesIO(b"x" * 1_100_000), None, 413),
    }


async def test_broken_upload_is_refused_and_leaves_nothing(admin: aiohttp.ClientSession, house: Any) -> None:
    folder = house.make_adapter("a")
    for name, (data, kind, expected) in broken_cases(folder).items():
        status, answer = await put(admin, data, kind=kind)
        assert status == expected, (name, status, answer)
        assert answer["error"]["message"]
        assert "metadata" not in name or answer["error"]["param"] == "metadata", answer
    assert await nothing_left(house)
    assert house.services.catalog.snapshot.names == ()


@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader")
@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionParam")
async def test_any_damage_to_a_multipart_body_is_a_4xx(admin: aiohttp.ClientSession, house: Any) -> None:
    """Bytes dropped, doubled or changed at random places, headers and boundaries above all."""
    folder = house.make_adapter("a")
    files = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="f"; filename="' + name.encode() + b'"\r\n\r\n'
        + (folder / name).read_bytes() + b"\r\n"
        for name in NAMES
    )  # fmt: skip
    body, random = files + b"--x--\r\n", Random(5)
    for _ in range(60):
        damaged = bytearray(body)
        for _ in range(random.randint(1, 4)):
            place = random.choice((random.randrange(300), random.randrange(len(damaged))))
            damaged[place : place + random.randint(0, 9)] = random.randbytes(random.randint(0, 3))
        status, answer = await put(admin, bytes(damaged), kind="multipart/form-data; boundary=x")
        assert status in (200, 201) or (400 <= status < 500 and answer["error"]["message"]), (bytes(damaged), answer)
    assert await nothing_left(house)


async def test_lines_before_the_first_part_are_few_and_those_in_a_file_any_number(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    folder = house.make_adapter("a")
    config = folder / NAMES[0]
    config.write_bytes(b"\r\n" * 50_000 + config.read_bytes() + b"\n" * 50_000)
    form = form_of(folder)()
    body = await form.as_bytes()
    for num_lines, expected in ((5000, 400), (1000, 201)):
        async with admin.put(URL, data=b"a line\r\n" * num_lines + body, headers=form.headers) as answer:
            assert answer.status == expected, await answer.text()
        assert await nothing_left(house)


async def test_too_large_a_stream_without_a_length_is_cut_off(admin: aiohttp.ClientSession, house: Any) -> None:
    async def endless() -> Any:
        for _ in range(40):
            yield b"x" * 100_000

    status, _ = await put(admin, endless())
    assert status == 413
    assert await nothing_left(house)


async def test_compressed_stream_that_decodes_to_nothing_is_cut_off(admin: aiohttp.ClientSession, house: Any) -> None:
    async def endless() -> Any:
        for _ in range(40):
            yield gzip.compress(b"") * 5000

    async with admin.put(URL, data=endless(), headers={"Content-Encoding": "gzip"}) as answer:
        assert answer.status == 413
    assert await nothing_left(house)


async def test_client_that_leaves_in_the_middle_leaves_nothing(house: Any) -> None:
    started = asyncio.Event()

    async def slow() -> Any:
        yield b"x" * 1000
        started.set()
        await asyncio.sleep(30)

    async with aiohttp.ClientSession(house.url, headers={"Authorization": "Bearer admin-key-of-the-tests"}) as session:
        task = asyncio.create_task(put(session, slow()))
        await started.wait()
        async with asyncio.timeout(60):
            while not leftovers(house):
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await nothing_left_at_last(house)


@pytest.mark.parametrize("adapter_id", ["tiny-base", "a..b", "a%3Ab"])
async def test_wrong_id_is_refused_before_anything_is_received(
    admin: aiohttp.ClientSession, house: Any, adapter_id: str
) -> None:
    data = zip_of(house.make_adapter("a"))
    status, _ = await put(admin, data, f"/admin/adapters/{adapter_id}")
    assert status in (400, 409)


async def test_upload_with_defaults_that_no_request_could_have_leaves_nothing(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    form = form_of(house.make_adapter("a"), metadata='{"tool_call_parser": "nope"}')
    assert (await put(admin, form))[0] == 400
    assert await nothing_left(house)


async def test_upload_whose_tenant_got_a_full_line_meanwhile_leaves_nothing(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    form, gate = form_of(house.make_adapter("a"))(), threading.Event()
    body = await form.as_bytes()

    async def halves() -> Any:
        yield body[:1000]
        async with asyncio.timeout(60):
            while not leftovers(house):
                await asyncio.sleep(0.005)
        for _ in range(1 + MAX_WAITING):
            house.services.registrations.submit(gate.wait, "acme")
        yield body[1000:]

    try:
        async with admin.put(URL, data=halves(), headers=form.headers) as answer:
            assert answer.status == 429, await answer.text()
        assert await nothing_left(house)
    finally:
        gate.set()


async def test_client_that_leaves_while_its_defaults_are_checked_leaves_nothing(
    admin: aiohttp.ClientSession, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checking = asyncio.Event()

    async def check(*given: Any) -> Any:
        checking.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(house.services.grammars, "of", check)
    metadata = '{"response_format": {"type": "json_object"}}'
    task = asyncio.create_task(put(admin, form_of(house.make_adapter("a"), metadata=metadata)))
    await asyncio.wait_for(checking.wait(), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await nothing_left_at_last(house)
    assert house.services.catalog.snapshot.names == ()


async def test_client_that_leaves_as_its_registration_begins_does_not_end_it(
    admin: aiohttp.ClientSession, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    background = house.services.background

    async def leave(work: Any, name: str) -> Any:
        background.start(work, name)
        raise asyncio.CancelledError  # before the work's first step

    monkeypatch.setattr(background, "complete", leave)
    with pytest.raises(aiohttp.ClientConnectionError):
        await put(admin, form_of(house.make_adapter("a")))
    await nothing_left_at_last(house)
    assert house.services.catalog.snapshot.names == ("acme/up",)


async def test_client_that_leaves_while_its_archive_is_unpacked_leaves_nothing(
    admin: aiohttp.ClientSession, house: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is removed under the thread that unpacks: a file that it makes meanwhile would stay."""
    unpacking, removing, gate, found = asyncio.Event(), asyncio.Event(), threading.Event(), list[bool]()
    loop, start = asyncio.get_running_loop(), house.services.background.start

    def unpack(archive: Path, folder: Path, max_bytes: int) -> None:
        loop.call_soon_threadsafe(unpacking.set)
        assert gate.wait(60)
        found.append(folder.exists() and archive.exists())

    def noting(work: Any, name: str) -> Any:
        if name.startswith("removing"):
            removing.set()
        return start(work, name)

    monkeypatch.setattr("lora_serve.server.admin.upload.unpack", unpack)
    monkeypatch.setattr(house.services.background, "start", noting)
    task = asyncio.create_task(put(admin, tar_of(house.make_adapter("a"))))
    await asyncio.wait_for(unpacking.wait(), 60)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(removing.wait(), 60)
    await asyncio.sleep(0.1)  # long enough to remove two files
    gate.set()
    await nothing_left_at_last(house)
    assert found == [True]


async def test_client_that_leaves_before_its_archive_is_unpacked_leaves_nothing(
    admin: aiohttp.ClientSession, house: Any
) -> None:
    gate, registrations = threading.Event(), house.services.registrations
    ahead = registrations.submit(gate.wait, "acme")
    task = asyncio.create_task(put(admin, tar_of(house.make_adapter("a"))))
    async with asyncio.timeout(60):
        while not registrations._lines:
            await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    try:
        await nothing_left_at_last(house)
        assert not ahead.done()
    finally:
        gate.set()
