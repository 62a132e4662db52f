"""No silent no-op: an adapter shows what it changes before it is taken in, and is held to its base."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.checkpoint.module_patterns import RankRules
from lora_serve.adapters.checkpoint.peft_config import PeftConfig
from lora_serve.adapters.registration.verification import (
    MAX_SMOKE_TEST_TOKENS,
    base_warnings,
    check_smoke_test,
    smoke_test_prompt,
)
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.core.adapter import AdapterRef
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import AdapterUnavailableError, InvalidAdapterError
from lora_serve.core.messages import SmokeTestResult
from lora_serve.core.model_spec import ModelSpec
from tests.catalog_versions import held
from tests.fake_verifier import FakeVerifier
from tests.loading import fetch_adapter
from tests.verifying_registry import VerifyingRegistry

if TYPE_CHECKING:
    from tests.adapters.conftest import MakeAdapter

MakeRegistry = Callable[[SmokeTestResult], tuple[VerifyingRegistry, FakeVerifier, Catalog, DiskStore]]
EFFECT, NOTHING = SmokeTestResult(0.5, 1e-6, 9.0), SmokeTestResult(2e-6, 1e-6, 9.0)
NO_NUMBER = SmokeTestResult(math.nan, 0.0, 9.0)


@pytest.fixture
def make_registry(config: AdapterConfig, spec: ModelSpec) -> Iterator[MakeRegistry]:
    catalog, store = open_catalog(config.store), DiskStore(config.store)

    def make(result: SmokeTestResult) -> tuple[VerifyingRegistry, FakeVerifier, Catalog, DiskStore]:
        verifier = FakeVerifier(result)
        return VerifyingRegistry(config, spec, catalog, store, verifier), verifier, catalog, store

    yield make
    catalog.close()


def blobs(config: AdapterConfig) -> list[str]:
    return [name for _, _, files in os.walk(config.store / "blobs") for name in files if "safetensors" in name]


@pytest.mark.parametrize(
    ("result", "is_noop"),
    [
        (EFFECT, False),
        (NOTHING, True),
        (SmokeTestResult(0.0, 0.0, 9.0), True),
        (SmokeTestResult(1e-4, 0.0, 9.0), False),
        (SmokeTestResult(0.5, 0.2, 9.0), True),  # bfloat16 on a noisy device
        (SmokeTestResult(1e-6, 0.0, 30.0), True),
    ],
)
def test_change_within_rounding_is_no_effect(result: SmokeTestResult, is_noop: bool) -> None:
    assert result.is_noop is is_noop


def test_adapter_without_effect_is_refused_and_leaves_nothing(
    make_registry: MakeRegistry, make_adapter: MakeAdapter, config: AdapterConfig
) -> None:
    registry, verifier, catalog, _ = make_registry(NOTHING)
    with pytest.raises(InvalidAdapterError, match=r"changes nothing.*allow_noop"):
        registry.register_folder("acme/a", make_adapter())
    assert len(verifier.smoke_tested) == 1
    assert catalog.snapshot.names == ()
    assert blobs(config) == []
    assert held(catalog) == frozenset()


def test_adapter_without_effect_is_taken_if_that_is_asked_for(
    make_registry: MakeRegistry, make_adapter: MakeAdapter
) -> None:
    registry, _, catalog, _ = make_registry(NOTHING)
    registry.register_folder("acme/a", make_adapter(), allow_noop=True)
    assert catalog.entry("acme/a").default.summary["probe"]["max_logit_change"] == 2e-6


def test_adapter_that_gives_no_numbers_is_refused_whatever_is_asked_for(
    make_registry: MakeRegistry, make_adapter: MakeAdapter
) -> None:
    registry, _, catalog, _ = make_registry(NO_NUMBER)
    with pytest.raises(InvalidAdapterError, match="no finite numbers"):
        registry.register_folder("acme/a", make_adapter(), allow_noop=True)
    assert catalog.snapshot.names == ()


def test_refusal_of_a_second_id_leaves_the_firsts_content_alone(
    make_registry: MakeRegistry, make_adapter: MakeAdapter, spec: ModelSpec
) -> None:
    registry, verifier, catalog, store = make_registry(EFFECT)
    folder = make_adapter()
    ref = registry.register_folder("acme/a", folder).ref
    verifier.result = NOTHING
    with pytest.raises(InvalidAdapterError):
        registry.register_folder("acme/b", folder)
    assert catalog.resolve("acme/a").ref == ref
    assert fetch_adapter(store, spec, ref).digest == ref.digest


def test_probe_finds_the_adapter_in_the_store(make_registry: MakeRegistry, make_adapter: MakeAdapter) -> None:
    registry, verifier, _, store = make_registry(EFFECT)
    seen: list[bool] = []

    def smoke_test(ref: AdapterRef, token_ids: tuple[int, ...]) -> SmokeTestResult:
        seen.append(store.has(ref.digest))
        return EFFECT

    verifier.smoke_test = smoke_test  # type: ignore[method-assign]
    registry.register_folder("acme/a", make_adapter())
    assert seen == [True]


def test_engine_that_cannot_be_asked_leaves_nothing_behind(
    make_registry: MakeRegistry, make_adapter: MakeAdapter, config: AdapterConfig
) -> None:
    registry, verifier, catalog, _ = make_registry(EFFECT)

    def smoke_test(ref: AdapterRef, token_ids: tuple[int, ...]) -> SmokeTestResult:
        raise AdapterUnavailableError("busy")

    verifier.smoke_test = smoke_test  # type: ignore[method-assign]
    with pytest.raises(AdapterUnavailableError, match="busy"):
        registry.register_folder("acme/a", make_adapter())
    assert catalog.snapshot.names == ()
    assert blobs(config) == []


def test_card_holds_probe_and_kinds(make_registry: MakeRegistry, make_adapter: MakeAdapter) -> None:
    registry, _, catalog, _ = make_registry(EFFECT)
    registry.register_folder("a", make_adapter("one", settings={"base_model_name_or_path": "meta/other-7b"}))
    summary = catalog.entry("a").default.summary
    assert summary["probe"] == {"max_logit_change": 0.5, "max_logit": 9.0}
    assert (summary["kinds"], summary["warnings"]) == ([], [])


@pytest.mark.parametrize(
    ("named", "served", "warns"),
    [
        ("meta/other-7b", ("org/Tiny",), True),
        ("meta/other-7b", ("folder", "org/Tiny"), True),
        ("else/tiny", ("org/Tiny",), False),  # a copy of it
        ("/models/other", ("org/Tiny",), False),
        ("other", ("org/Tiny",), False),
        ("", ("org/Tiny",), False),
        ("meta/other-7b", ("/srv/models/tiny", "tiny"), False),  # nothing is known but that the shapes agree
    ],
)
def test_base_of_another_name_is_warned_of_where_both_names_are_a_hubs(
    named: str, served: tuple[str, ...], warns: bool
) -> None:
    assert bool(base_warnings(named, served)) == warns


def test_adapter_of_another_base_is_not_loaded_even_if_its_shapes_fit(
    make_registry: MakeRegistry, make_adapter: MakeAdapter, spec: ModelSpec
) -> None:
    registry, _, _, store = make_registry(EFFECT)
    ref = registry.register_folder("a", make_adapter()).ref
    assert ref.traits.base == spec.fingerprint
    assert fetch_adapter(store, spec, ref).digest == ref.digest
    other = dataclasses.replace(spec, architecture="MistralForCausalLM")
    with pytest.raises(InvalidAdapterError, match="another base model"):
        fetch_adapter(store, other, ref)


def test_fingerprint_tells_bases_apart_by_what_an_adapter_must_fit(spec: ModelSpec) -> None:
    assert spec.fingerprint == dataclasses.replace(spec, name="elsewhere", dtype="bfloat16").fingerprint
    for change in ({"vocab_size": 33}, {"architecture": "X"}, {"linears": {}}, {"ties_embeddings": True}):
        assert spec.fingerprint != dataclasses.replace(spec, **change).fingerprint  # type: ignore[arg-type]


def test_traits_survive_a_restart(
    make_registry: MakeRegistry, make_adapter: MakeAdapter, config: AdapterConfig
) -> None:
    registry, _, catalog, _ = make_registry(EFFECT)
    ref = registry.register_folder("a", make_adapter(settings={"alora_invocation_tokens": [3, 4]})).ref
    assert ref.traits.invocation_tokens == (3, 4)
    catalog.close()
    again = open_catalog(config.store)
    assert again.resolve("a").ref == ref
    again.close()


def config_of(**settings: object) -> PeftConfig:
    return PeftConfig(RankRules(4, 8.0), ("q_proj",), (), None, (), "", (), **settings)  # type: ignore[arg-type]


def test_prompt_holds_the_tokens_without_which_an_adapter_does_not_act(spec: ModelSpec) -> None:
    plain = smoke_test_prompt(config_of(), spec)
    assert plain == smoke_test_prompt(config_of(), spec)
    assert all(0 <= token < spec.vocab_size for token in plain)
    activated = smoke_test_prompt(config_of(invocation_tokens=(7, 8, 9)), spec)
    ref = AdapterRef("t", "a", 1, "sha256:a", 4, 0)
    start = dataclasses.replace(ref, traits=dataclasses.replace(ref.traits, invocation_tokens=(7, 8, 9))).start_in(
        activated
    )
    assert start is not None
    trained = smoke_test_prompt(config_of(trained_tokens=(("", (30, 31)),)), spec)
    assert {30, 31} <= set(trained)
    many = smoke_test_prompt(config_of(trained_tokens=(("", tuple(range(31))),)), spec)
    assert len(many) <= min(MAX_SMOKE_TEST_TOKENS, spec.max_model_len)


def test_refusals_say_how_small_the_change_is() -> None:
    with pytest.raises(InvalidAdapterError, match="2e-06"):
        check_smoke_test(NOTHING)
    check_smoke_test(NOTHING, allow_noop=True)
    check_smoke_test(EFFECT)


def test_long_invocation_is_cut_to_what_the_base_can_take(spec: ModelSpec) -> None:
    tiny = dataclasses.replace(spec, max_model_len=8)
    assert len(smoke_test_prompt(config_of(invocation_tokens=tuple(range(20))), tiny)) == 8
