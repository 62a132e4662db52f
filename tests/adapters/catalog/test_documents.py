"""Records of the catalog that no server has written: from a foreign export, or another writer of the same Redis."""

from __future__ import annotations

import json
import time
import timeit
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from lora_serve.adapters.catalog.entry import CatalogEntry, Route, VersionEntry, document_of, entry_of
from lora_serve.core.adapter import AdapterTraits

VERSION = VersionEntry(1, "sha256:" + "0" * 64, 2, 100, {"targets": ["q_proj"]}, "upload", 1.5)
ENTRY = CatalogEntry("acme/a", "acme", False, 1.5, {"x": 1}, 1, Route(1), (VERSION,))


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": None},
        {"metadata": [["a", 1]]},
        {"created": "x"},
        {"created": 1e999},
        {"pinned": "no"},
        {"tenant": None},
        {"last_version": "9"},
        {"of_a_newer_server": 1},
        {"route": {"version": 1, "canary": {"version": 1, "percent": "x"}, "history": []}},
        {"route": {"version": 1, "canary": {"version": "1", "percent": 5}, "history": []}},
    ],
)
def test_record_whose_values_are_of_other_types_is_left_out(changes: dict[str, Any]) -> None:
    fields = json.loads(document_of(ENTRY))
    assert entry_of(json.dumps(fields)) == ENTRY
    assert entry_of(json.dumps(fields | changes)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"created": "x"},
        {"source": 5},
        {"rank": True},
        {"summary": {"converted_from": 5}},
        {"summary": {"traits": {"invocation_tokens": ["a"]}}},
        {"summary": {"traits": {"vocab_size": "x"}}},
        {"summary": {"traits": {"num_labels": -5}}},
        {"summary": {"traits": {"base": 5}}},
        {"summary": {"traits": {"added_tokens": [{"id": 1, "content": 5}]}}},
    ],
)
def test_record_whose_version_is_of_another_form_is_left_out(changes: dict[str, Any]) -> None:
    fields = json.loads(document_of(ENTRY))
    fields["versions"][0] |= changes
    assert entry_of(json.dumps(fields)) is None


def test_version_whose_traits_nobody_noted_only_adds_deltas() -> None:
    """Versions that were registered before there were other kinds can be scaled and composed as ever."""
    entry = entry_of(document_of(ENTRY))
    assert entry is not None
    assert entry.ref().traits == AdapterTraits(is_additive=True)


def test_metadata_may_hold_half_of_a_character_and_large_numbers() -> None:
    values = {"half": "\ud800", "large": 10**30}
    for entry in (
        replace(ENTRY, metadata=values),
        replace(ENTRY, versions=(replace(VERSION, noted=values | {"traits": {"vocab_size": 9}}),)),
        replace(ENTRY, versions=(replace(VERSION, noted={"chat_template": {"texts": values}}),)),
    ):
        found = entry_of(document_of(entry))
        assert found is not None
        assert found == entry
        assert found.ref().traits == entry.ref().traits


def test_record_is_read_in_about_the_time_that_its_json_takes() -> None:
    """A start reads every record. With the checks by hand it took 4.5 times as long as the parsing of the JSON."""
    traits = {"base": "sha256:" + "0" * 64, "is_additive": True, "added_tokens": [], "eos_token_ids": [2]}
    summary = {"targets": ["q_proj", "v_proj"], "kinds": ["lora"], "probe": {"max_logit": 1.5}, "traits": traits}
    text = document_of(replace(ENTRY, versions=(replace(VERSION, noted=summary),)))

    def seconds(read: Callable[[str], object]) -> float:
        return min(timeit.repeat(lambda: read(text), timer=time.thread_time, number=500, repeat=7))

    assert seconds(entry_of) < 2.5 * seconds(json.loads)
