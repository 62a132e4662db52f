"""A replica that does not see its gateways' files: adapters' content crosses in pieces, as do staged folders."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_serve.adapters.checkpoint.artifact import read_artifact
from lora_serve.adapters.checkpoint.content import CONFIG_NAME, WEIGHTS_NAME, adapter_digest
from lora_serve.adapters.registration.verification import StagedAdapter, ValidationBudget
from lora_serve.adapters.stores.blobs import StoredBlobs
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.client.ray import link
from lora_serve.client.ray.attached import LinkUsers
from lora_serve.client.ray.client import RayEngineClient
from lora_serve.client.ray.link import ReplicaLink
from lora_serve.client.verifier import RemoteValidator
from lora_serve.client.wire import body_of, to_engine
from lora_serve.core.blob_messages import PIECE_BYTES, CloseBlob, FilePiece, OpenBlob, ReadPiece, WritePiece
from lora_serve.core.errors import AdapterUnavailableError, StoreUnwritableError
from lora_serve.core.messages import AdapterSize, FromEngine, Reply, ToEngine
from lora_serve.engine_host.fleet import blobs
from lora_serve.engine_host.fleet.blobs import ContentServer, FleetBlobs, ReplicaBlobs
from tests.client.ray.fake_fleet import LIMITS, FakeFleet, FakeReplica
from tests.engine_host.fake_engine import FakeValidator, fake_spec

WEIGHTS = np.random.default_rng(0).bytes(7 * PIECE_BYTES // 2)
Damage = Callable[[FilePiece], FilePiece]


def saved(folder: Path, weights: bytes = WEIGHTS) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG_NAME).write_text("{}")
    (folder / WEIGHTS_NAME).write_bytes(weights)
    return folder


class Wire(FakeFleet):
    """A fleet that notes the largest frame that went to a replica, and damages pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.num_pieces = 0
        self.before_piece: Callable[[int], None] = lambda number: None
        self.damage: Damage = lambda piece: piece

    async def take(self, replica: str, gateway: str, frame: bytes) -> None:
        self.largest = max(self.largest, len(frame))
        await super().take(replica, gateway, body_of([self._passed(message) for message in to_engine(frame)]))

    def _passed(self, message: ToEngine) -> ToEngine:
        if not isinstance(message, Reply) or not isinstance(message.value, FilePiece):
            return message
        self.num_pieces += 1
        self.before_piece(self.num_pieces)
        return Reply(message.call_id, self.damage(message.value))


@dataclass
class Gateway:
    """A server with a store of its own."""

    store: DiskStore
    client: RayEngineClient
    blobs: FleetBlobs
    asked: list[FromEngine] = field(default_factory=list)

    async def close(self) -> None:
        await self.client.stop()
        await self.blobs.close()


@dataclass
class World:
    """One replica, and gateways that are attached in the order of their names."""

    root: Path
    fleet: Wire
    replica: FakeReplica
    blobs: ReplicaBlobs
    cache: DiskStore
    gateways: list[Gateway] = field(default_factory=list)

    async def attach(self, name: str) -> Gateway:
        store = DiskStore(self.root / name)
        blobs = FleetBlobs(StoredBlobs(store, store), 2, store.tmp, 20)
        asked: list[FromEngine] = []

        def run(link: ReplicaLink, message: FromEngine) -> None:
            asked.append(message)
            blobs.run(link, message)

        client = RayEngineClient(self.fleet, LIMITS, 5.0, LinkUsers(run, blobs.close_link))
        gateway = Gateway(store, client, blobs, asked)
        self.gateways.append(gateway)
        await client.start()
        return gateway

    def read(self, digest: str) -> tuple[bytes, str, Path]:
        with self.blobs.verified(digest) as blob:
            return (blob.folder / WEIGHTS_NAME).read_bytes(), blob.tier, blob.folder

    def left_over(self) -> list[Path]:
        return [
            path for folder in (self.cache.tmp, *(one.store.tmp for one in self.gateways)) for path in folder.iterdir()
        ]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "TICK", 5.0)


@asynccontextmanager
async def world_of(root: Path, *names: str, cache_bytes: int | None = None, **greeting: Any) -> AsyncIterator[World]:
    fleet, cache = Wire(), DiskStore(root / "replica", cache_bytes, is_cache=True)
    blobs = ReplicaBlobs(cache, "engine-r-")
    replica = FakeReplica("r", blobs, **greeting)
    fleet.replicas["r"] = replica
    fleet.listed.add("r")
    world = World(root, fleet, replica, blobs, cache)
    try:
        async with asyncio.timeout(30):
            for name in names:
                await world.attach(name)
            yield world
    finally:
        for gateway in world.gateways:
            await gateway.close()
        await fleet.stop()


