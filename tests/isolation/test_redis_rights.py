"""A Redis that is shared: a user of its own, the commands that docs/explanation/security.md lists, TLS, a prefix."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import redis
from safetensors.numpy import save_file

from lora_serve.adapters.archives.unpacking import WEIGHTS_NAME
from lora_serve.adapters.catalog.edits import Registration
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.sources.redis_key import RedisKeySource
from lora_serve.adapters.stores.redis import RedisStore
from lora_serve.commands.server_process import free_port
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError, ConfigError
from lora_serve.core.setting_groups.operation import AccountingConfig
from lora_serve.core.tenant import Caller, Quota, Role
from lora_serve.tenancy.accounting import open_accounting
from lora_serve.tenancy.audit_journal import Act
from lora_serve.tenancy.directory import open_directory
from lora_serve.tenancy.usage import UsageFigures, UsageKey
from tests.catalog_versions import version
from tests.certificates import make_certificate
from tests.redis_server import RedisServer

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "a-password-of-redis"
DIGEST = "sha256:" + "ab" * 32


def documented_rules() -> list[str]:
    """What `ACL SETUSER` is given in docs/explanation/security.md."""
    (line,) = re.findall(
        r"^    user lora_serve (.*)$", (ROOT / "docs" / "explanation" / "security.md").read_text(), re.M
    )
    return [rule.replace("PASSWORD", PASSWORD) for rule in line.split()]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    save_file({"x": np.ones(3, dtype=np.float32)}, folder / WEIGHTS_NAME)
    return folder


@pytest.fixture
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that knows the documented user, and another's data."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    try:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "lora_serve", "reset", *documented_rules())
            client.set("other:secret", "x")
            client.hset("models:shared", mapping={"adapter_config.json": "{}", WEIGHTS_NAME: "x"})
        yield server
    finally:
        server.stop()


def url_of(server: RedisServer, password: str = PASSWORD) -> str:
    return f"redis://lora_serve:{password}@127.0.0.1:{server.port}/0"


def use_everything(url: str, prefix: str, tmp_path: Path, adapter: Path) -> None:
    """All that a server does with Redis."""
    with closing(open_catalog(tmp_path / "a", url, prefix)) as first:
        Registration(id="acme/support").commit(first.ledger, version("a"))
        first.set_alias("acme/alias", "acme/support")
        with closing(open_catalog(tmp_path / "b", url, prefix)) as second:
            before = second.snapshot.position
            assert second.resolve("acme/alias").ref.name == "acme/support"
            Registration(id="acme/support").commit(first.ledger, version("b"))
            second.ledger.wait(1.0)
            second.refresh()
            assert second.snapshot.position.generation > before.generation
        first.remove_alias("acme/alias")
        first.remove("acme/support")
    with closing(RedisStore(url, f"{prefix}:adapters:")) as store:
        store.put(DIGEST, adapter)
        assert store.has(DIGEST)
        assert store.digests() == {DIGEST}
        with store.open(DIGEST) as folder:
            assert (folder / WEIGHTS_NAME).read_bytes() == (adapter / WEIGHTS_NAME).read_bytes()
        store.delete(DIGEST)
        assert not store.has(DIGEST)
    asyncio.run(use_tenants(config_of(tmp_path / "a", url, prefix), config_of(tmp_path / "b", url, prefix)))


def config_of(store: Path, url: str, prefix: str) -> AdapterConfig:
    return AdapterConfig(
        store=store,
        redis_url=url,
        max_loras=4,
        max_lora_rank=64,
        adapter_host_memory=1,
        max_upload_size=1,
        redis_prefix=prefix,
    )


async def use_tenants(config: AdapterConfig, other: AdapterConfig) -> None:
    """Their directory, limits, usage and audit log, at two replicas."""
    with open_directory(config) as directory:
        directory.create_tenant("acme")
        directory.create_key("acme", Role.INFERENCE)
        directory.delete_tenant("acme")
        directory.ledger.forget()
    caller = Caller("acme", quota=Quota(requests_per_minute=9, tokens_per_minute=9))
    async with (
        open_accounting(config, AccountingConfig()) as books,
        open_accounting(other, AccountingConfig()) as others,
    ):
        books.quotas.settle(await books.quotas.reserve(caller, 4), 2)
        await books.quotas.settled()
        books.meter.record(UsageKey("acme", "a", "1", "sha256:a"), UsageFigures(requests=1))
        await books.meter.flush()
        await others.meter.flush()
        rows, is_complete = await others.meter.rows(0, 2**40)
        assert is_complete
        assert len(rows) == 1
        await books.audit.append(Act("admin", "admin", "admin", "POST /admin/tenants", "acme", "acme", "", 201, "r"))
        await others.audit.append(Act("admin", "admin", "admin", "GET /admin/tenants", "acme", "acme", "", 200, "r"))
        while len((page := await others.audit.page(9, None, lambda line: True)).lines) < 2:
            assert page.is_complete
            await asyncio.sleep(0.01)


def test_documented_rights_are_enough(guarded: RedisServer, tmp_path: Path, adapter: Path) -> None:
    use_everything(url_of(guarded), "lora_serve", tmp_path, adapter)
    with guarded.client() as client:
        assert client.execute_command("ACL", "LOG") == []


def test_another_prefix_is_out_of_reach(guarded: RedisServer, tmp_path: Path, adapter: Path) -> None:
    with pytest.raises(AdapterUnavailableError), closing(RedisStore(url_of(guarded), "other:adapters:")) as store:
        store.put(DIGEST, adapter)
    with guarded.client() as client:
        assert client.keys("other:*") == [b"other:secret"]


@pytest.mark.parametrize(
    "command",
    [
        "GET other:secret", "SET other:x 1", "HGETALL models:shared", "KEYS *", "FLUSHALL", "FLUSHDB", "CONFIG GET *",
        "EVAL return 0", "FUNCTION LIST", "SCRIPT FLUSH", "MONITOR", "ACL LIST", "CLIENT LIST",
        "SAVE", "SHUTDOWN", "REPLICAOF NO ONE", "MODULE LIST", "RENAME lora_serve:x other:x", "RANDOMKEY",
    ],
)  # fmt: skip
def test_documented_rights_are_not_more(guarded: RedisServer, command: str) -> None:
    with redis.Redis.from_url(url_of(guarded)) as client, pytest.raises(redis.exceptions.NoPermissionError):
        client.execute_command(*command.split(" "))


@pytest.mark.parametrize(
    "left_out",
    [
        "+xadd",
        "+hset",
        "+watch",
        "+persist",
        "+scan",
        "+exec",
        "+unlink",
        "+xread",
        "+incrby",
        "+sadd",
        "+smembers",
        "+xrevrange",
        "+xtrim",
        "+expire",
        "+expireat",
    ],
)
def test_none_of_the_documented_rights_is_idle(
    guarded: RedisServer, tmp_path: Path, adapter: Path, left_out: str
) -> None:
    rules = [rule for rule in documented_rules() if rule != left_out]
    assert len(rules) == len(documented_rules()) - 1
    with guarded.client() as client:
        client.execute_command("ACL", "SETUSER", "lora_serve", "reset", *rules)
        with suppress(AdapterUnavailableError, AssertionError):
            use_everything(url_of(guarded), "lora_serve", tmp_path, adapter)
        refused = {str(entry["object"]) for entry in client.acl_log()}
    assert left_out[1:] in refused


def test_keys_of_adapters_to_register_need_a_right_to_read_them(guarded: RedisServer, tmp_path: Path) -> None:
    def fetch() -> None:
        with closing(RedisKeySource(url_of(guarded))) as source:
            (tmp_path / "target").mkdir(exist_ok=True)
            source.fetch("redis://models:shared", tmp_path / "target", 10**6, lambda *_: None)

    with pytest.raises(AdapterUnavailableError):
        fetch()
    with guarded.client() as client:
        client.execute_command("ACL", "SETUSER", "lora_serve", "%R~models:*")
    fetch()
    assert (tmp_path / "target" / "adapter_config.json").read_text() == "{}"


@pytest.mark.parametrize("url_for", [lambda s: url_of(s, "wrong-password"), lambda s: url_of(s).replace("lora_", "x")])
def test_wrong_password_opens_nothing_and_is_not_shown(
    guarded: RedisServer, url_for: Callable[[RedisServer], str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AdapterUnavailableError) as caught, closing(RedisStore(url_for(guarded))) as store:
        store.has(DIGEST)
    assert "takes another password" in str(caught.value)
    assert not any(secret in str(caught.value) + caplog.text for secret in (PASSWORD, "wrong-password"))


@pytest.mark.parametrize(
    "url", ["redis://:pass#word@host:1/0", "redis://u:hush/word@host", "redis://h:hush", "http://u:hush@h", "redis://["]
)
def test_url_that_is_none_is_refused_without_showing_what_may_be_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="--redis-url") as caught:
        RedisStore(url).has(DIGEST)
    assert not {"hush", "'pass'", "word@"} & set(str(caught.value).replace("user:password@", "").split())
    assert "hush" not in str(caught.value)


def test_redis_is_spoken_to_over_tls_and_its_certificate_is_checked(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, adapter: Path
) -> None:
    files, port = make_certificate(tmp_path / "tls"), free_port()
    more = ["--tls-port", str(port), "--tls-cert-file", str(files.certificate), "--tls-key-file", str(files.key)]
    more += ["--tls-ca-cert-file", str(files.authority_file), "--tls-auth-clients", "no"]
    server = RedisServer(tmp_path_factory.mktemp("redis"), more=more)
    server.start()
    try:
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "lora_serve", "reset", *documented_rules())
        url = f"rediss://lora_serve:{PASSWORD}@127.0.0.1:{port}/0"
        use_everything(f"{url}?ssl_ca_certs={files.authority_file}", "lora_serve", tmp_path, adapter)
        with pytest.raises(AdapterUnavailableError), closing(RedisStore(url)) as store:
            store.has(DIGEST)
        stranger = make_certificate(tmp_path / "other").authority_file
        with pytest.raises(AdapterUnavailableError), closing(RedisStore(f"{url}?ssl_ca_certs={stranger}")) as store:
            store.has(DIGEST)
    finally:
        server.stop()
