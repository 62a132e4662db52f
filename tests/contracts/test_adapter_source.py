"""What every adapter source must do; each source inherits the class. Redis and HTTP are real servers."""

from __future__ import annotations

import io
import tarfile
import threading
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pytest
import redis
from aiohttp import web
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from lora_serve.adapters.sources import filesystem
from lora_serve.adapters.sources.archive_url import ArchiveUrlSource
from lora_serve.adapters.sources.base import AdapterSource, OnBytes, no_progress
from lora_serve.adapters.sources.connections import Timeouts
from lora_serve.adapters.sources.filesystem import FilesystemSource
from lora_serve.adapters.sources.folder import FolderSource
from lora_serve.adapters.sources.hub import HubSource
from lora_serve.adapters.sources.redis_key import RedisKeySource
from lora_serve.adapters.sources.table import SourceTable
from lora_serve.commands.server_process import free_port
from lora_serve.core.errors import (
    AdapterUnavailableError,
    InvalidAdapterError,
    InvalidRequestError,
    NotReadyError,
    PayloadTooLargeError,
)
from tests.fake_hub import COMMIT, FakeHub
from tests.http_thread import break_off, serving

CONFIG, WEIGHTS, TOKENIZER = "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"
FILES = {CONFIG: b'{"r": 1}', WEIGHTS: Random(0).randbytes(2_560_000), TOKENIZER: b'{"added_tokens": []}'}
OTHERS = {"README.md": b"read me", "optimizer.pt": b"no"}
LIMIT = 2**23


def without(*names: str) -> dict[str, bytes]:
    return {name: content for name, content in FILES.items() if name not in names}


class Place:
    """Somewhere that adapters can be put, and the source that finds them there."""

    scheme = ""
    malformed: tuple[str, ...] = ()

    def source(self) -> AdapterSource:
        raise AssertionError

    def put(self, files: dict[str, bytes]) -> str:
        """Keep the files and say where they are."""
        raise AssertionError

    def words(self, source: str) -> str:
        """What the card should say."""
        return source

    def put_broken(self, files: dict[str, bytes]) -> tuple[str, OnBytes]:
        """Something whose transfer breaks in the middle, perhaps by the doing of the progress callback."""
        raise AssertionError

    def away(self) -> tuple[AdapterSource, str]:
        """A source that cannot be reached, and something to ask of it."""
        raise AssertionError


