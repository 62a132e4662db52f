"""Registrations side by side: of one id, of one content, and of both, met between the store and the commit."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.edits import OtherContentError
from lora_serve.adapters.registration.registry import Registered
from lora_serve.adapters.registration.verification import ValidationBudget
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError, QuotaExceededError
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.model_spec import ModelSpec
from lora_serve.core.tenant import Quota
from tests.adapters.registration.test_registry import leftovers, staged
from tests.fake_verifier import FakeVerifier
from tests.loading import fetch_adapter
from tests.verifying_registry import VerifyingRegistry

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter

PATIENCE = 60.0  # seconds, of a test that fails


class MeetingVerifier(FakeVerifier):
    """Everybody's bytes are in the store before anybody's smoke test ends; then `refuse` says whose fails, and they go
    on one after another in the order of `refuse`.
    """

    def __init__(self, refuse: dict[str, bool]) -> None:
        super().__init__()
        self._refuse = refuse
        self._met = threading.Barrier(len(refuse), timeout=PATIENCE)
        self.ended = {name: threading.Event() for name in refuse}

    def smoke_test(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> SmokeTestResult:
        self._met.wait()
        names = list(self._refuse)
        for name in names[: names.index(adapter.name)]:
            assert self.ended[name].wait(PATIENCE)
        if self._refuse[adapter.name]:
            raise AdapterUnavailableError("refused")
        return super().smoke_test(adapter, token_ids)


@pytest.fixture
def quota() -> Quota:
    return Quota()


@pytest.fixture
def build(
    config: AdapterConfig, spec: ModelSpec, catalog: Catalog, store: DiskStore
) -> Callable[[FakeVerifier, Quota], VerifyingRegistry]:
    return lambda verifier, quota: VerifyingRegistry(
        config, spec, catalog, store, verifier, quota_of=lambda tenant: quota
    )


Build = Callable[[FakeVerifier, Quota], VerifyingRegistry]


def at_once(
    build: Build, folders: dict[str, Path], refuse: tuple[str, ...] = (), quota: Quota | None = None
) -> dict[str, Future[Registered]]:
    """All of them, which end in this order."""
    verifier = MeetingVerifier({name: name in refuse for name in folders})
    registry = build(verifier, quota or Quota())

    def register(name: str) -> Registered:
        try:
            return registry.register_staged(name, staged(registry, folders[name]))
        finally:
            verifier.ended[name].set()

    with ThreadPoolExecutor(len(folders)) as threads:
        return {name: threads.submit(register, name) for name in folders}


def assert_clean(catalog: Catalog, store: DiskStore, config: AdapterConfig) -> None:
    """Every byte is named, and nobody holds any."""
    assert store.digests() == catalog.snapshot.digests
    assert [note for note in catalog.ledger.state.leases.values() if note.holders] == []
    assert leftovers(config) == []


def same_id_at_once(registry_of: Build, folders: list[Path], may_change: bool = True) -> list[Future[Registered]]:
    met = threading.Barrier(len(folders), timeout=PATIENCE)

    class Meeting(FakeVerifier):
        def smoke_test(self, adapter: AdapterRef, token_ids: tuple[int, ...]) -> SmokeTestResult:
            met.wait()
            return super().smoke_test(adapter, token_ids)

    registry = registry_of(Meeting(), Quota())
    with ThreadPoolExecutor(len(folders)) as threads:
        return [
            threads.submit(registry.register_staged, "acme/a", staged(registry, folder), may_change=may_change)
            for folder in folders
        ]


def test_other_contents_under_one_id_are_two_versions(
    build: Build, catalog: Catalog, store: DiskStore, config: AdapterConfig, spec: ModelSpec, make_adapter: MakeAdapter
) -> None:
    done = same_id_at_once(build, [make_adapter(f"a{seed}", seed=seed) for seed in range(3)])
    assert sorted(one.result().ref.version for one in done) == [1, 2, 3]
    for one in done:
        ref = one.result().ref
        assert catalog.resolve(f"acme/a@{ref.version}").ref.digest == ref.digest
        fetch_adapter(store, spec, ref)
    assert_clean(catalog, store, config)


def test_one_content_under_one_id_is_one_version(
    build: Build, catalog: Catalog, store: DiskStore, config: AdapterConfig, make_adapter: MakeAdapter
) -> None:
    folder = make_adapter()
    done = [one.result() for one in same_id_at_once(build, [folder, folder])]
    assert sorted(one.created for one in done) == [False, True]
    assert len(catalog.entry("acme/a").versions) == 1
    assert_clean(catalog, store, config)


def test_id_that_may_not_change_gets_one_content_of_two(
    build: Build, catalog: Catalog, store: DiskStore, config: AdapterConfig, make_adapter: MakeAdapter
) -> None:
    done = same_id_at_once(build, [make_adapter("one", seed=1), make_adapter("two", seed=2)], may_change=False)
    errors = [one.exception() for one in done]
    assert sorted(type(error).__name__ for error in errors) == ["NoneType", OtherContentError.__name__]
    assert len(catalog.entry("acme/a").versions) == 1
    assert_clean(catalog, store, config)


@pytest.mark.parametrize("refuse", [("acme/a",), ("globex/b",), ("acme/a", "globex/b"), ()])
def test_one_content_under_two_ids_stays_as_long_as_one_of_them_needs_it(
    build: Build,
    catalog: Catalog,
    store: DiskStore,
    config: AdapterConfig,
    spec: ModelSpec,
    make_adapter: MakeAdapter,
    refuse: tuple[str, ...],
) -> None:
    folder = make_adapter()
    done = at_once(build, {"acme/a": folder, "globex/b": folder}, refuse)
    for name, one in done.items():
        if name in refuse:
            assert isinstance(one.exception(), AdapterUnavailableError)
        else:
            fetch_adapter(store, spec, one.result().ref)
    assert catalog.snapshot.entries.keys() == done.keys() - set(refuse)
    assert_clean(catalog, store, config)


def test_of_two_ids_where_one_is_allowed_the_other_is_refused(
    build: Build, catalog: Catalog, store: DiskStore, config: AdapterConfig, make_adapter: MakeAdapter
) -> None:
    folders = {"acme/a": make_adapter("one", seed=1), "acme/b": make_adapter("two", seed=2)}
    done = at_once(build, folders, quota=Quota(max_adapters=1))
    assert done["acme/a"].result().created
    assert isinstance(done["acme/b"].exception(), QuotaExceededError)
    assert_clean(catalog, store, config)


def test_converted_adapter_that_is_deleted_while_it_is_registered_again_is_not_named_without_its_bytes(
    build: Build, catalog: Catalog, store: DiskStore, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, folder = build(FakeVerifier(), Quota()), make_adapter(settings={"init_lora_weights": "pissa"})
    first = registry.register_folder("a", folder)
    take = catalog.leases.acquire

    def late(digest: str, holder: str) -> str:
        for gone in registry.delete("a"):
            registry.collect(gone)
        return take(digest, holder)

    monkeypatch.setattr(catalog.leases, "acquire", late)
    with pytest.raises(AdapterUnavailableError, match="try again"):
        registry.register_folder("a", folder)
    assert first.ref.digest not in store.digests() | catalog.snapshot.digests


class Ticks:
    """Each look at it takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_examination_beyond_its_budget_is_refused_in_words() -> None:
    budget = ValidationBudget(2.5, Ticks())
    budget.check()
    budget.check()
    with pytest.raises(InvalidAdapterError, match=r"more than 2.5 s of the processor \(--registration-seconds\)"):
        budget.check()
    assert budget.left == 0.0


