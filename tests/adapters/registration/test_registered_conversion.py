"""A PiSSA or OLoRA checkpoint is converted once, when it is registered; what is stored and served is plain LoRA."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.checkpoint.content import adapter_digest
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import ModelSpec
from tests.fake_verifier import FakeVerifier
from tests.loading import fetch_adapter
from tests.verifying_registry import VerifyingRegistry

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter

PISSA = {"init_lora_weights": "pissa"}


@pytest.fixture
def verifier() -> FakeVerifier:
    return FakeVerifier()


@pytest.fixture
def registry(
    config: AdapterConfig, spec: ModelSpec, catalog: Catalog, store: DiskStore, verifier: FakeVerifier
) -> VerifyingRegistry:
    return VerifyingRegistry(config, spec, catalog, store, verifier)


def test_stored_content_is_the_plain_one_and_the_card_says_what_it_was(
    registry: VerifyingRegistry, store: DiskStore, make_adapter: MakeAdapter, spec: ModelSpec
) -> None:
    folder = make_adapter(rank=4, settings=PISSA)
    sent = adapter_digest(folder)
    done = registry.register_folder("a", folder)
    assert adapter_digest(folder) == sent
    assert (done.created, done.ref.rank) == (True, 8)
    assert store.digests() == {done.ref.digest}
    assert done.ref.digest != sent
    assert fetch_adapter(store, spec, done.ref).rank == 8
    summary = done.entry.default.summary
    assert summary["converted_from"] == {"init": "pissa", "digest": sent, "r": 4, "base": "tiny"}
    assert summary["r"] == 8


def test_same_source_again_is_neither_created_nor_converted_again(
    registry: VerifyingRegistry, verifier: FakeVerifier, make_adapter: MakeAdapter
) -> None:
    folder = make_adapter(settings={"init_lora_weights": "olora"})
    first = registry.register_folder("a", folder)
    registry.register_folder("a", make_adapter("other", seed=1))
    again = registry.register_folder("a", folder, pin=True, metadata={"again": True})
    assert verifier.undone == ["olora"]
    assert (first.created, again.created) == (True, False)
    assert again.ref == first.ref
    assert again.entry.default_version == 1
    assert again.entry.pinned
    assert again.entry.metadata == {"again": True}


def test_it_is_converted_again_if_the_bytes_are_lost_or_the_base_is_another(
    registry: VerifyingRegistry,
    config: AdapterConfig,
    spec: ModelSpec,
    catalog: Catalog,
    store: DiskStore,
    verifier: FakeVerifier,
    make_adapter: MakeAdapter,
) -> None:
    folder = make_adapter(settings=PISSA)
    first = registry.register_folder("a", folder)
    store.delete(first.ref.digest)
    assert registry.register_folder("a", folder).ref.digest == first.ref.digest
    assert store.has(first.ref.digest)
    other = VerifyingRegistry(config, dataclasses.replace(spec, name="another base"), catalog, store, verifier)
    other.register_folder("a", folder)
    assert verifier.undone == ["pissa"] * 3


def test_conversion_of_one_id_is_none_of_anothers_business(
    registry: VerifyingRegistry, verifier: FakeVerifier, make_adapter: MakeAdapter
) -> None:
    folder = make_adapter(settings=PISSA)
    assert [registry.register_folder(name, folder).created for name in ("x/a", "y/a")] == [True, True]
    assert verifier.undone == ["pissa", "pissa"]


def test_rank_limit_counts_the_rank_that_is_served(
    config: AdapterConfig, spec: ModelSpec, catalog: Catalog, store: DiskStore, make_adapter: MakeAdapter
) -> None:
    small = VerifyingRegistry(dataclasses.replace(config, max_lora_rank=8), spec, catalog, store, FakeVerifier())
    assert small.register_folder("a", make_adapter("fits", rank=4, settings=PISSA)).ref.rank == 8
    with pytest.raises(InvalidAdapterError, match=r"rank 10 is larger than --max-lora-rank 8 \(saved as 5;.*pissa"):
        small.register_folder("a", make_adapter("large", rank=5, settings=PISSA))


def test_value_that_is_no_number_is_refused_before_the_conversion(
    registry: VerifyingRegistry, verifier: FakeVerifier, store: DiskStore, make_adapter: MakeAdapter
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        next(iter(tensors.values()))[0, 0] = torch.nan

    with pytest.raises(InvalidAdapterError, match="NaN"):
        registry.register_folder("a", make_adapter(settings=PISSA, change=spoil))
    assert verifier.undone == []
    assert store.digests() == frozenset()