class AdapterSourceContract(ABC):
    """Inherit it and give a `place` fixture."""

    @pytest.fixture
    @abstractmethod
    def place(self, tmp_path: Path) -> Place | Iterator[Place]: ...

    @pytest.fixture
    def tmp(self, tmp_path: Path) -> Path:
        (tmp_path / "store").mkdir()
        return tmp_path / "store"

    @pytest.fixture
    def fetch(self, place: Place, tmp: Path) -> Callable[..., dict[str, bytes]]:
        """fetch(source) -> the files that came; checks that nothing is left beside them, and after errors nothing."""

        def fetch(
            source: str, limit: int = LIMIT, progress: OnBytes = no_progress, by: AdapterSource | None = None
        ) -> dict[str, bytes]:
            target = tmp / f"{threading.get_ident()}"
            target.mkdir()
            try:
                words = SourceTable({place.scheme: by or place.source()}).fetch(source, target, limit, progress)
            except BaseException:
                assert not target.exists()
                raise
            assert by is not None or words == place.words(source)
            found = {path.name: path.read_bytes() for path in target.iterdir()}
            for path in target.iterdir():
                path.unlink()
            target.rmdir()
            return found

        return fetch

    @pytest.fixture(autouse=True)
    def nothing_stays_behind(self, tmp: Path) -> Iterator[None]:
        yield
        assert list(tmp.iterdir()) == []

    def test_brings_the_named_files_and_nothing_else(self, place: Place, fetch: Callable[..., Any]) -> None:
        assert fetch(place.put(FILES | OTHERS)) == FILES
        assert fetch(place.put(without(TOKENIZER))) == without(TOKENIZER)

    @pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
    def test_missing_file_is_named(self, place: Place, fetch: Callable[..., Any], name: str) -> None:
        with pytest.raises(InvalidAdapterError, match=name) as caught:
            fetch(place.put(without(name)))
        (other,) = {CONFIG, WEIGHTS} - {name}
        assert other not in str(caught.value)

    def test_pickle_instead_of_safetensors_is_refused_in_words(self, place: Place, fetch: Callable[..., Any]) -> None:
        with pytest.raises(InvalidAdapterError, match="save the adapter as safetensors"):
            fetch(place.put(without(WEIGHTS) | {"adapter_model.bin": b"x"}))

    def test_pickle_beside_safetensors_does_not_come_along(self, place: Place, fetch: Callable[..., Any]) -> None:
        found = fetch(place.put(FILES | {"adapter_model.bin": b"x"}))
        assert {name: content for name, content in found.items() if content} == FILES

    def test_what_is_not_there_is_the_callers_mistake(self, place: Place, fetch: Callable[..., Any]) -> None:
        source = place.put(FILES)
        with pytest.raises((InvalidRequestError, InvalidAdapterError)):
            fetch(source.replace("adapter", "nothing"))

    def test_too_large_is_refused_and_the_limit_itself_is_not(self, place: Place, fetch: Callable[..., Any]) -> None:
        source, size = place.put(without(TOKENIZER)), sum(map(len, without(TOKENIZER).values()))
        with pytest.raises(PayloadTooLargeError, match="--max-upload-size"):
            fetch(source, limit=size - 1)
        with pytest.raises(PayloadTooLargeError):
            fetch(source, limit=10)
        assert fetch(source, limit=size + 20480) == without(TOKENIZER)  # an archive takes a little more

    def test_transfer_that_breaks_is_said_to_be_for_now(self, place: Place, fetch: Callable[..., Any]) -> None:
        source, progress = place.put_broken(FILES)
        with pytest.raises(AdapterUnavailableError):
            fetch(source, progress=progress)

    def test_transfer_can_be_broken_off_from_here(self, place: Place, fetch: Callable[..., Any]) -> None:
        seen: list[int] = []

        def closing(num_bytes: int) -> None:
            seen.append(num_bytes)
            raise NotReadyError("closing")

        with pytest.raises(NotReadyError):
            fetch(place.put(FILES), progress=closing)
        assert len(seen) == 1

    def test_progress_never_goes_back_and_ends_with_all(self, place: Place, fetch: Callable[..., Any]) -> None:
        seen: list[int] = []
        fetch(place.put(FILES), progress=seen.append)
        assert seen == sorted(seen)
        assert seen[-1] >= len(FILES[WEIGHTS])

    def test_unreachable_is_said_to_be_for_now_and_without_secrets(
        self, place: Place, fetch: Callable[..., Any]
    ) -> None:
        source, asked = place.away()
        with pytest.raises(AdapterUnavailableError) as caught:
            fetch(asked, by=source)
        assert "secret" not in str(caught.value)

    def test_malformed_source_is_refused_naming_the_field(self, place: Place, fetch: Callable[..., Any]) -> None:
        assert place.malformed
        for source in place.malformed:
            with pytest.raises(InvalidRequestError) as caught:
                fetch(source)
            assert caught.value.param == "source", source

    def test_several_threads_fetch_at_once(self, place: Place, fetch: Callable[..., Any]) -> None:
        source = place.put(FILES)
        barrier = threading.Barrier(4)

        def work(_: int) -> Any:
            barrier.wait()
            return fetch(source)

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(work, range(4))) == [FILES] * 4


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


