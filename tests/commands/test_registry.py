"""`lora-serve registry ...`: what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.maintenance.registries import open_registry
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.cli import main
from lora_serve.commands.server_process import free_port
from tests.commands.conftest import Ended
from tests.redis_server import RedisServer
from tests.registries import at, blob, content, corrupt, fill, put

Registry = Callable[..., Ended]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Registry:
    """registry("show", "--json") -> Ended, in a working folder of its own."""
    for name in ("REDIS_URL", "REDIS_PREFIX"):
        monkeypatch.delenv(f"LORA_SERVE_{name}", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Ended:
        capsys.readouterr()
        code = main(["registry", *map(str, arguments)])
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    fill(tmp_path / "store")
    return tmp_path / "store"


def test_export_import_and_migrate_carry_a_registry_around(
    registry: Registry, store: Path, redis_url: str, tmp_path: Path
) -> None:
    (store / "admin_key").write_text("secret")
    expected = content(store)
    ended = registry("export", "--to", "backup", "--store", store)
    assert ended == Ended(0, "3 adapters made in backup; 4 blobs (29.3 KiB) copied\n", "")
    assert sorted(os.listdir("backup")) == ["blobs", "catalog.sqlite3"]
    document = registry("import", "--from", "backup", "--redis-url", redis_url, "--json").document
    assert document["object"] == "registry.import"
    assert document["made"] == ["acme/x", "initech/z", "y"]
    assert (document["is_whole"], document["blobs"]) == (True, 4)
    ended = registry("migrate", "--from", redis_url, "--to", "other")
    assert ended.code == 0
    assert "--store other" in ended.err
    assert content(redis_url) == content(tmp_path / "other") == expected
    assert not (tmp_path / "other" / "admin_key").exists()


def test_migrate_to_redis_says_how_the_servers_are_started_then(
    registry: Registry, store: Path, redis_url: str
) -> None:
    ended = registry("migrate", "--from", store, "--to", redis_url, "--redis-prefix", "staging")
    assert ended.code == 0
    assert f"--redis-url {redis_url} --redis-prefix staging" in ended.err
    assert registry("show", "--redis-url", redis_url, "--redis-prefix", "staging", "--json").document["adapters"] == 3
    assert registry("show", "--redis-url", redis_url).code == 2


def test_conflicts_are_listed_with_1_and_overwrite_takes_the_sources(registry: Registry, store: Path) -> None:
    registry("export", "--to", "backup", "--store", store)
    with open_registry(at(store), is_source=False) as place:
        put(place, "initech/z", "another")
    ended = registry("import", "--from", "backup", "--store", store)
    assert ended.code == 1
    assert ended.out.startswith("0 adapters made, 2 unchanged, 1 conflict in ")
    assert "conflict: initech/z: it has version 2" in ended.err
    assert "--overwrite" in ended.err
    ended = registry("import", "--from", "backup", "--store", store, "--json")
    assert (ended.code, ended.err.count("initech/z")) == (1, 1)
    assert [conflict["id"] for conflict in ended.document["conflicts"]] == ["initech/z"]
    assert len(content(store)[0]["initech/z"].versions) == 2
    assert registry("import", "--from", "backup", "--store", store, "--overwrite").code == 0
    assert content(store) == content(Path("backup"))


def test_export_that_lacks_something_says_what_and_is_completed_by_another(registry: Registry, store: Path) -> None:
    digest = content(store)[0]["initech/z"].default.digest
    shutil.move(blob(store, digest), "elsewhere")
    ended = registry("export", "--to", "backup", "--store", store)
    assert ended.code == 1
    assert f"refused: initech/z: the source lacks the blob {digest}" in ended.err
    ended = registry("import", "--from", "backup", "--store", "other")
    assert ended.code == 0
    assert "never completed" in ended.err
    shutil.move("elsewhere", blob(store, digest))
    ended = registry("export", "--to", "backup", "--store", store)
    assert ended.out.startswith("1 adapter made, 2 unchanged in backup; 1 blob (")
    assert sorted(os.listdir("backup")) == ["blobs", "catalog.sqlite3"]
    assert content(Path("backup")) == content(store)


def test_export_into_a_folder_with_something_in_it_is_2(registry: Registry, store: Path) -> None:
    ended = registry("export", "--to", store, "--store", store)
    assert (ended.code, "same registry" in ended.err) == (2, True)
    Path("full").mkdir()
    (Path("full") / "x").touch()
    ended = registry("export", "--to", "full", "--store", store)
    assert (ended.code, ended.out) == (2, "")
    assert "--to full" in ended.err
    assert "new or empty" in ended.err


def test_store_that_a_server_uses_is_2_in_one_line_that_names_the_flag(registry: Registry, store: Path) -> None:
    with closing(open_catalog(store)):
        for arguments in (
            ("export", "--to", "backup", "--store", store),
            ("migrate", "--from", store, "--to", "backup"),
            ("show", "--store", store),
            ("check", "--store", store),
        ):
            ended = registry(*arguments)
            assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
            flag = "--from" if "migrate" in arguments else "--store"
            assert f"{flag} {store}: another server is using this store" in ended.err
    assert not Path("backup").exists()


def test_show_of_an_adapter_names_folders_that_can_be_registered(
    registry: Registry, store: Path, redis_url: str
) -> None:
    entry = content(store)[0]["initech/z"]
    document = registry("show", "initech/z", "--store", store, "--json").document
    assert document == {
        "object": "registry.adapter",
        "id": "initech/z",
        "versions": [
            {"version": one.version, "digest": one.digest, "blob": str(blob(store, one.digest))}
            for one in entry.versions
        ],
    }
    assert all(Path(one["blob"], "adapter_model.safetensors").is_file() for one in document["versions"])
    assert document["versions"][0]["blob"] in registry("show", "initech/z", "--store", store).out.replace("\n", "")
    ended = registry("show", "initech/none", "--store", store)
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "has no adapter 'initech/none'" in ended.err
    registry("migrate", "--from", store, "--to", redis_url)
    document = registry("show", "initech/z", "--redis-url", redis_url, "--json").document
    assert [one["blob"] for one in document["versions"]] == [None] * len(entry.versions)


def test_show_says_what_there_is(registry: Registry, store: Path) -> None:
    digest = content(store)[0]["initech/z"].default.digest
    with open_registry(at(store), is_source=False) as place:
        stray = put(place, "gone", "stray")
        place.catalog.remove("gone")
        place.catalog.ledger.change(lambda state: ({"adapter:odd": "{}"}, None))
        position = place.catalog.snapshot.position
    shutil.rmtree(blob(store, digest))
    document = registry("show", "--store", store, "--json").document
    assert document == {
        "object": "registry",
        "kind": "embedded",
        "place": str(store),
        "epoch": position.epoch,
        "generation": position.generation,
        "adapters": 3,
        "versions": 5,
        "aliases": 2,
        "bytes": 1001 * (3 + 5 + 4 + len("four, with a token")),
        "blobs": 4,
        "missing": [digest],
        "unnamed": [stray],
        "aside": [],
        "unreadable": ["odd"],
    }
    text = registry("show", "--store", store).out
    assert f"1, {digest}" in text
    assert "embedded" in text
    DiskStore(store).orphans.take(blob(store, stray))
    found = registry("show", "--store", store, "--json").document
    assert (found["unnamed"], found["aside"]) == ([], [stray])


def test_check_reads_every_blob_and_names_what_is_wrong(registry: Registry, store: Path) -> None:
    assert registry("check", "--store", store).out == f"4 blobs in {store}: 4 sound, 0 not\n"
    entries, _ = content(store)
    missing, corrupted = entries["initech/z"].default.digest, entries["y"].default.digest
    shutil.rmtree(blob(store, missing))
    corrupt(store, corrupted)
    ended = registry("check", "--store", store, "--json")
    assert ended.code == 1
    assert sorted((bad["problem"], bad["digest"], *bad["named_by"]) for bad in ended.document["bad"]) == [
        ("corrupt", corrupted, "acme/x@1", "y@1"),
        ("missing", missing, "initech/z@1"),
    ]
    assert f"missing: {missing}, named by initech/z@1" in registry("check", "--store", store).err


def test_check_finds_a_wrong_byte_in_redis(registry: Registry, store: Path, own_redis: RedisServer) -> None:
    assert registry("migrate", "--from", store, "--to", own_redis.url).code == 0
    assert registry("check", "--redis-url", own_redis.url).code == 0
    digest = content(store)[0]["initech/z"].default.digest
    with own_redis.client() as client:
        client.setrange(f"lora_serve:adapters:{digest[7:]}:adapter_config.json:0", 0, b"!")
    ended = registry("check", "--redis-url", own_redis.url)
    assert (ended.code, f"corrupt: {digest}" in ended.err) == (1, True)


def test_environment_names_the_registry_and_a_flag_goes_before_it(
    registry: Registry, store: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_SERVE_STORE", str(store))
    assert registry("show", "--json").document["kind"] == "embedded"
    monkeypatch.setenv("LORA_SERVE_REDIS_URL", redis_url)
    monkeypatch.setenv("LORA_SERVE_REDIS_PREFIX", "p")
    assert registry("import", "--from", store).code == 0
    assert registry("show", "--json").document["kind"] == "redis"
    assert registry("show", "--redis-prefix", "lora_serve").code == 2
    assert registry("show", "--store", store, "--json").document["kind"] == "embedded"


def test_redis_that_is_not_there_is_5_and_its_password_is_not_shown(registry: Registry, store: Path) -> None:
    url = f"redis://user:hunter2@127.0.0.1:{free_port()}/0"
    for arguments in (("show", "--redis-url", url), ("migrate", "--from", store, "--to", url)):
        ended = registry(*arguments)
        assert (ended.code, ended.out) == (5, "")
        assert "cannot be reached" in ended.err
        assert "hunter2" not in ended.err


def test_password_is_shown_nowhere(registry: Registry, store: Path, own_redis: RedisServer) -> None:
    with own_redis.client() as client:
        client.config_set("requirepass", "hunter2")
    url = own_redis.url.replace("redis://", "redis://:hunter2@")
    for flags in ((), ("--json",)):
        ended = registry("migrate", "--from", store, "--to", url, *flags)
        assert ended.code == 0
        assert own_redis.url in ended.out
        assert "hunter2" not in ended.out + ended.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export"], ["--to"]),
        (["export", "--to", "redis://here"], ["--to", "folder"]),
        (["export", "--to", "x", "--store", "a", "--redis-url", "b"], ["--redis-url", "--store"]),
        (["import", "--from", "nowhere"], ["--from nowhere", "no registry"]),
        (["migrate", "--from", "nowhere", "--to", "x"], ["--from nowhere", "no registry"]),
        (["migrate", "--from", "http://here", "--to", "x"], ["--from", "http://"]),
        (["show", "--redis-url", "localhost:6379"], ["--redis-url", "redis://"]),
        (["show"], ["adapters_store", "no registry"]),
        (["check", "--overwrite"], ["--overwrite", "no such flag"]),
        (["destroy"], ["destroy"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_command_line_is_2_in_one_line_and_makes_nothing(
    registry: Registry, arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    ended = registry(*arguments)
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1), ended.err
    assert all(word in ended.err for word in words), ended.err
    assert list(tmp_path.iterdir()) == []


def test_help_has_examples_and_exit_codes_and_no_subcommand_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    from lora_serve.commands.registry import VERBS

    assert main(["registry"]) == 2
    usage = capsys.readouterr().err
    assert [verb.name for verb in VERBS] == [
        "export", "import", "migrate", "show", "check", "rebuild", "accept", "backup", "restore",
    ]  # fmt: skip
    for verb in VERBS:
        assert f"    {verb.name} " in usage
        with pytest.raises(SystemExit) as ended:
            main(["registry", verb.name, "--help"])
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert f"lora-serve registry {verb.name}" in text.partition("examples:")[2]
        assert "130  interrupted" in text


def test_the_command_imports_neither_torch_nor_a_web_server(store: Path) -> None:
    program = (
        "import sys; from lora_serve.cli import main; "
        f"code = main(['registry', 'check', '--store', {str(store)!r}]); "
        "heavy = {'torch', 'transformers', 'aiohttp', 'pydantic', 'redis'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy or code else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr


def test_ctrl_c_is_130_without_a_traceback_and_the_same_again_completes_it(
    registry: Registry, store: Path, own_redis: RedisServer
) -> None:
    assert registry("migrate", "--from", store, "--to", own_redis.url).code == 0
    program = (
        "import sys; from lora_serve.adapters.stores.disk import DiskStore; from lora_serve.cli import main\n"
        "def stuck(*_):\n    print('here', flush=True); sys.stdin.read()\n"
        "DiskStore.put = stuck\n"
        f"sys.exit(main(['registry', 'export', '--to', 'backup', '--redis-url', {own_redis.url!r}]))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], env={**os.environ}, text=True, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=20)
    assert (child.returncode, out, err) == (130, "", "interrupted\n")
    assert registry("export", "--to", "backup", "--redis-url", own_redis.url).code == 0
    assert content(Path("backup")) == content(store)
    assert json.loads(registry("show", "--store", "backup", "--json").out)["unnamed"] == []
