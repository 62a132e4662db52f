"""`registry backup` beside a running server, and `registry restore`: what is restored was there at one moment."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest
import redis
from msgspec.structs import replace

from lora_serve.adapters.catalog.journals.base import Journal
from lora_serve.adapters.maintenance import backup
from lora_serve.adapters.maintenance.registries import open_registry
from lora_serve.adapters.storage import open_storage
from lora_serve.cli import main
from lora_serve.commands.output import ExitCode
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError
from lora_serve.core.setting_groups.operation import AccountingConfig
from lora_serve.core.tenant import Role
from lora_serve.tenancy.accounting import open_accounting
from lora_serve.tenancy.admin_key import load_admin_key
from lora_serve.tenancy.audit_journal import Act
from lora_serve.tenancy.directory import open_directory
from lora_serve.tenancy.usage import UsageFigures, UsageKey
from tests import registries


def config_of(store: Path, url: str | None = None) -> AdapterConfig:
    return AdapterConfig(
        store=store, redis_url=url, max_loras=4, max_lora_rank=64, adapter_host_memory=10**8, max_upload_size=10**7
    )


async def account(config: AdapterConfig) -> None:
    async with open_accounting(config, AccountingConfig()) as books:
        books.meter.record(UsageKey("acme", "a", "1", "sha256:a"), UsageFigures(requests=7))
        await books.meter.flush()
        await books.audit.append(Act("admin", "admin", "admin", "POST /admin/tenants", "acme", "acme", "", 201, "r"))


async def accounted(config: AdapterConfig) -> tuple[int, int]:
    """Requests and lines of the audit log."""
    async with open_accounting(config, AccountingConfig()) as books:
        rows, _ = await books.meter.rows(0, 2**40)
        page = await books.audit.page(9, None, lambda line: True)
        return sum(figures.requests for *_, figures in rows), len(page.lines)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a server with adapters, a tenant, an admin key, usage and an audit log."""
    monkeypatch.chdir(tmp_path)
    registries.fill("store")
    load_admin_key(None, tmp_path / "store")
    asyncio.run(account(config_of(tmp_path / "store")))
    return tmp_path / "store"


def test_backup_beside_a_running_server_and_restore_bring_everything_back(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = registries.content(store)
    with open_storage(config_of(store)) as storage, open_directory(config_of(store)) as directory:
        directory.create_tenant("acme")
        _, secret = directory.create_key("acme", Role.INFERENCE)
        assert main(["registry", "backup", "--to", "backup", "--store", "store", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["blobs"], len(document["databases"])) == (4, 4)
        storage.catalog.remove("acme/x")  # after it
    assert not any(path.name in ("admin_key", "replica", "lock") for path in (tmp_path / "backup").iterdir())
    words = b"".join(path.read_bytes() for path in (tmp_path / "backup").rglob("*") if path.is_file())
    assert secret.encode() not in words
    assert (store / "admin_key").read_bytes().strip() not in words
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "backup").rglob("*"))
    shutil.rmtree(store)
    assert main(["registry", "restore", "--from", "backup", "--store", "again"]) == 0
    again = tmp_path / "again"
    assert registries.content(again) == before
    with open_storage(config_of(again)), open_directory(config_of(again)) as directory:
        assert [tenant.name for tenant in directory.snapshot.tenants.values()] == ["acme"]
    assert asyncio.run(accounted(config_of(again))) == (7, 1)


def test_blob_that_is_deleted_while_the_backup_is_taken_makes_it_take_a_newer_moment(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = backup.BlobCopier.copy
    is_first = threading.Event()

    def deleting(copier: backup.BlobCopier, digest: str) -> None:
        if not is_first.is_set():
            is_first.set()
            with open_registry(registries.at(store), is_source=False) as place:
                registries.remove(place, "acme/x")
                registries.put(place, "new/one", "nine")
        copy(copier, digest)

    monkeypatch.setattr(backup.BlobCopier, "copy", deleting)
    assert main(["registry", "backup", "--to", "backup", "--store", "store"]) == 0
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["registry", "restore", "--from", "backup", "--store", "again"]) == 0
    assert registries.content(tmp_path / "again") == registries.content(store)