@pytest.fixture
def digest(tmp_path: Path) -> str:
    return adapter_digest(saved(tmp_path / "adapter"))


def elsewhere(root: Path, *names: str, **more: Any) -> Any:
    return world_of(root, *names, files="another machine's", **more)


async def test_content_crosses_in_pieces_one_at_a_time_and_is_kept(tmp_path: Path, digest: str) -> None:
    async with elsewhere(tmp_path, "one") as world:
        world.gateways[0].store.put(digest, tmp_path / "adapter")
        weights, tier, folder = await asyncio.to_thread(world.read, digest)
        assert (weights, tier) == (WEIGHTS, "disk")
        assert folder.parent == tmp_path / "replica" / "blobs"
        assert PIECE_BYTES < world.fleet.largest < PIECE_BYTES + 1000
        assert sum(isinstance(one, ReadPiece) for one in world.gateways[0].asked) == 5  # four of the weights
        await world.gateways[0].close()
        assert (await asyncio.to_thread(world.read, digest))[0] == WEIGHTS  # of its own
        assert world.left_over() == []


async def test_prepared_files_lie_beside_the_own_copy(tmp_path: Path, digest: str) -> None:
    async with elsewhere(tmp_path, "one") as world:
        world.gateways[0].store.put(digest, tmp_path / "adapter")
        with pytest.raises(AdapterUnavailableError, match="elsewhere"):
            await asyncio.to_thread(world.blobs.near(digest).__enter__)
        folder = (await asyncio.to_thread(world.read, digest))[2]
        await asyncio.to_thread(world.blobs.keep_beside, digest, "prepared-1", b"ready")
        assert (folder / "prepared-1").read_bytes() == b"ready"
        with world.blobs.near(digest) as near:
            assert near == folder
        assert not list((tmp_path / "one").glob("**/prepared-1"))


async def test_replica_that_sees_the_files_reads_them_in_their_place(tmp_path: Path, digest: str) -> None:
    async with world_of(tmp_path, "one", "other") as world:
        world.gateways[1].store.put(digest, tmp_path / "adapter")
        weights, _, folder = await asyncio.to_thread(world.read, digest)
        assert weights == WEIGHTS
        assert folder.parent == tmp_path / "other" / "blobs"
        await asyncio.to_thread(world.blobs.keep_beside, digest, "prepared-1", b"ready")
        assert (folder / "prepared-1").read_bytes() == b"ready"
        assert world.fleet.num_pieces == 0
        assert world.cache.digests() == frozenset()
        assert world.left_over() == []


async def test_what_one_server_lacks_another_gives(tmp_path: Path, digest: str) -> None:
    async with elsewhere(tmp_path, "one", "other") as world:
        world.gateways[1].store.put(digest, tmp_path / "adapter")
        assert (await asyncio.to_thread(world.read, digest))[0] == WEIGHTS
        with pytest.raises(AdapterUnavailableError, match="does not have"):
            await asyncio.to_thread(world.read, "sha256:" + 64 * "0")


@pytest.mark.parametrize("place", [elsewhere, world_of])
async def test_server_whose_disk_fails_is_replaced_by_another(
    tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch, place: Callable[..., Any]
) -> None:
    @contextmanager
    def broken(digest: str) -> Iterator[Path]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
        yield

    async with place(tmp_path, "one", "other") as world:
        one, other = world.gateways
        monkeypatch.setattr(one.store, "open", broken)
        other.store.put(digest, tmp_path / "adapter")
        assert (await asyncio.to_thread(world.read, digest))[0] == WEIGHTS
        assert any(isinstance(message, OpenBlob) for message in one.asked)
        await other.close()
        if place is world_of:  # which keeps no copy of its own
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                await asyncio.to_thread(world.read, digest)


@pytest.mark.parametrize("others", [(), ("other",)])
async def test_server_that_leaves_in_the_middle_is_replaced_by_another(
    tmp_path: Path, digest: str, others: tuple[str, ...]
) -> None:
    async with elsewhere(tmp_path, "one", *others) as world:
        for gateway in world.gateways:
            gateway.store.put(digest, tmp_path / "adapter")
        leaving: list[asyncio.Task[None]] = []

        def before_piece(number: int) -> None:
            if number == 3:
                leaving.append(asyncio.create_task(world.gateways[0].close()))

        world.fleet.before_piece = before_piece
        if others:
            assert (await asyncio.to_thread(world.read, digest))[0] == WEIGHTS
        else:
            with pytest.raises(AdapterUnavailableError, match="left"):
                await asyncio.to_thread(world.read, digest)
        await leaving[0]
        assert world.left_over() == []


