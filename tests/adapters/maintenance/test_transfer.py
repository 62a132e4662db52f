"""A registry copied into another, folders and a real redis-server: all of it, verified, or it is said why not."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from lora_serve.adapters.catalog.entry import CatalogEntry
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.catalog.state import saved
from lora_serve.adapters.maintenance.registries import open_registry
from lora_serve.adapters.maintenance.transfer import (
    MARK,
    MergeOutcome,
    Transfer,
    TransferReport,
    finish_export,
    open_ends,
)
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.disk_tables import is_record
from lora_serve.core.errors import AdapterUnavailableError, ConfigError
from lora_serve.core.model_spec import ModelSpec
from tests.adapters.registration.registering_process import open_for_registering
from tests.catalog_versions import held
from tests.loading import fetch_adapter
from tests.redis_server import RedisServer
from tests.registries import at, blob, check_whole, content, content_of, copy, corrupt, fill, put, remove
from tests.tiers import mostly_nightly

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter

SCRIPT = Path(__file__).with_name("transferring_process.py")


def outcomes(report: TransferReport) -> dict[str, str]:
    return {line.name: line.outcome.value for line in report.lines}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    fill(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture(params=["embedded", "redis"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("redis_url") if request.param == "redis" else str(tmp_path / "target")


def test_round_trip_through_every_kind_gives_the_same_registry(source: Path, redis_url: str, tmp_path: Path) -> None:
    expected = content(source)
    assert expected[0]["acme/x"].last_version == 4
    assert expected[0]["acme/x"].route.canary is not None
    assert len(expected[1]) == 2
    way = [source, redis_url, tmp_path / "a", tmp_path / "b"]
    for here, there in pairwise(way):
        report = copy(here, there)
        assert outcomes(report) == {"acme/x": "made", "initech/z": "made", "y": "made"}
        assert (report.is_whole, report.num_blobs) == (True, 4)
        assert content(there) == expected


def test_copy_again_changes_nothing(source: Path, target: str) -> None:
    copy(source, target)
    with open_registry(at(target), is_source=True) as place:
        before = place.catalog.snapshot.position
    for overwrite in (False, True):
        report = copy(source, target, overwrite)
        assert set(outcomes(report).values()) == {"unchanged"}
        assert (report.num_blobs, report.num_bytes) == (0, 0)
    with open_registry(at(target), is_source=True) as place:
        assert place.catalog.snapshot.position == before


def test_id_with_the_same_versions_keeps_the_route_pin_and_aliases_it_has_there(source: Path, target: str) -> None:
    copy(source, target)
    with open_registry(at(target), is_source=False) as place:
        place.catalog.set_route("acme/x", 1, None)
        place.catalog.set_pinned("acme/x", False)
        place.catalog.remove_alias("live")
        changed = content_of(place.catalog)
    assert outcomes(copy(source, target))["acme/x"] == "unchanged"
    assert content(target) == changed
    assert outcomes(copy(source, target, overwrite=True))["acme/x"] == "overwritten"
    assert content(target) == content(source)


def test_conflict_leaves_the_id_alone_and_stops_no_other(source: Path, target: str) -> None:
    with open_registry(at(target), is_source=False) as place:
        put(place, "acme/x", "something else")
        before = place.catalog.entry("acme/x")
    report = copy(source, target)
    assert outcomes(report) == {"acme/x": "conflict", "initech/z": "made", "y": "made"}
    assert not report.is_whole
    [line] = report.named(MergeOutcome.CONFLICT)
    assert "version 1 (sha256:" in line.reason
    entries, aliases = content(target)
    assert entries["acme/x"] == before
    assert aliases == {}


def test_overwritten_id_is_exactly_what_the_source_says_and_frees_its_other_blobs(source: Path, target: str) -> None:
    with open_registry(at(target), is_source=False) as place:
        for text in ("something else", "one", "more"):
            put(place, "acme/x", text)
        place.catalog.set_alias("old", "acme/x@3")
        place.catalog.set_alias("other", "acme/x")
    assert outcomes(copy(source, target, overwrite=True))["acme/x"] == "overwritten"
    assert content(target) == content(source)


def test_overwritten_versions_blob_that_another_id_names_stays(source: Path, target: str) -> None:
    with open_registry(at(target), is_source=False) as place:
        put(place, "acme/x", "shared")
        shared = put(place, "mine", "shared")
    copy(source, target, overwrite=True)
    assert content(target)[0]["mine"].default.digest == shared


def test_overwritten_blob_that_a_server_still_holds_stays_until_it_lets_go(source: Path, redis_url: str) -> None:
    with open_registry(at(redis_url), is_source=False, replica="server") as server:
        digest = put(server, "acme/x", "something else")
        holder = server.catalog.leases.acquire(digest)
        copy(source, redis_url, overwrite=True)
        server.catalog.refresh()
        assert server.store.has(digest)
        assert server.catalog.leases.release(digest, holder)
        server.store.delete(digest)
        server.catalog.leases.deleted(digest)
    assert content(redis_url) == content(source)


@pytest.mark.parametrize("overwrite", [False, True])
def test_alias_that_is_an_id_there_is_a_conflict_even_when_overwriting(
    source: Path, target: str, overwrite: bool
) -> None:
    with open_registry(at(target), is_source=False) as place:
        put(place, "live", "an adapter")
    report = copy(source, target, overwrite)
    assert [(line.name, "`live`" in line.reason) for line in report.named(MergeOutcome.CONFLICT)] == [("acme/x", True)]
    assert set(content(target)[0]) == {"live", "initech/z", "y"}


def test_alias_that_leads_elsewhere_and_a_name_that_is_an_alias_are_conflicts(source: Path, target: str) -> None:
    with open_registry(at(target), is_source=False) as place:
        put(place, "mine", "an adapter")
        place.catalog.set_alias("live", "mine")
        place.catalog.set_alias("initech/z", "mine")
    report = copy(source, target)
    assert outcomes(report) == {"acme/x": "conflict", "initech/z": "conflict", "y": "made"}
    assert copy(source, target, overwrite=True).is_whole
    entries, aliases = content(target)
    assert aliases == {"live": "acme/x", "first": "acme/x@1"}
    assert entries["initech/z"] == content(source)[0]["initech/z"]


def test_id_of_another_tenant_is_a_conflict(source: Path, target: str) -> None:
    with open_registry(at(target), is_source=False) as place:
        put(place, "y", "one", tenant="hooli")
    report = copy(source, target)
    assert "hooli" in report.named(MergeOutcome.CONFLICT)[0].reason


def test_missing_blob_in_the_source_keeps_its_id_out_and_is_named(source: Path, target: str) -> None:
    digest = content(source)[0]["acme/x"].version(3).digest
    shutil.rmtree(blob(source, digest))
    report = copy(source, target)
    assert outcomes(report) == {"acme/x": "refused", "initech/z": "made", "y": "made"}
    assert digest in report.named(MergeOutcome.REFUSED)[0].reason
    entries, aliases = content(target)
    assert set(entries) == {"initech/z", "y"}
    assert aliases == {}


@pytest.mark.parametrize("damage", ["a byte", "a file"])
def test_corrupt_blob_in_the_source_is_refused_and_what_was_copied_with_it_goes(
    source: Path, target: str, damage: str
) -> None:
    digest = content(source)[0]["acme/x"].version(4).digest
    if damage == "a byte":
        corrupt(source, digest)
    else:
        (blob(source, digest) / "adapter_config.json").unlink()
    report = copy(source, target)
    assert outcomes(report) == {"acme/x": "refused", "initech/z": "made", "y": "made"}
    reason = report.named(MergeOutcome.REFUSED)[0].reason
    assert digest in reason
    assert "corrupt" in reason
    assert set(content(target)[0]) == {"initech/z", "y"}


def test_chunk_that_redis_lost_is_a_missing_blob(source: Path, own_redis: RedisServer, tmp_path: Path) -> None:
    copy(source, own_redis.url)
    digest = content(source)[0]["initech/z"].default.digest
    with own_redis.client() as client:
        client.delete(f"lora_serve:adapters:{digest[7:]}:adapter_model.safetensors:0")
    assert outcomes(copy(own_redis.url, tmp_path / "there"))["initech/z"] == "refused"


def test_chunk_of_another_length_in_redis_is_refused(source: Path, own_redis: RedisServer, tmp_path: Path) -> None:
    copy(source, own_redis.url)
    digest = content(source)[0]["initech/z"].default.digest
    with own_redis.client() as client:
        client.set(f"lora_serve:adapters:{digest[7:]}:adapter_model.safetensors:0", b"short")
    report = copy(own_redis.url, tmp_path / "there")
    assert outcomes(report) == {"acme/x": "made", "initech/z": "refused", "y": "made"}


def test_blob_that_the_target_lost_is_given_back_to_an_id_that_is_there(source: Path, target: str) -> None:
    copy(source, target)
    with open_registry(at(target), is_source=False) as place:
        place.store.delete(place.catalog.entry("y").default.digest)
    report = copy(source, target)
    assert set(outcomes(report).values()) == {"unchanged"}
    assert report.num_blobs == 1
    assert content(target) == content(source)


def test_corrupt_blob_in_the_target_is_replaced_before_a_record_names_it(source: Path, own_redis: RedisServer) -> None:
    digest = content(source)[0]["initech/z"].default.digest
    with open_registry(at(own_redis.url), is_source=False) as place:
        assert put(place, "mine", "five") == digest
    with own_redis.client() as client:
        client.setrange(f"lora_serve:adapters:{digest[7:]}:adapter_model.safetensors:0", 0, b"!")
    assert copy(source, own_redis.url).is_whole
    assert "mine" in content(own_redis.url)[0]


def test_record_that_no_server_has_written_is_refused(source: Path, target: str) -> None:
    with open_registry(at(source), is_source=False) as place:
        entry = place.catalog.entry("initech/z")
        bad: list[CatalogEntry] = [
            replace(entry, name="a:b"),
            replace(entry, name="n1", versions=(replace(entry.default, digest="sha256:../../x"),)),
            replace(entry, name="n2", last_version=0),
            replace(entry, name="n3", tenant="../t"),
        ]
        for wrong in bad:
            place.catalog.ledger.change(lambda state, wrong=wrong: (saved(wrong), None))
        place.catalog.ledger.change(lambda state: ({"adapter:n4": "{}"}, None))
    report = copy(source, target)
    assert {line.name for line in report.named(MergeOutcome.REFUSED)} == {"n2"}
    assert report.unreadable == ("a:b", "n1", "n3", "n4")
    assert set(content(target)[0]) == {"acme/x", "initech/z", "y"}


def test_only_records_of_adapters_and_aliases_travel(source: Path, tmp_path: Path) -> None:
    (source / "admin_key").write_text("secret")
    (source / "hot.json").write_text("[]")
    with open_registry(at(source), is_source=False) as place:
        place.catalog.ledger.change(lambda state: ({"key:acme": "hash of a secret"}, None))
        place.catalog.leases.acquire("sha256:" + "a" * 64)
    folder = tmp_path / "backup"
    with open_ends(at(source), at(folder), is_export=True) as (first, second):
        assert Transfer(first, second, False, lambda done, total: None).run().is_whole
        finish_export(second)
    assert sorted(os.listdir(folder)) == ["blobs", "catalog.sqlite3"]
    assert b"secret" not in (folder / "catalog.sqlite3").read_bytes()
    assert [path.stat().st_mode & 0o077 for path in folder.rglob("*")] == [0] * len(list(folder.rglob("*")))
    with closing(open_catalog(folder)) as catalog:
        assert catalog.snapshot.digests == DiskStore(folder).digests()


def test_export_is_a_copy_that_a_damaged_store_does_not_damage(source: Path, tmp_path: Path) -> None:
    copy(source, tmp_path / "backup")
    for path in (source / "blobs").rglob("*.safetensors"):
        assert path.stat().st_nlink == 1
        with path.open("r+b") as file:
            file.write(b"!")
    content(tmp_path / "backup")


def test_export_goes_into_a_new_or_empty_folder_or_one_that_broke_off_only(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "thesis.txt").write_text("all of it")
    with pytest.raises(ConfigError, match="new or empty"), open_ends(at(source), at(folder), is_export=True):
        pass
    assert os.listdir(folder) == ["thesis.txt"]
    (folder / "thesis.txt").unlink()
    with open_ends(at(source), at(folder), is_export=True):
        pass
    assert (folder / MARK).is_file()
    with open_ends(at(source), at(folder), is_export=True) as (first, second):
        assert Transfer(first, second, False, lambda done, total: None).run().is_whole
        finish_export(second)
    assert content(folder) == content(source)


def test_exported_folder_serves_what_was_registered(
    make_adapter: MakeAdapter, spec: ModelSpec, tmp_path: Path, redis_url: str
) -> None:
    registry, catalog, _ = open_for_registering(tmp_path / "source", spec)
    refs = [registry.register_folder("acme/x", make_adapter(str(n), seed=n), trusted=True).ref for n in range(2)]
    catalog.close()
    copy(tmp_path / "source", redis_url)
    copy(redis_url, tmp_path / "backup")
    restored, catalog, store = open_for_registering(tmp_path / "backup", spec)
    with closing(catalog):
        for ref in refs:
            assert fetch_adapter(store, spec, catalog.resolve(f"acme/x@{ref.version}").ref).digest == ref.digest
        again = restored.register_folder("acme/x", tmp_path / "root" / "1", trusted=True)
        assert (again.created, again.ref) == (False, refs[1])


def test_source_that_is_not_there_is_not_made(tmp_path: Path, redis_url: str) -> None:
    for nothing in (tmp_path / "nowhere", redis_url):
        with pytest.raises(ConfigError, match="no registry"):
            copy(nothing, tmp_path / "there")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_a_server_uses_is_refused_at_either_end(source: Path, tmp_path: Path) -> None:
    with closing(open_catalog(source)):
        for ends in ((source, tmp_path / "there"), (tmp_path / "other", source)):
            fill(tmp_path / "other")
            with pytest.raises(ConfigError, match="another server is using this store"):
                copy(*ends)
            shutil.rmtree(tmp_path / "other")


def test_id_that_a_server_deletes_meanwhile_is_said(source: Path, redis_url: str, tmp_path: Path) -> None:
    copy(source, redis_url)
    with (
        open_registry(at(redis_url), is_source=False, replica="server") as server,
        open_ends(at(redis_url), at(tmp_path / "there")) as (first, second),
    ):
        remove(server, "initech/z")
        report = Transfer(first, second, False, lambda done, total: None).run()
    assert [(line.name, "meanwhile" in line.reason) for line in report.named(MergeOutcome.REFUSED)] == [
        ("initech/z", True)
    ]


def test_blob_that_a_server_is_deleting_in_the_target_is_waited_for(source: Path, redis_url: str) -> None:
    digest = content(source)[0]["initech/z"].default.digest
    with open_registry(at(redis_url), is_source=False, replica="server") as server:
        holder = server.catalog.leases.acquire(digest)
        assert server.catalog.leases.release(digest, holder)
        with pytest.raises(AdapterUnavailableError, match="being deleted"):
            copy(source, redis_url)
        server.catalog.refresh()
        server.catalog.leases.deleted(digest)
    assert copy(source, redis_url).is_whole
    assert content(redis_url) == content(source)


def test_hold_that_another_run_ended_is_noticed_before_the_record_is_written(source: Path, redis_url: str) -> None:
    def end_holds(done: int, total: int) -> None:
        with open_registry(at(redis_url), is_source=False) as other:
            for digest in held(other.catalog):
                other.catalog.leases.deleted(digest)

    with open_ends(at(source), at(redis_url)) as (first, second):
        with pytest.raises(AdapterUnavailableError, match="under way elsewhere"):
            Transfer(first, second, False, end_holds).run()
        assert content_of(second.catalog) == ({}, {})


def test_redis_that_dies_in_the_middle_leaves_what_a_second_run_completes(source: Path, own_redis: RedisServer) -> None:
    calls: list[int] = []

    def kill(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 6:
            own_redis.kill()

    with (
        open_ends(at(source), at(own_redis.url)) as (first, second),
        pytest.raises(AdapterUnavailableError, match="cannot be reached"),
    ):
        Transfer(first, second, False, kill).run()
    own_redis.start()
    assert copy(source, own_redis.url).is_whole
    assert content(own_redis.url) == content(source)


def test_progress_ends_at_the_bytes_that_were_copied(source: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    with open_ends(at(source), at(tmp_path / "there")) as (first, second):
        report = Transfer(first, second, False, lambda *step: steps.append(step)).run()
    assert steps == sorted(steps, key=lambda step: step[0])
    assert steps[-1] == (report.num_bytes, report.num_bytes)
    files = [path for path in (tmp_path / "there" / "blobs").rglob("*") if path.is_file()]
    files = [path for path in files if not is_record(path.name)]
    assert report.num_bytes == sum(path.stat().st_size for path in files)


@pytest.fixture
def kill_at(source: Path, tmp_path: Path) -> Iterator[Callable[[int, str], int]]:
    """kill_at(step, target) -> exit status of a copy of `source` that dies there."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[3]), "TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, SCRIPT, source], text=True, env=environment, **pipes) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def run(step: int, target: str) -> int:
            stdin.write(f"{step} {target}\n")
            stdin.flush()
            return int(stdout.readline())

        yield run
        stdin.close()


KILLS = [("embedded", 25), ("redis", 15), ("embedded", 5), ("redis", 3)]


@pytest.mark.parametrize(("kind", "stride"), mostly_nightly(KILLS, KILLS[0]))
def test_kill_9_at_any_step_leaves_whole_ids_and_a_second_run_completes_them(
    kind: str,
    stride: int,
    kill_at: Callable[[int, str], int],
    source: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    expected = content(source)
    shared = request.getfixturevalue("shared_redis") if kind == "redis" else None
    step, num_partial = 1, 0
    while True:
        target = shared.url if shared else str(tmp_path / f"target-{step}")
        if shared:
            with shared.client() as client:
                client.flushall()
        status = kill_at(step, target)
        assert status in (0, -signal.SIGKILL)
        if status:
            with open_registry(at(target), is_source=False) as place:
                check_whole(place)
                entries, aliases = content_of(place.catalog)
                assert entries.items() <= expected[0].items()
                assert set(aliases) == (set(expected[1]) if "acme/x" in entries else set())
                num_partial += 0 < len(entries) < len(expected[0])
            assert copy(source, target).is_whole
        assert content(target) == expected
        if not status:
            break
        step += stride
    assert step > 60
    assert num_partial * stride > (25 if kind == "embedded" else 15)
