"""JSON pointers find the schema that they lead to, however long they are."""

from __future__ import annotations

import time

from lora_serve.text.grammars.cost import SchemaPlaces
from tests.attempts import in_some_attempt


def test_pointer_leads_to_its_place_alone() -> None:
    places = SchemaPlaces()
    items = places.add(places.root, "/items")
    first = places.add(items, "/prefixItems/0")
    assert str(first) == "#/items/prefixItems/0"
    assert places.find(str(first)) is first
    assert places.find("#") is places.root
    assert [places.find(wrong) for wrong in ("#/prefixItems/0", "#/items/prefixItems", "#/items/", "#/items/0/0")] == [
        None
    ] * 4


def test_long_pointer_to_nothing_is_seen_through_at_once() -> None:
    def seek() -> None:
        began = time.process_time()
        assert SchemaPlaces().find("#" + "/a" * 60_000) is None
        assert time.process_time() - began < 0.2

    in_some_attempt(seek)