@pytest.mark.parametrize("init", ["pissa", True])
def test_adapter_that_costs_more_than_its_budget_is_refused_wherever_it_costs(
    config: AdapterConfig,
    spec: ModelSpec,
    catalog: Catalog,
    store: DiskStore,
    make_adapter: MakeAdapter,
    monkeypatch: pytest.MonkeyPatch,
    init: str | bool,
) -> None:
    """At any look at the clock: those at tensors, those at layers, those between the parts."""
    folder = make_adapter(settings={"init_lora_weights": init})
    registry = VerifyingRegistry(
        dataclasses.replace(config, registration_seconds=1e9), spec, catalog, store, FakeVerifier()
    )
    ticks = Ticks()
    monkeypatch.setattr(
        "lora_serve.adapters.registration.registry.ValidationBudget", lambda s: ValidationBudget(s, ticks)
    )
    registry.register_folder("a", folder)
    looks = int(ticks.now)
    assert looks > 10
    registry.delete("a")
    for seconds in range(1, looks - 1, 5):
        slow = VerifyingRegistry(
            dataclasses.replace(config, registration_seconds=seconds), spec, catalog, store, FakeVerifier()
        )
        with pytest.raises(InvalidAdapterError, match="--registration-seconds"):
            slow.register_folder("a", folder)
    assert leftovers(config) == []
