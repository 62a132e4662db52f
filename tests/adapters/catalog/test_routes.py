"""The canary's split: its size, and that everybody keeps his side."""

from __future__ import annotations

import pytest

from lora_serve.adapters.catalog.catalog import find, split
from lora_serve.adapters.catalog.edits import new_entry, routed, with_version
from lora_serve.adapters.catalog.entry import Canary, CatalogEntry
from lora_serve.adapters.catalog.journals.base import Position
from lora_serve.adapters.catalog.state import Snapshot
from tests.catalog_versions import digest, version

KEYS = [f"tenant-{number % 7}\0user-{number}" for number in range(10_000)]


def entry(percent: float, name: str = "acme/support", canary: int = 2) -> CatalogEntry:
    made = new_entry(name, "acme", version("a"), False, None)
    for letter in "bc":
        made = with_version(made, version(letter), False, None, activate=False)
    return routed(made, 1, Canary(canary, percent))


def chosen(table: CatalogEntry) -> set[str]:
    return {key for key in KEYS if split(table, key).version.version != 1}


@pytest.mark.parametrize("percent", [0.0, 1.0, 10.0, 33.3, 50.0, 99.0, 100.0])
def test_canary_gets_its_part_of_ten_thousand_keys(percent: float) -> None:
    assert abs(len(chosen(entry(percent))) / len(KEYS) * 100 - percent) < 2


def test_everybody_keeps_his_side_while_the_canary_grows() -> None:
    sides = [chosen(entry(percent)) for percent in (1.0, 10.0, 50.0, 100.0)]
    assert sides[0] < sides[1] < sides[2] < sides[3]
    assert chosen(entry(10.0)) == sides[1]


def test_other_adapters_and_other_canaries_split_other_users_off() -> None:
    ours = chosen(entry(10.0))
    for other in (chosen(entry(10.0, name="acme/sales")), chosen(entry(10.0, canary=3))):
        assert len(ours & other) < 0.2 * len(ours)  # a tenth is chance


def previous(table: CatalogEntry, name: str) -> int | None:
    """The number of the version that the name meant before."""
    found = find(Snapshot.of(Position(), {table.name: table}, {"live": "acme/support@2"}), name, None, KEYS[0])
    assert found is not None
    return found.previous and found.previous.version


def test_version_before_a_canary_is_the_default_and_before_that_the_last_one_in_history() -> None:
    once = routed(entry(0.0), 3, None)
    assert previous(once, "acme/support") == 1
    assert previous(routed(once, 2, None), "acme/support") == 3
    assert previous(entry(100.0), "acme/support") == 1
    assert previous(entry(0.0), "acme/support") is None


def test_name_of_a_version_never_meant_another_one() -> None:
    table = routed(entry(100.0), 3, Canary(2, 100.0))
    assert previous(table, "acme/support") == 3
    for name in ("acme/support@2", f"acme/support@{digest('b')}", "live"):
        assert previous(table, name) is None
