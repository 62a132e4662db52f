"""Which blobs without a name a catalog may delete."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_serve.adapters.catalog.blob_leases import CatalogHistory
from lora_serve.adapters.catalog.blob_records import BlobRecord, key_of, text_of
from lora_serve.adapters.catalog.edits import new_entry
from lora_serve.adapters.catalog.journals.base import Page, Position
from lora_serve.adapters.catalog.state import CatalogState
from tests.catalog_versions import digest, version

STATE = CatalogState().after(Page(Position("here", 5), {}))


def records(position: Position) -> dict[str, str]:
    entry = new_entry("acme/a", "acme", version("a"), False, None)
    return {key_of("acme/a"): text_of(BlobRecord(entry, {}, position, 0.0))}


@pytest.mark.parametrize("is_shared", [True, False])
def test_copy_without_a_record_goes_and_an_only_copy_stays(is_shared: bool) -> None:
    """A replica that died between a commit and its record left it; another one may have freed the blob since."""
    assert CatalogHistory(STATE, is_shared).may_delete(digest("a"), {}, {}) is is_shared


@pytest.mark.parametrize("is_shared", [True, False])
def test_copy_of_what_cannot_be_read_stays(is_shared: bool) -> None:
    history = CatalogHistory(replace(STATE, unreadable=frozenset({"acme/b"})), is_shared)
    assert not history.may_delete(digest("a"), {}, {})


@pytest.mark.parametrize(
    ("position", "is_past"), [(Position("here", 5), True), (Position("here", 6), False), (Position("else", 1), False)]
)
def test_copy_with_a_record_goes_only_if_the_record_is_of_this_catalog_s_past(
    position: Position, is_past: bool
) -> None:
    assert CatalogHistory(STATE, is_shared=True).may_delete(digest("a"), records(position), {}) is is_past