@pytest.mark.parametrize(
    "damage", [registries.corrupt, lambda store, digest: shutil.rmtree(registries.blob(store, digest))]
)
def test_broken_blob_is_left_out_and_named_and_everything_else_is_restored(
    store: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path, str], None]
) -> None:
    with open_registry(registries.at(store), is_source=False) as place:
        digest = place.catalog.entry("initech/z").default.digest
    damage(store, digest)
    for verb, arguments in (
        ("backup", ["--to", "backup", "--store", "store"]),
        ("restore", ["--from", "backup", "--store", "again"]),
    ):
        assert main(["registry", verb, *arguments, "--json"]) == 1
        said = capsys.readouterr()
        assert json.loads(said.out)["missing"] == [{"digest": digest, "named_by": ["initech/z@1"]}]
        assert f"{digest}, named by initech/z@1" in said.err
    listed = json.loads((store.parent / "backup" / "backup.json").read_text())
    assert listed["missing"] == {digest: ["initech/z@1"]}
    assert not (store.parent / "backup" / "backup.incomplete").exists()
    with open_storage(config_of(store.parent / "again")) as storage:
        assert set(storage.catalog.snapshot.entries) == {"acme/x", "y", "initech/z"}
        assert storage.store.digests() == storage.catalog.snapshot.digests - {digest}
        with pytest.raises(AdapterUnavailableError), storage.store.open(digest):
            pass


def test_blob_that_is_gone_from_a_shared_registry_is_left_out_and_named(redis_url: str, tmp_path: Path) -> None:
    registries.fill(redis_url)
    with open_registry(registries.at(redis_url), is_source=True) as place:
        before, digest = set(place.catalog.snapshot.entries), place.catalog.entry("initech/z").default.digest
        place.store.delete(digest)
    backup = str(tmp_path / "backup")
    assert main(["registry", "backup", "--to", backup, "--redis-url", redis_url]) == 1
    with closing(redis.Redis.from_url(redis_url)) as client:
        client.flushdb()
    assert main(["registry", "restore", "--from", backup, "--redis-url", redis_url]) == 1
    with open_registry(registries.at(redis_url), is_source=True) as place:
        assert set(place.catalog.snapshot.entries) == before
        assert not place.store.has(digest)
    with open_storage(config_of(tmp_path / "replica", redis_url)) as storage:
        assert set(storage.catalog.snapshot.entries) == before