class FolderPlace(Place):
    malformed = ("../adapter", "a\0b", "nothing/here")

    def __init__(self, root: Path) -> None:
        self.root = root

    def source(self) -> AdapterSource:
        return FolderSource((self.root, Path("/proc")))

    def put(self, files: dict[str, bytes]) -> str:
        write(self.root / "adapter", files)
        return str(self.root / "adapter")

    def words(self, source: str) -> str:
        return f"folder {source}"

    def put_broken(self, files: dict[str, bytes]) -> tuple[str, OnBytes]:
        """The kernel answers EIO to whoever reads a process's memory from address 0."""
        source = self.put(without(WEIGHTS))
        (self.root / "adapter" / WEIGHTS).symlink_to("/proc/self/mem")
        return source, no_progress


class TestFolder(AdapterSourceContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return FolderPlace(tmp_path / "root")

    def test_unreachable_is_said_to_be_for_now_and_without_secrets(
        self, place: Place, fetch: Callable[..., Any]
    ) -> None:
        """A folder is there or it is not: never "not now"."""
        with pytest.raises(InvalidRequestError, match="allowed root"):
            fetch("adapter")


class BucketFileSystem(DirFileSystem):  # type: ignore[misc]
    """Local folders as buckets."""

    protocol = "bucket"
    async_impl = False

    def __init__(self, root: str, **options: Any) -> None:
        super().__init__(path=root, fs=LocalFileSystem(), **options)


class UnreachableFileSystem(DirFileSystem):  # type: ignore[misc]
    protocol = "unreachable"

    def __init__(self, **options: Any) -> None:
        raise ConnectionError("key=secret")


class BucketPlace(Place):
    scheme = "bucket"
    malformed = (
        "bucket://",
        "bucket:///adapter",
        "bucket://b/../adapter",
        "bucket://b//adapter",
        "bucket://key:secret@b/adapter",
        "bucket://b/adapter::file:///etc",
        "bucket://b/*",
        "bucket://b/adapter#1",
        "bucket://b/ad\napter",
        "file:///etc",
        "local:///etc",
        "memory://b/adapter",
        "filecache::bucket://b/adapter",
        "dir://b/adapter",
    )

    def __init__(self, root: Path) -> None:
        self.root = root
        fsspec.register_implementation("bucket", BucketFileSystem, clobber=True)
        fsspec.register_implementation("unreachable", UnreachableFileSystem, clobber=True)

    def source(self) -> AdapterSource:
        return FilesystemSource("bucket", "bucketfs", {"root": str(self.root)})

    def put(self, files: dict[str, bytes]) -> str:
        write(self.root / "b" / "adapter", files)
        return "bucket://b/adapter"

    def put_broken(self, files: dict[str, bytes]) -> tuple[str, OnBytes]:
        return self.put(files), lambda _: (self.root / "b" / "adapter" / WEIGHTS).unlink(missing_ok=True)

    def away(self) -> tuple[AdapterSource, str]:
        return FilesystemSource("unreachable", "bucketfs"), "bucket://b/adapter"


class TestFilesystem(AdapterSourceContract):
    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
        monkeypatch.setattr(filesystem, "_PIECE_BYTES", 100_000)
        return BucketPlace(tmp_path / "root")

    def test_object_that_is_exchanged_meanwhile_is_not_taken(
        self, place: BucketPlace, fetch: Callable[..., Any]
    ) -> None:
        source = place.put(FILES)
        path = place.root / "b" / "adapter" / WEIGHTS

        def exchange(num_bytes: int) -> None:
            if num_bytes > 10**6:
                path.unlink(missing_ok=True)
                path.write_bytes(FILES[WEIGHTS][::-1])

        with pytest.raises(AdapterUnavailableError, match="changed"):
            fetch(source, progress=exchange)

    def test_missing_package_is_named_with_the_extra(self, place: Place, fetch: Callable[..., Any]) -> None:
        place.scheme = "gs"
        with pytest.raises(InvalidRequestError, match=r"lora-serve\[sources\]' gcsfs") as caught:
            fetch("gs://b/adapter", by=FilesystemSource("gs", "gcsfs"))
        assert caught.value.param == "source"

    def test_folder_that_may_not_be_read_is_the_operators_to_allow(
        self, place: BucketPlace, fetch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forbidden(self: Any, path: str, **options: Any) -> Any:
            raise PermissionError("Access Denied for key secret")

        monkeypatch.setattr(BucketFileSystem, "info", forbidden)
        with pytest.raises(InvalidRequestError, match="credentials may not read") as caught:
            fetch(place.put(FILES))
        assert "secret" not in str(caught.value)


def tar_of(files: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(f"adapter/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


class ArchivePlace(Place):
    """Archives on a web server; `hops` says where redirects lead."""

    scheme = "http"
    malformed = (
        "http://",
        "http://host",
        "http://user:secret@127.0.0.1/archives/adapter.tar",
        "http://127.0.0.1:99999/archives/adapter.tar",
        "http://127.0.0.1/archives/adapter.tar#part",
        "http://127.0.0.1/archives/%zz",
        "http://127.0.0.1/archives/a b",
    )

    def __init__(self) -> None:
        self.archives: dict[str, bytes] = {}
        self.broken: set[str] = set()
        self.hops: dict[str, str] = {}
        self.asked: list[str] = []
        self.status = 200
        self.url = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.asked.append(request.path_qs)
        if path in self.hops:
            return web.Response(status=302, headers={"Location": self.hops[path]})
        if path not in self.archives or self.status != 200:
            return web.Response(status=404 if self.status == 200 else self.status)
        if path in self.broken:
            return await break_off(request, self.archives[path])
        return web.Response(body=self.archives[path])

    def source(self) -> AdapterSource:
        return ArchiveUrlSource([self.url + "/archives"], Timeouts(idle=5.0))

    def put(self, files: dict[str, bytes], pack: Callable[..., bytes] = tar_of) -> str:
        self.archives["/archives/adapter.tar"] = pack(files)
        return self.url + "/archives/adapter.tar"

    def put_broken(self, files: dict[str, bytes]) -> tuple[str, OnBytes]:
        self.broken.add("/archives/adapter.tar")
        return self.put(files), no_progress

    def away(self) -> tuple[AdapterSource, str]:
        url = f"http://127.0.0.1:{free_port()}/archives"
        return ArchiveUrlSource([url]), url + "/adapter.tar?signature=secret"


class TestArchiveUrl(AdapterSourceContract):
    @pytest.fixture
    def place(self) -> Iterator[ArchivePlace]:
        place = ArchivePlace()
        with serving(place.app()) as place.url:
            yield place

    @pytest.mark.parametrize("pack", [tar_of, lambda files: tar_of(files, "w"), zip_of])
    def test_tar_and_zip_are_known_by_their_first_bytes(
        self, place: ArchivePlace, fetch: Callable[..., Any], pack: Callable[..., bytes]
    ) -> None:
        assert fetch(place.put(FILES, pack)) == FILES

    def test_what_is_no_archive_is_refused(self, place: ArchivePlace, fetch: Callable[..., Any]) -> None:
        with pytest.raises(InvalidAdapterError, match=r"not a sound tar"):
            fetch(place.put(FILES, lambda files: b"<html>" * 1000))

    def test_signature_reaches_the_server_and_not_the_card(
        self, place: ArchivePlace, fetch: Callable[..., Any], tmp: Path
    ) -> None:
        source = place.put(FILES)
        (tmp / "t").mkdir()
        words = place.source().fetch(source + "?signature=secret%2F", tmp / "t", LIMIT, no_progress)
        assert words == source
        assert place.asked == ["/archives/adapter.tar?signature=secret%2F"]
        for path in (tmp / "t").iterdir():
            path.unlink()
        (tmp / "t").rmdir()

    def test_redirects_are_followed_below_the_allowed_beginning(
        self, place: ArchivePlace, fetch: Callable[..., Any]
    ) -> None:
        place.put(FILES)
        place.hops = {f"/archives/{i}": f"/archives/{i + 1}" for i in range(5)} | {"/archives/4": "adapter.tar"}
        place.words = lambda source: source  # type: ignore[method-assign]
        assert fetch(place.url + "/archives/0") == FILES
        assert len(place.asked) == 6

    def test_sixth_redirect_is_refused(self, place: ArchivePlace, fetch: Callable[..., Any]) -> None:
        place.hops = {"/archives/x": "/archives/x"}
        with pytest.raises(InvalidRequestError, match="5 redirects"):
            fetch(place.url + "/archives/x")
        assert len(place.asked) == 6

    @pytest.mark.parametrize(
        "target", ["/elsewhere/adapter.tar", "//[", "http://u@127.0.0.1/archives/a", "ftp://a/b", ""]
    )
    def test_redirect_that_leads_elsewhere_is_not_followed(
        self, place: ArchivePlace, fetch: Callable[..., Any], target: str
    ) -> None:
        place.archives["/elsewhere/adapter.tar"] = tar_of(FILES)
        place.hops = {"/archives/x": target or "../elsewhere/adapter.tar"}
        with pytest.raises(InvalidRequestError, match="redirects to where it may not"):
            fetch(place.url + "/archives/x")
        assert place.asked == ["/archives/x"]

    def test_url_outside_the_allowed_beginnings_is_not_even_asked(
        self, place: ArchivePlace, fetch: Callable[..., Any]
    ) -> None:
        place.archives["/elsewhere/adapter.tar"] = tar_of(FILES)
        with pytest.raises(InvalidRequestError, match="--adapter-url"):
            fetch(place.url + "/elsewhere/adapter.tar")
        with pytest.raises(InvalidRequestError, match="--adapter-url"):
            fetch(place.put(FILES), by=ArchiveUrlSource([]))
        assert place.asked == []

    @pytest.mark.parametrize(
        ("status", "kind"),
        [
            (404, InvalidRequestError),
            (403, InvalidRequestError),
            (503, AdapterUnavailableError),
            (429, AdapterUnavailableError),
        ],
    )
    def test_status_of_the_answer_says_whose_fault_it_is(
        self, place: ArchivePlace, fetch: Callable[..., Any], status: int, kind: type[Exception]
    ) -> None:
        source, place.status = place.put(FILES), status
        with pytest.raises(kind, match=str(status)):
            fetch(source)

    def test_proxy_of_the_environment_is_not_asked(
        self, place: ArchivePlace, fetch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
        assert fetch(place.put(FILES)) == FILES

    def test_server_that_says_nothing_is_given_up(self, place: ArchivePlace, fetch: Callable[..., Any]) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
            with pytest.raises(AdapterUnavailableError, match="TimeoutError"):
                fetch(url + "adapter.tar", by=ArchiveUrlSource([url], Timeouts(idle=0.2)))

    def test_transfer_has_an_end_even_if_every_piece_is_in_time(
        self, place: ArchivePlace, fetch: Callable[..., Any]
    ) -> None:
        source = place.put(FILES)
        with pytest.raises(AdapterUnavailableError, match="too long"):
            fetch(source, by=ArchiveUrlSource([place.url], Timeouts(total=0.0)))


class HubPlace(Place):
    scheme = "hf"
    malformed = (
        "hf://",
        "hf://org",
        "hf://org/",
        "hf://org/repo/../other",
        "hf://org/repo@",
        "hf://org/repo@a..b",
        "hf://user:secret@org/repo",
        "hf://org/repo//folder",
        "hf://org/repo/a b",
    )

    def __init__(self) -> None:
        self.hub = FakeHub()
        self.url = ""

    def source(self) -> AdapterSource:
        return HubSource(self.url, timeout=5.0)

    def put(self, files: dict[str, bytes]) -> str:
        self.hub.repos["org/adapter"] = dict(files)
        return "hf://org/adapter"

    def words(self, source: str) -> str:
        return f"{source.partition('@')[0]}@{COMMIT}"

    def put_broken(self, files: dict[str, bytes]) -> tuple[str, OnBytes]:
        self.hub.broken.add("org/adapter")
        return self.put(files), no_progress

    def away(self) -> tuple[AdapterSource, str]:
        return HubSource(f"http://127.0.0.1:{free_port()}", timeout=1.0), "hf://org/adapter"


TEMPLATES = ("chat_template.jinja", "tokenizer_config.json", "generation_config.json")  # most adapters have none


class TestHub(AdapterSourceContract):
    @pytest.fixture
    def place(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubPlace]:
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_server")
        place = HubPlace()
        with serving(place.hub.app()) as place.url:
            yield place

    def test_folder_and_revision_lead_to_one_commit(self, place: HubPlace, fetch: Callable[..., Any]) -> None:
        old = "0" * 39 + "1"
        place.hub.revisions["refs/pr/1"] = place.hub.revisions[old] = old
        place.hub.repos["org/adapter"] = {f"a/b/{name}": content for name, content in FILES.items()}
        place.words = lambda source: f"hf://org/adapter/a/b@{old}"  # type: ignore[method-assign]
        assert fetch("hf://org/adapter/a/b@refs/pr/1") == FILES
        assert {path for _, path in place.hub.asked} == {f"a/b/{name}" for name in (*FILES, *TEMPLATES)}

    def test_branch_that_moves_meanwhile_does_not_mix_two_commits(
        self, place: HubPlace, fetch: Callable[..., Any]
    ) -> None:
        source = place.put(FILES)
        moved: list[int] = []

        def move(num_bytes: int) -> None:
            moved.append(place.hub.revisions.pop("main", None) is not None)

        assert fetch(source, progress=move) == FILES
        assert any(moved)

    def test_token_is_not_shown_to_where_the_hub_redirects(self, place: HubPlace, fetch: Callable[..., Any]) -> None:
        """As to the hosts of large files."""
        source, other = place.put(FILES), FakeHub(dict(place.hub.repos))
        with serving(other.app()) as url:
            place.hub.elsewhere = url.replace("127.0.0.1", "localhost")
            assert fetch(source) == FILES
        assert set(place.hub.tokens) == {"Bearer hf_of_the_server"}
        assert set(other.tokens) == {None}

    def test_only_the_named_files_are_asked_for_with_the_servers_own_token(
        self, place: HubPlace, fetch: Callable[..., Any]
    ) -> None:
        fetch(place.put(FILES | OTHERS))
        assert {path for _, path in place.hub.asked} == {*FILES, *TEMPLATES}
        assert set(place.hub.tokens) == {"Bearer hf_of_the_server"}

    def test_too_large_a_repository_is_refused_before_a_byte_is_downloaded(
        self, place: HubPlace, fetch: Callable[..., Any]
    ) -> None:
        with pytest.raises(PayloadTooLargeError):
            fetch(place.put(FILES), limit=1000)
        assert {method for method, _ in place.hub.asked} == {"HEAD"}

    def test_download_itself_can_be_broken_off(self, place: HubPlace, fetch: Callable[..., Any]) -> None:
        seen: list[int] = []
        fetch(place.put(FILES), progress=seen.append)
        assert seen[0] == 0  # before anything came here: the bytes are still on their way to the client's own file

    def test_missing_gated_and_unknown_are_told_in_words(self, place: HubPlace, fetch: Callable[..., Any]) -> None:
        source = place.put(FILES)
        with pytest.raises(InvalidRequestError, match="no such revision"):
            fetch(source + "@v9")
        with pytest.raises(InvalidRequestError, match=r"The hub has no org/other.*HF_TOKEN"):
            fetch("hf://org/other")
        place.hub.gated.add("org/adapter")
        with pytest.raises(InvalidRequestError, match="gated"):
            fetch(source)

    @pytest.mark.parametrize("status", [500, 503, 429])
    def test_hub_in_trouble_is_for_now(self, place: HubPlace, fetch: Callable[..., Any], status: int) -> None:
        place.hub.status = status
        with pytest.raises(AdapterUnavailableError, match="hub"):
            fetch("hf://org/adapter")

    def test_offline_mode_is_named(
        self, place: HubPlace, fetch: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(AdapterUnavailableError, match="HF_HUB_OFFLINE"):
            fetch(place.put(FILES))


class RedisPlace(Place):
    scheme = "redis"
    malformed = ("redis://", "redis://user:secret@host/0", "redis://lora_serve:catalog", "redis://lora_serve")

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = redis.Redis.from_url(url)

    def source(self) -> AdapterSource:
        return RedisKeySource(self.url)

    def put(self, files: dict[str, bytes]) -> str:
        self.client.delete("acme:adapter/1")
        self.client.hset("acme:adapter/1", mapping=files)
        return "redis://acme:adapter/1"

    def put_broken(self, files: dict[str, bytes]) -> tuple[str, OnBytes]:
        return self.put(files), lambda _: self.client.client_kill_filter(_type="normal", skipme=True)

    def away(self) -> tuple[AdapterSource, str]:
        return RedisKeySource(f"redis://:secret@127.0.0.1:{free_port()}/0"), "redis://adapter"


class TestRedisKey(AdapterSourceContract):
    @pytest.fixture
    def place(self, redis_url: str) -> Iterator[RedisPlace]:
        place = RedisPlace(redis_url)
        yield place
        place.client.close()

    @pytest.mark.parametrize("pack", [tar_of, lambda files: tar_of(files, "w"), zip_of])
    def test_string_may_hold_an_archive(
        self, place: RedisPlace, fetch: Callable[..., Any], pack: Callable[..., bytes]
    ) -> None:
        place.client.set("adapter.tar", pack(FILES))
        assert fetch("redis://adapter.tar") == FILES

    def test_archive_too_large_is_refused(self, place: RedisPlace, fetch: Callable[..., Any]) -> None:
        place.client.set("adapter.tar", tar_of(FILES, "w"))
        with pytest.raises(PayloadTooLargeError):
            fetch("redis://adapter.tar", limit=1000)

    @pytest.mark.parametrize("pack", [tar_of, zip_of])
    def test_damaged_archive_is_refused(
        self, place: RedisPlace, fetch: Callable[..., Any], pack: Callable[..., bytes]
    ) -> None:
        content = bytearray(pack(FILES))
        content[len(content) // 2] ^= 1
        for damaged in (bytes(content), pack(FILES)[:-8], pack(FILES)[:-8] + bytes(8), pack(FILES) + b"x"):
            place.client.set("adapter.tar", damaged)
            with pytest.raises(InvalidAdapterError):
                fetch("redis://adapter.tar")

    @pytest.mark.parametrize("packed", [False, True])
    def test_key_that_is_written_meanwhile_is_not_taken(
        self, place: RedisPlace, fetch: Callable[..., Any], packed: bool
    ) -> None:
        source = place.put(FILES)
        if packed:
            place.client.set("acme:adapter/1", tar_of(FILES, "w"))

        def write(num_bytes: int) -> None:
            if packed:
                place.client.setrange("acme:adapter/1", 600, b"x")
            else:
                place.client.hset("acme:adapter/1", WEIGHTS, FILES[WEIGHTS][::-1])

        with pytest.raises(AdapterUnavailableError, match="changed"):
            fetch(source, progress=write)

    def test_other_kinds_of_keys_and_no_key_are_told(self, place: RedisPlace, fetch: Callable[..., Any]) -> None:
        place.client.rpush("list", "a")
        with pytest.raises(InvalidRequestError, match="is a list"):
            fetch("redis://list")
        with pytest.raises(InvalidRequestError, match="is not there"):
            fetch("redis://127.0.0.1:6379/0")

    def test_server_without_redis_says_so(self, fetch: Callable[..., Any]) -> None:
        with pytest.raises(InvalidRequestError, match="--redis-url"):
            fetch("redis://adapter", by=RedisKeySource(None))
