"""A process that acts on a registry until it is killed; imported once, forked for every life.

Arguments: a model spec as JSON, folders with the contents. Each line on standard input is one life, a JSON object
{"store", "url", "acts"}. It prints "alive <pid>", then "refused <words>" or "ready <blobs aside>", then one status for
each act once it is acknowledged, "state <JSON>" if it lives to the end of its acts, and "ended <exit status>" at last.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.entry import Canary
from lora_serve.adapters.catalog.journals import redis as journals_redis
from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.adapters.redis_connection import connect
from lora_serve.adapters.storage import open_storage
from lora_serve.adapters.stores import redis as stores_redis
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterNotFoundError, ConfigError, ConflictError, InvalidRequestError
from lora_serve.core.model_spec import ModelSpec
from tests.adapters.registration.registering_process import Verifier, spec_from
from tests.verifying_registry import VerifyingRegistry

PATIENCE = 120.0  # seconds for an answer of Redis: on a busy machine it is late, and never away
STATUSES = {AdapterNotFoundError: 404, ConflictError: 409, InvalidRequestError: 400}


class Life:
    """One open registry. Each act is a method of its name."""

    def __init__(self, registry: VerifyingRegistry, catalog: Catalog, folders: Sequence[str]) -> None:
        self._registry = registry
        self._catalog = catalog
        self._folders = folders

    def act(self, name: str, *arguments: Any) -> int:
        """The status that HTTP would have; what may be told apart by nobody is the same."""
        method: Callable[..., int | None] = getattr(self, name)
        try:
            return method(*arguments) or 200
        except tuple(STATUSES) as error:
            return STATUSES[type(error)]

    def register(self, name: str, content: int, activate: bool, pin: bool) -> int:
        done = self._registry.register_folder(name, self._folders[content], pin=pin, trusted=True, activate=activate)
        return 201 if done.created else 200

    def set_route(self, name: str, version: int | None, canary: tuple[int, float] | None) -> None:
        self._catalog.set_route(name, version, Canary(*canary) if canary else None)

    def roll_back(self, name: str) -> None:
        self._catalog.roll_back(name)

    def delete(self, name: str, version: int | None) -> None:
        self._free(self._registry.delete(name, version))

    def delete_tenant(self, tenant: str) -> None:
        self._free(self._catalog.remove_tenant(tenant).strays)

    def set_alias(self, alias: str, target: str) -> None:
        name, _, content = target.partition("@content:")
        digest = adapter_digest(Path(self._folders[int(content)])) if content else ""
        self._catalog.set_alias(alias, f"{name}@{digest}" if digest else target)

    def remove_alias(self, alias: str) -> None:
        self._catalog.remove_alias(alias)

    def set_pinned(self, name: str, pinned: bool) -> None:
        self._catalog.set_pinned(name, pinned)

    def share(self, name: str, tenants: list[str]) -> None:
        self._catalog.set_sharing(name, tenants)

    def _free(self, digests: Sequence[str]) -> None:
        for digest in digests:
            self._registry.collect(digest)


def state_of(catalog: Catalog, store: AdapterStore) -> dict[str, Any]:
    """All that is served, and of it what cannot be served with its own digest."""
    snapshot = catalog.snapshot
    entries = {
        name: {
            "versions": {str(version.version): version.digest for version in entry.versions},
            "last_version": entry.last_version,
            "route": entry.route.version,
            "canary": [entry.route.canary.version, entry.route.canary.percent] if entry.route.canary else None,
            "history": list(entry.history),
            "pinned": entry.pinned,
            "shared_with": list(entry.shared_with),
        }
        for name, entry in snapshot.entries.items()
    }
    bad = [digest for digest in snapshot.digests if not _is_served(store, digest)]
    return {"entries": entries, "aliases": dict(snapshot.aliases), "bad": bad}


def _is_served(store: AdapterStore, digest: str) -> bool:
    try:
        with store.open(digest) as folder:
            return adapter_digest(folder) == digest
    except Exception:
        return False


def live(spec: ModelSpec, folders: Sequence[str], order: dict[str, Any]) -> None:
    config = AdapterConfig(
        store=Path(order["store"]),
        redis_url=order["url"] or None,
        max_loras=4,
        max_lora_rank=64,
        adapter_host_memory=10**8,
        max_upload_size=10**7,
    )
    print(f"alive {os.getpid()}", flush=True)
    try:
        with open_storage(config) as storage:
            registry = VerifyingRegistry(config, spec, storage.catalog, storage.store, Verifier())
            registry.sweep()
            print(f"ready {len(list(storage.disk.orphans.all()))}", flush=True)
            life = Life(registry, storage.catalog, folders)
            for act in order["acts"]:
                print(life.act(*act), flush=True)
            print("state " + json.dumps(state_of(storage.catalog, storage.store)), flush=True)
            if config.redis_url:
                os._exit(0)  # its follower's thread would be waited for
    except ConfigError as error:
        print("refused " + str(error).replace("\n", " "), flush=True)


def wait_for_redis() -> None:
    for module in (journals_redis, stores_redis):
        module.connect = lambda url, _: connect(url, PATIENCE)  # type: ignore[attr-defined]


def main(spec: str, *folders: str) -> None:
    wait_for_redis()
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            live(spec_from(spec), folders, json.loads(line))
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(f"\nended {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
