"""A process that registers adapters until it is killed; imported once, forked for every killing.

Arguments: store folder, URL of a Redis that holds the registry ("": the store does), a model spec as JSON, folders to
register in turn. Each line on standard input starts one
run: "<number of the first registration> <kill_at>". A run prints "ready <pid>", each acknowledged registration as
"<label> <digest>", "-<id>" before a deletion, and "ended <exit status>" at last. With `kill_at` it makes one
registration and one deletion and kills itself at its `kill_at`-th touch of a file, of the database or of Redis (before
a command leaves, and after); without (0) it goes on for ever.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import redis

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.registration.verification import StagedAdapter
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.redis import RedisStore
from lora_serve.adapters.stores.tiered import TieredStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig
from lora_serve.core.messages import AdapterSize, SmokeTestResult
from lora_serve.core.model_spec import LinearShape, ModelSpec
from lora_serve.model.lora.validation import validated
from tests.verifying_registry import VerifyingRegistry

NUM_IDS = 40


class Verifier:
    """No base model here: every adapter has an effect."""

    def convert(self, staged: StagedAdapter) -> None:
        raise AssertionError("nothing here is to be converted")

    def validate(self, staged: StagedAdapter, *, allow_noop: bool) -> AdapterSize:
        saved = validated(staged, allow_noop=allow_noop)
        return AdapterSize(saved.rank, 1000 * len(saved.linears))

    def smoke_test(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> SmokeTestResult:
        return SmokeTestResult(1.0, 0.0, 1.0)


def say(line: str) -> None:
    """Writes a whole line at once: several threads speak, and the process may be killed at any moment."""
    os.write(1, f"{line}\n".encode())


def open_for_registering(
    store: Path, spec: ModelSpec, redis_url: str = ""
) -> tuple[VerifyingRegistry, Catalog, AdapterStore]:
    config = AdapterConfig(
        store=store,
        redis_url=redis_url or None,
        max_loras=4,
        max_lora_rank=64,
        adapter_host_memory=10**8,
        max_upload_size=10**7,
    )
    catalog, kept = open_catalog(store, config.redis_url), _store_of(config)
    registry = VerifyingRegistry(config, spec, catalog, kept, Verifier())
    registry.sweep()
    return registry, catalog, kept


def _store_of(config: AdapterConfig) -> AdapterStore:
    if config.redis_url is None:
        return DiskStore(config.store)
    return TieredStore(DiskStore(config.store / "cache"), RedisStore(config.redis_url))


def spec_from(text: str) -> ModelSpec:
    linears = {path: LinearShape(*shape) for path, shape in json.loads(text).items()}
    return ModelSpec("tiny", "LlamaForCausalLM", 32, 64, (0,), 2, linears, 0, "float32", "cpu")


def register(registry: VerifyingRegistry, name: str, folder: str) -> None:
    done = registry.register_folder(name, folder, trusted=True)
    say(f"{done.ref.label} {done.ref.digest}")


def delete(registry: VerifyingRegistry, name: str) -> None:
    say(f"-{name}")
    for digest in registry.delete(name):
        registry.collect(digest)


def run(store: Path, url: str, spec: ModelSpec, folders: Sequence[str], start: int, kill_at: int) -> None:
    registry, catalog, _ = open_for_registering(store, spec, url)
    say(f"ready {os.getpid()}")
    if kill_at:
        kill_oneself_at(kill_at, catalog)
    for number in itertools.count(start):
        name = f"acme/{number % NUM_IDS}"
        register(registry, name, folders[number % len(folders)])
        if kill_at or number % 7 == 0:
            delete(registry, name)
        if kill_at:
            return


def kill_oneself_at(step: int, catalog: Catalog) -> None:
    steps: Iterator[int] = itertools.count(1)

    def count(*_: object) -> None:
        if next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: object) -> None:
        if event.startswith(("open", "os.", "shutil.")) and event != "os.kill":
            count()

    def send(connection: object, command: object, check_health: bool = True) -> None:
        count()
        really_send(connection, command, check_health)
        count()

    really_send = redis.connection.Connection.send_packed_command
    redis.connection.Connection.send_packed_command = send
    journal = catalog.ledger.journal
    getattr(journal, "_mirror", journal)._db.connection.set_trace_callback(count)
    sys.addaudithook(audit)


def main(store: str, url: str, spec: str, *folders: str) -> None:
    for line in sys.stdin:
        start, kill_at = map(int, line.split())
        if (child := os.fork()) == 0:
            run(Path(store), url, spec_from(spec), folders, start, kill_at)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        say(f"ended {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
