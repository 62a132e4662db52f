"""The places that scripts/mutations.py breaks are there, once each: whoever moves such a line moves its row as well."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutations", ROOT / "scripts" / "mutations.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutations"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


MUTATIONS = table().MUTATIONS


def test_there_are_twenty_of_them_on_every_floor_and_for_every_invariant() -> None:
    assert len(MUTATIONS) == 20
    floors = {mutation.file.partition("/")[0] for mutation in MUTATIONS}
    assert floors >= {"adapters", "model", "engine", "client", "text", "tenancy", "server"}
    assert {mutation.invariant for mutation in MUTATIONS} == set("1234567")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "_"))
def test_its_place_is_there_once_and_so_are_the_tests_that_must_see_it(mutation: Any) -> None:
    path = ROOT / "lora_serve" / mutation.file
    assert path.read_text().count(mutation.old) == 1, f"scripts/mutations.py: {mutation.name}"
    assert all((ROOT / "tests" / name).exists() for name in mutation.tests.split())
