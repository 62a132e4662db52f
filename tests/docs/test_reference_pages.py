"""The generated reference pages say what the code says: run scripts/docs after a change of flags, routes or metrics."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "scripts" / "reference_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(180)
def test_reference_pages_are_as_the_code_has_it(reference: ModuleType) -> None:
    for name, text in reference.pages().items():
        assert (ROOT / "docs" / "reference" / name).read_text() == text, f"docs/reference/{name}: run scripts/docs"


def test_field_without_a_meaning_is_an_error(reference: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"does not explain ChatFields\.new"):
        reference._meaning({"old": "..."}, "ChatFields", "new")


def test_field_of_a_client_of_which_nobody_has_thought_is_an_error(reference: ModuleType) -> None:
    """So a new version of a client is looked at: works, refused or ignored."""
    clients = {"New": {"source": "x", "fields": {"/v1/completions": ["prompt", "mind_reading"]}}}
    with pytest.raises(SystemExit, match="mind_reading"):
        reference.api_page({}, clients)