def test_registry_that_changes_without_a_rest_and_has_a_broken_blob_is_backed_up(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registries.corrupt(store, broken := _digest_of(store, "initech/z"))
    copy, names = backup.BlobCopier.copy, iter(range(100))

    def changing(copier: backup.BlobCopier, digest: str) -> None:
        with open_registry(registries.at(store), is_source=False) as place:
            place.catalog.edit("y", lambda entry: replace(entry, metadata={"run": next(names)}))
        copy(copier, digest)

    monkeypatch.setattr(backup.BlobCopier, "copy", changing)
    assert main(["registry", "backup", "--to", "backup", "--store", "store"]) == 1
    assert list(json.loads((store.parent / "backup" / "backup.json").read_text())["missing"]) == [broken]


def _digest_of(store: Path, name: str) -> str:
    with open_registry(registries.at(store), is_source=False) as place:
        return place.catalog.entry(name).default.digest


@pytest.mark.parametrize("step", ["copy_database", "_consistent", "_take_others", "sync_records", "write_list"])
def test_backup_that_breaks_off_is_not_restored_and_completed_by_another(
    store: Path, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(backup, step, killed)
        assert main(["registry", "backup", "--to", "backup", "--store", "store"]) == 130
    assert main(["registry", "restore", "--from", "backup", "--store", "again"]) == 2
    assert main(["registry", "backup", "--to", "backup", "--store", "store"]) == 0
    assert main(["registry", "restore", "--from", "backup", "--store", "again"]) == 0
    assert registries.content(tmp_path / "again") == registries.content(store)


@pytest.mark.parametrize("step", ["read_journal", "_copy_blobs", "sync_records"])
def test_restore_that_breaks_off_starts_no_server_and_is_completed_by_another(
    store: Path, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["registry", "backup", "--to", "backup", "--store", "store"]) == 0

    def killed(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(backup, step, killed)
        assert main(["registry", "restore", "--from", "backup", "--store", "again"]) == 130
    assert not (tmp_path / "again" / "catalog.sqlite3").exists()
    assert main(["registry", "restore", "--from", "backup", "--store", "again"]) == 0
    assert registries.content(tmp_path / "again") == registries.content(store)


def test_restored_catalog_stands_only_once_all_else_is_flushed(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power might leave a store in which a server starts, and knows no tenants."""
    with open_directory(config_of(store)) as directory:
        directory.create_tenant("acme")
    assert main(["registry", "backup", "--to", "backup", "--store", "store"]) == 0
    flushed: list[set[str]] = []
    really_flush = backup.flush

    def flush(path: Path) -> None:
        really_flush(path)
        flushed.append({file.name for file in path.iterdir()} if path.is_dir() else set())

    monkeypatch.setattr(backup, "flush", flush)
    assert main(["registry", "restore", "--from", "backup", "--store", "again"]) == 0
    others = {"tenants.sqlite3", "usage.sqlite3", "audit.sqlite3"}
    assert [others <= names for names in flushed if backup.CATALOG_NAME not in names][-1]


def spoil_list(backup: Path) -> None:
    (backup / "backup.json").write_text("{}")


def nest_list(backup: Path) -> None:
    (backup / "backup.json").write_text("[" * 100_000)


def spoil_database(backup: Path) -> None:
    with (backup / "tenants.sqlite3").open("ab") as file:
        file.write(b"x")


def spoil_blob(backup: Path) -> None:
    path = next(backup.glob("blobs/*/adapter_model.safetensors"))
    path.write_bytes(b"!" + path.read_bytes()[1:])


@pytest.mark.parametrize(("spoil", "code"), [(spoil_list, 2), (nest_list, 2), (spoil_database, 2), (spoil_blob, 1)])
def test_backup_that_was_changed_is_not_restored(store: Path, spoil: Callable[[Path], None], code: int) -> None:
    with open_directory(config_of(store)):
        pass
    assert main(["registry", "backup", "--to", "backup", "--store", "store"]) == 0
    spoil(store.parent / "backup")
    assert main(["registry", "restore", "--from", "backup", "--store", "again"]) == code
    left = {path.name for path in (store.parent / "again").glob("*")}
    assert left <= {"lock"}  # nothing that a server would start on, or that keeps another restore away


def test_restore_into_a_store_that_holds_something_or_is_in_use_is_refused(store: Path, tmp_path: Path) -> None:
    assert main(["registry", "backup", "--to", "backup", "--store", "store"]) == 0
    before = registries.content(store)
    assert main(["registry", "restore", "--from", "backup", "--store", "store"]) == 2
    assert registries.content(store) == before
    with open_storage(config_of(tmp_path / "busy")):
        assert main(["registry", "restore", "--from", "backup", "--store", "busy"]) == 2


def test_shared_registry_and_its_tenants_are_restored_into_an_emptied_redis(redis_url: str, tmp_path: Path) -> None:
    registries.fill(redis_url)
    before = registries.content(redis_url)
    with open_directory(config_of(tmp_path / "a", redis_url)) as directory:
        directory.create_tenant("acme")
    backup = ["registry", "backup", "--to", str(tmp_path / "backup"), "--redis-url", redis_url]
    restore = ["registry", "restore", "--from", str(tmp_path / "backup"), "--redis-url", redis_url]
    assert main(backup) == 0
    assert main(restore) == 2  # there is one
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    assert main(restore) == 0
    assert registries.content(redis_url) == before
    with open_directory(config_of(tmp_path / "b", redis_url)) as directory:
        assert list(directory.snapshot.tenants) == ["acme"]
    with closing(redis.Redis.from_url(redis_url)) as client:
        assert len(list(client.scan_iter("lora_serve:adapters:*:records"))) == 4


def test_restore_into_redis_that_breaks_off_after_the_tenants_is_completed_by_another(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, restore = _backed_up_with_a_tenant(redis_url, tmp_path)
    _break_off_before_the_registry(restore, monkeypatch)
    with closing(redis.Redis.from_url(redis_url)) as client:
        assert not client.exists("lora_serve:registry:position")
        assert client.exists("lora_serve:tenants:position")
    assert main(restore) == 0
    assert registries.content(redis_url) == before
    with open_directory(config_of(tmp_path / "b", redis_url)) as directory:
        assert list(directory.snapshot.tenants) == ["acme"]


def test_restore_that_breaks_off_is_not_completed_over_what_a_server_has_begun_since(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, restore = _backed_up_with_a_tenant(redis_url, tmp_path)
    _break_off_before_the_registry(restore, monkeypatch)
    with open_directory(config_of(tmp_path / "b", redis_url)) as directory:
        directory.create_tenant("globex")
    assert main(restore) == ExitCode.UNAVAILABLE
    assert "A server has begun" in capsys.readouterr().err
    with open_directory(config_of(tmp_path / "c", redis_url)) as directory:
        assert set(directory.snapshot.tenants) == {"acme", "globex"}


def _backed_up_with_a_tenant(redis_url: str, tmp_path: Path) -> tuple[registries.Content, list[str]]:
    """Content of a registry whose Redis was emptied after a backup, and the command that restores it."""
    registries.fill(redis_url)
    before, backup = registries.content(redis_url), str(tmp_path / "backup")
    with open_directory(config_of(tmp_path / "a", redis_url)) as directory:
        directory.create_tenant("acme")
    assert main(["registry", "backup", "--to", backup, "--redis-url", redis_url]) == 0
    with closing(redis.Redis.from_url(redis_url)) as client:
        client.flushall()
    return before, ["registry", "restore", "--from", backup, "--redis-url", redis_url]


def _break_off_before_the_registry(restore: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    commit_anew, steps = backup._commit_anew, iter(["tenants"])

    def killed(journal: Journal, records: Mapping[str, str | None]) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        commit_anew(journal, records)

    with monkeypatch.context() as patched:
        patched.setattr(backup, "_commit_anew", killed)
        assert main(restore) == 130
