"""The chat template beside an adapter: found, compared with the base's, kept, and a part of the digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_serve.adapters.catalog.entry import (
    KEY,
    CatalogEntry,
    Route,
    VersionEntry,
    document_of,
    entry_of,
    note_of,
    noted_template,
    vouched,
)
from lora_serve.adapters.checkpoint.chat_template import (
    BaseTemplates,
    ChatTemplates,
    FoundTemplate,
    compare_template,
    examine_template,
    read_kept,
)
from lora_serve.adapters.checkpoint.content import CHAT_TEMPLATE_NAME, adapter_digest, content_names, read_content
from lora_serve.adapters.stores.base import AdapterStore
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.redis import RedisStore

BASE = BaseTemplates(
    ChatTemplates({"default": "a\n{{ b }}\n", "tool_use": "t"}, {"eos_token": "</s>"}), lambda text: None
)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def folder_of(path: Path, jinja: str | None = None, settings: Any = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / CONFIG).write_text("{}")
    (path / WEIGHTS).write_bytes(b"weights")
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja)
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize(
    ("jinja", "settings", "expected"),
    [
        (None, None, None),
        (None, {"chat_template": None}, None),
        (None, {"chat_template": "  "}, None),
        (None, {"chat_template": [{"name": "default"}]}, None),
        (None, {"chat_template": [{"name": {"a": 1}, "template": "other"}]}, None),
        ("a\n{{ b }}", None, False),
        ("a  \r\n{{ b }}\r\n\r\n", None, False),
        (None, {"chat_template": {"default": "a\n{{ b }}", "tool_use": "t"}}, False),
        (None, {"chat_template": [{"name": "tool_use", "template": "other"}]}, True),
        ("a\n{{ c }}", {"chat_template": "a\n{{ b }}"}, True),
        ("a\n{{ b }}", {"eos_token": "<|end|>"}, False),  # the template does not name it
        ("a {{ eos_token }}", {"eos_token": "<|end|>"}, True),
    ],
)
def test_template_is_compared_with_the_bases(
    tmp_path: Path, jinja: str | None, settings: Any, expected: bool | None
) -> None:
    found = compare_template(folder_of(tmp_path / "a", jinja, settings), BASE)
    assert (None if found is None else found.differs) is expected


def test_only_a_template_that_differs_changes_the_digest(tmp_path: Path) -> None:
    plain = adapter_digest(folder_of(tmp_path / "a"))
    same = folder_of(tmp_path / "b", "a\n{{ b }}")
    examine_template(same, BASE)
    assert adapter_digest(same) == plain
    own = folder_of(tmp_path / "c", "own {{ eos_token }}", {"eos_token": "<|end|>"})
    found = examine_template(own, BASE)
    assert (
        found
        == read_kept(own)
        == FoundTemplate(True, ChatTemplates({"default": "own {{ eos_token }}"}, {"eos_token": "<|end|>"}))
    )
    assert adapter_digest(own) != plain
    assert read_content(own, adapter_digest(own)).digest == adapter_digest(own)
    assert content_names(own) == (CONFIG, WEIGHTS, CHAT_TEMPLATE_NAME)


@pytest.fixture(params=["disk", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> AdapterStore:
    if request.param == "disk":
        return DiskStore(tmp_path / "store")
    return RedisStore(request.getfixturevalue("redis_url"), f"{tmp_path.name}:", tmp=tmp_path)


def test_store_keeps_the_template_with_the_adapter(store: AdapterStore, tmp_path: Path) -> None:
    own = folder_of(tmp_path / "a", "own")
    examine_template(own, BASE)
    digest = adapter_digest(own)
    store.put(digest, own)
    with store.open(digest) as folder:
        assert adapter_digest(folder) == digest
        assert read_kept(folder) == FoundTemplate(True, ChatTemplates({"default": "own"}))
    store.delete(digest)
    assert not store.has(digest)


def version_with(found: FoundTemplate, number: int = 1) -> VersionEntry:
    return VersionEntry(number, f"sha256:{number:064x}", 1, 1, {KEY: note_of(found)}, "upload", 0.0)


def test_record_of_the_catalog_has_the_template_and_equal_ones_are_one_text() -> None:
    found = FoundTemplate(True, ChatTemplates({"default": "".join(["long ", "text"])}, {"eos_token": "x"}))
    versions = vouched(version_with(found)), version_with(found, 2)
    entry = CatalogEntry("a", "default", False, 0.0, {}, 2, Route(1), versions)
    read = [entry_of(document_of(entry)) for _ in range(2)]
    notes = [noted_template(version) for one in read if one is not None for version in one.versions]
    assert [note.is_vouched for note in notes if note is not None] == [True, False, True, False]
    assert len({id(note.texts[0][1]) for note in notes if note is not None}) == 1
    assert noted_template(version_with(FoundTemplate(False))).is_used("tenant") is False  # type: ignore[union-attr]


@pytest.mark.parametrize("note", [3, [], "x", {"texts": 3}, {"texts": {"a": 3}}, {"texts": {}, "special_tokens": [1]}])
def test_note_in_another_form_is_none(note: Any) -> None:
    entry = CatalogEntry("a", "default", False, 0.0, {}, 1, Route(1), (version_with(FoundTemplate(False)),))
    document = json.loads(document_of(entry))
    document["versions"][0]["summary"][KEY] = note
    read = entry_of(json.dumps(document))
    assert read is not None
    assert noted_template(read.versions[0]) is None
