"""Loaders of an engine's process read folders that the server's process holds open for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.adapters.stores.blobs import StoredBlobs
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.files import new_folder
from lora_serve.core.blob_messages import BlobMessage, CloseBlob, OpenBlob
from lora_serve.core.errors import AdapterUnavailableError, InternalError, LoadHangsError
from lora_serve.core.messages import Reply
from lora_serve.engine_host.remote_blobs import BlobServer, RemoteBlobs


class Counted(StoredBlobs):
    """How many folders are held."""

    def __init__(self, disk: DiskStore) -> None:
        super().__init__(disk, disk)
        self.num_open = 0

    @contextmanager
    def near(self, digest: str) -> Iterator[Path]:
        with super().near(digest) as folder:
            self.num_open += 1
            try:
                yield folder
            finally:
                self.num_open -= 1


@dataclass
class Pair:
    """Both ends, in one process: what crosses is handed over as it is."""

    remote: RemoteBlobs
    server: BlobServer
    blobs: Counted
    disk: DiskStore
    digest: str
    blob: Path


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    digest = adapter_digest(folder)
    disk = DiskStore(tmp_path / "store")
    disk.put(digest, folder)
    blobs, loop = Counted(disk), asyncio.get_running_loop()
    server = BlobServer(blobs, 2, tmp_path / "store" / "tmp")

    def send(messages: Sequence[BlobMessage]) -> None:
        for message in messages:
            loop.call_soon_threadsafe(server.run, message, lambda answer: remote.answered(answer))

    remote = RemoteBlobs(send, tmp_path / "store" / "tmp")
    blob = tmp_path / "store" / "blobs" / digest.removeprefix("sha256:")
    yield Pair(remote, server, blobs, disk, digest, blob)
    await server.close()


def read(pair: Pair, *, near: bool = False) -> bytes:
    if near:
        with pair.remote.near(pair.digest) as folder:
            assert pair.blobs.num_open == 1
            return (folder / "adapter_model.safetensors").read_bytes()
    with pair.remote.verified(pair.digest) as blob:
        assert blob.tier == "disk"
        return (blob.folder / "adapter_model.safetensors").read_bytes()


async def test_a_folder_is_open_as_long_as_it_is_read(pair: Pair) -> None:
    assert await asyncio.to_thread(read, pair, near=True) == b"weights"
    assert await asyncio.to_thread(read, pair) == b"weights"
    await pair.server.close()
    assert pair.blobs.num_open == 0


async def test_a_corrupt_blob_is_refused_on_the_other_side(pair: Pair) -> None:
    (pair.blob / "adapter_model.safetensors").write_bytes(b"others'")
    with pytest.raises(AdapterUnavailableError, match="corrupt"):
        await asyncio.to_thread(read, pair)


async def test_a_missing_blob_is_unavailable_on_the_other_side(pair: Pair) -> None:
    pair.disk.delete(pair.digest)
    for near in (True, False):
        with pytest.raises(AdapterUnavailableError, match="does not have"):
            await asyncio.to_thread(read, pair, near=near)


async def test_a_file_is_kept_beside_the_blob_and_nothing_stays_behind(pair: Pair, tmp_path: Path) -> None:
    await asyncio.to_thread(pair.remote.keep_beside, pair.digest, "prepared-1", b"ready")
    assert (pair.blob / "prepared-1").read_bytes() == b"ready"
    assert list((tmp_path / "store" / "tmp").iterdir()) == []
    assert adapter_digest(pair.blob) == pair.digest


async def test_a_file_for_a_blob_that_is_gone_is_an_error_of_the_system(pair: Pair, tmp_path: Path) -> None:
    pair.disk.delete(pair.digest)
    with pytest.raises(OSError, match="No such file"):
        await asyncio.to_thread(pair.remote.keep_beside, pair.digest, "prepared-1", b"ready")
    assert list((tmp_path / "store" / "tmp").iterdir()) == []


async def test_what_a_dead_engine_held_is_let_go(pair: Pair) -> None:
    given: list[Reply] = []
    pair.server.run(OpenBlob(1, pair.digest, True), given.append)
    while not given:
        await asyncio.sleep(0)
    assert pair.blobs.num_open == 1
    pair.server.drop()
    late: list[Reply] = []
    pair.server.run(OpenBlob(1, pair.digest, True), late.append)
    while not late:
        await asyncio.sleep(0)
    await pair.server.close()
    assert pair.blobs.num_open == 0


@pytest.mark.parametrize("leave", [BlobServer.drop, lambda server: server.run(CloseBlob(1), lambda answer: None)])
async def test_a_folder_that_is_open_only_after_its_engine_has_ended_or_closed_it_is_let_go(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, leave: Callable[[BlobServer], None]
) -> None:
    gate, begun, near = threading.Event(), threading.Event(), pair.blobs.near

    @contextmanager
    def slow(digest: str) -> Iterator[Path]:
        begun.set()
        gate.wait(60)
        with near(digest) as folder:
            yield folder

    monkeypatch.setattr(pair.blobs, "near", slow)
    given: list[Reply] = []
    pair.server.run(OpenBlob(1, pair.digest, True), given.append)
    assert await asyncio.to_thread(begun.wait, 60)
    leave(pair.server)
    await asyncio.sleep(0.01)
    gate.set()
    async with asyncio.timeout(20):
        while not given or pair.blobs.num_open:
            await asyncio.sleep(0.001)


async def test_what_a_dead_engine_was_writing_is_removed_and_nothing_else(pair: Pair, tmp_path: Path) -> None:
    """A process that is killed removes nothing by itself."""
    scratch, written = tmp_path / "store" / "tmp", threading.Event()
    servers_own = new_folder(scratch)

    def send(messages: Sequence[BlobMessage]) -> None:
        written.set()  # and then it was killed: the call never came

    killed = RemoteBlobs(send, scratch)
    thread = threading.Thread(target=killed.keep_beside, args=(pair.digest, "prepared-1", b"ready"), daemon=True)
    thread.start()
    assert await asyncio.to_thread(written.wait, 60)
    assert len(list(scratch.iterdir())) == 2
    await pair.server.close()
    assert list(scratch.iterdir()) == [servers_own]
    killed.answered(Reply(1))
    await asyncio.to_thread(thread.join)


async def test_store_that_would_end_its_thread_fails_one_call(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object) -> None:
        raise SystemExit(1)

    with monkeypatch.context() as patch:
        patch.setattr(pair.disk, "open", end)
        with pytest.raises(InternalError):
            await asyncio.to_thread(read, pair, near=True)
    assert await asyncio.to_thread(read, pair, near=True) == b"weights"


async def test_stores_that_hang_leave_their_threads_places_to_others(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are threads; what they give at last is let go."""
    gate, near = threading.Event(), pair.blobs.near

    @contextmanager
    def hang(digest: str) -> Iterator[Path]:
        if digest != pair.digest:
            gate.wait(60)
        with near(pair.digest) as folder:
            yield folder

    def read_other(digest: str) -> None:
        with pair.remote.near(digest):
            pytest.fail("it was given up")

    monkeypatch.setattr(pair.blobs, "near", hang)
    with monkeypatch.context() as patch:
        patch.setattr(pair.server._threads, "_timeout", 0.05)
        hung = [asyncio.create_task(asyncio.to_thread(read_other, digest)) for digest in ("one", "other")]
        errors = await asyncio.gather(*hung, return_exceptions=True)
    assert [type(error) for error in errors] == [LoadHangsError] * 2
    assert await asyncio.to_thread(read, pair, near=True) == b"weights"
    gate.set()
    while pair.server._threads._num_hung:
        await asyncio.sleep(0.005)
    await pair.server.close()
    assert pair.blobs.num_open == 0


async def test_many_threads_get_each_its_own(pair: Pair) -> None:
    found = await asyncio.gather(*(asyncio.to_thread(read, pair) for _ in range(20)))
    assert found == [b"weights"] * 20