async def test_server_that_does_not_answer_is_given_up(
    tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "ANSWER_SECONDS", 0.2)
    async with elsewhere(tmp_path, "one", "other") as world:
        for gateway in world.gateways:
            gateway.store.put(digest, tmp_path / "adapter")
        silent, run = world.gateways[0].blobs, world.gateways[0].blobs.run
        monkeypatch.setattr(
            silent, "run", lambda link, message: None if isinstance(message, ReadPiece) else run(link, message)
        )
        assert (await asyncio.to_thread(world.read, digest))[0] == WEIGHTS
        assert any(isinstance(one, ReadPiece) for one in world.gateways[0].asked)


class Held:
    """Counts the folders that a store holds open; it opens none before `gate` is set."""

    def __init__(self, store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.num_opened = self.num_open = 0
        self._really_open = store.open
        monkeypatch.setattr(store, "open", self._open)

    @contextmanager
    def _open(self, digest: str) -> Iterator[Path]:
        self.gate.wait(60)
        with self._really_open(digest) as folder:
            self.num_opened += 1
            self.num_open += 1
            try:
                yield folder
            finally:
                self.num_open -= 1

    async def let_go(self) -> None:
        """Returns once all that was opened is closed."""
        async with asyncio.timeout(10):
            while not self.num_opened or self.num_open:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("place", [elsewhere, world_of])
async def test_folder_that_a_server_opens_too_late_is_let_go(
    tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch, place: Callable[..., Any]
) -> None:
    monkeypatch.setattr(blobs, "ANSWER_SECONDS", 0.2)
    async with place(tmp_path, "one") as world:
        (gateway,) = world.gateways
        gateway.store.put(digest, tmp_path / "adapter")
        held = Held(gateway.store, monkeypatch)
        with pytest.raises(AdapterUnavailableError, match="does not answer"):
            await asyncio.to_thread(world.read, digest)
        while not any(isinstance(one, CloseBlob) for one in gateway.asked):
            await asyncio.sleep(0.005)
        held.gate.set()
        await held.let_go()
        assert world.left_over() == []


async def test_folder_whose_files_cannot_be_listed_is_let_go_with_the_error(
    tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(blobs, "content_names", broken)
    store, answers = DiskStore(tmp_path / "store"), asyncio.Queue[Reply]()
    store.put(digest, tmp_path / "adapter")
    held = Held(store, monkeypatch)
    held.gate.set()
    server = ContentServer(StoredBlobs(store, store), 2, store.tmp, 20, staged={})
    server.run(OpenBlob(1, digest, is_near=False), answers.put_nowait)
    assert isinstance((await answers.get()).error, OSError)
    await held.let_go()
    await server.close()


@pytest.mark.parametrize("is_short", [False, True])
async def test_damaged_piece_is_fetched_again_and_never_kept(tmp_path: Path, digest: str, *, is_short: bool) -> None:
    def damaged(piece: FilePiece) -> FilePiece:
        return FilePiece(piece.content[:-1] + (b"" if is_short else bytes([piece.content[-1] ^ 1])))

    async with elsewhere(tmp_path, "one") as world:
        world.gateways[0].store.put(digest, tmp_path / "adapter")
        world.fleet.damage = damaged
        with pytest.raises(AdapterUnavailableError, match="damaged"):
            await asyncio.to_thread(world.read, digest)
        assert world.cache.digests() == frozenset()
        world.fleet.num_pieces = 0
        world.fleet.damage = lambda piece: damaged(piece) if world.fleet.num_pieces == 2 else piece
        assert (await asyncio.to_thread(world.read, digest))[0] == WEIGHTS
        assert world.left_over() == []


async def test_full_disk_of_the_replica_is_told_in_words_and_heals(
    tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def full(parent: Path) -> Iterator[Path]:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield parent

    async with elsewhere(tmp_path, "one") as world:
        world.gateways[0].store.put(digest, tmp_path / "adapter")
        with monkeypatch.context() as patch:
            patch.setattr(blobs, "scratch_folder", full)
            with pytest.raises(StoreUnwritableError, match="engine cannot keep"):
                await asyncio.to_thread(world.read, digest)
        assert (await asyncio.to_thread(world.read, digest))[0] == WEIGHTS


async def test_content_that_the_cache_has_no_room_for_is_read_all_the_same(tmp_path: Path, digest: str) -> None:
    async with elsewhere(tmp_path, "one", cache_bytes=1000) as world:
        world.gateways[0].store.put(digest, tmp_path / "adapter")
        assert (await asyncio.to_thread(world.read, digest))[0] == WEIGHTS
        assert world.cache.digests() == frozenset()
        assert world.left_over() == []


class Rewriting(FakeValidator):
    """Its conversion gives the adapter other weights; it notes what it saw."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.folders: list[Path] = []

    def convert(self, staged: StagedAdapter) -> None:
        self.folders.append(staged.folder)
        (staged.folder / WEIGHTS_NAME).write_bytes(WEIGHTS)

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        self.folders.append(staged.folder)
        self.seen.append((staged.folder / WEIGHTS_NAME).read_bytes())
        return AdapterSize(2, 100)


def adapter_in(folder: Path) -> Path:
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2, "target_modules": ["q"]}
    (folder / CONFIG_NAME).write_text(json.dumps(config))
    ends = {"lora_A": np.ones((2, 4), np.float32), "lora_B": np.ones((4, 2), np.float32)}
    save_file({f"base_model.model.q.{name}.weight": end for name, end in ends.items()}, folder / WEIGHTS_NAME)
    return folder


def staged(folder: Path) -> StagedAdapter:
    """On the registry's thread, of which the budget is."""
    return StagedAdapter(folder, read_artifact(folder, fake_spec()), fake_spec(), None, ValidationBudget(300.0))


@pytest.mark.parametrize("files", ["another machine's", None])
async def test_registration_crosses_and_what_was_converted_comes_back(tmp_path: Path, files: str | None) -> None:
    async with world_of(tmp_path, "one", "other", **({"files": files} if files else {})) as world:
        validator = world.replica.served.validator = Rewriting()
        remote = RemoteValidator(world.gateways[1].client, asyncio.get_running_loop())
        folder = adapter_in(tmp_path / "other" / "staged")
        before, linked = (folder / WEIGHTS_NAME).read_bytes(), tmp_path / "sent"
        if files:
            os.link(folder / WEIGHTS_NAME, linked)

        def size_and_convert() -> AdapterSize:
            own = staged(folder)
            size = remote.validate(own, allow_noop=False)
            remote.convert(own)
            return size

        assert await asyncio.to_thread(size_and_convert) == AdapterSize(2, 100)
        assert validator.seen == [before]
        assert (folder / WEIGHTS_NAME).read_bytes() == WEIGHTS
        assert sorted(path.name for path in folder.iterdir()) == [CONFIG_NAME, WEIGHTS_NAME]
        assert all((one == folder) == (files is None) for one in validator.folders)
        if files:
            assert linked.read_bytes() == before
        assert world.left_over() == []


async def test_conversion_that_is_damaged_on_its_way_back_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with elsewhere(tmp_path, "one") as world:
        world.replica.served.validator = Rewriting()
        gateway = world.gateways[0]
        run = gateway.blobs.run

        def damaging(link: ReplicaLink, message: FromEngine) -> None:
            if isinstance(message, WritePiece) and message.offset:
                message = WritePiece(message.call_id, message.of, message.name, message.offset, message.content[:-1])
            run(link, message)

        monkeypatch.setattr(gateway.blobs, "run", damaging)
        remote = RemoteValidator(gateway.client, asyncio.get_running_loop())
        with pytest.raises(AdapterUnavailableError, match="damaged on its way from"):
            await asyncio.to_thread(lambda: remote.convert(staged(adapter_in(tmp_path / "one" / "staged"))))


async def test_replica_reads_and_writes_nothing_that_it_was_not_asked_about(tmp_path: Path, digest: str) -> None:
    async with elsewhere(tmp_path, "one") as world:
        store, (gateway,) = world.gateways[0].store, world.replica.engine.gateways.attached
        store.put(digest, tmp_path / "adapter")
        (tmp_path / "secret").write_text("secret")
        for call in (
            ReadPiece(901, 900, "../../secret", 0),
            WritePiece(902, 1, WEIGHTS_NAME, 0, b"x"),
            WritePiece(903, 1, "../x", 0, b"x"),
        ):
            with pytest.raises(AdapterUnavailableError, match="elsewhere"):
                await asyncio.to_thread(world.blobs._ask, gateway, call)
