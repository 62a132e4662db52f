"""What is taken of an adapter's tokenizer.json: tokens beyond the base's, and nothing that is not well formed."""

from __future__ import annotations

import json
import shutil
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from lora_serve.adapters.archives.unpacking import unpack
from lora_serve.adapters.catalog.catalog import Catalog
from lora_serve.adapters.catalog.opening import open_catalog
from lora_serve.adapters.checkpoint import own_tokens
from lora_serve.adapters.checkpoint.bound import BoundAdapter, BoundTokens
from lora_serve.adapters.checkpoint.content import ADDED_TOKENS_NAME, adapter_digest
from lora_serve.adapters.checkpoint.own_tokens import (
    BaseTokens,
    added_tokens_text,
    find_added_tokens,
    read_added_tokens,
    write_added_tokens,
)
from lora_serve.adapters.stores.disk import DiskStore
from lora_serve.adapters.stores.disk_tables import is_record
from lora_serve.core.adapter import AddedToken
from lora_serve.core.config import AdapterConfig
from lora_serve.core.errors import InvalidAdapterError
from lora_serve.core.model_spec import EmbeddingShape, LinearShape, ModelSpec
from tests.fake_verifier import FakeVerifier
from tests.text.tiny_tokenizer import byte_level_tokenizer
from tests.verifying_registry import VerifyingRegistry

V, GROWN, DIM = 32, 36, 4
BASE = BaseTokens({f"t{number}": number for number in range(V)})
TABLE = {"weight": (V, DIM)}
SPEC = ModelSpec(
    "tiny", "LlamaForCausalLM", V, 64, (0,), 1, {"q_proj": LinearShape(DIM, DIM), "lm_head": LinearShape(DIM, V)}, 0,
    "float32", "cpu", {"embed_tokens": EmbeddingShape(V, DIM)},
    {"embed_tokens": TABLE, "q_proj": {"weight": (DIM, DIM)}, "lm_head": TABLE}, "embed_tokens", "lm_head",
)  # fmt: skip
BOUND = BoundAdapter(vocab_size=GROWN)
NEW = {"id": V, "content": "<ticket>", "special": False}


def find(folder: Path, entries: Any, bound: BoundAdapter = BOUND) -> tuple[AddedToken, ...]:
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": entries, "model": {}}))
    return find_added_tokens(folder, bound, SPEC, BASE)


def test_tokens_beyond_the_bases_are_taken_with_how_they_are_looked_for(tmp_path: Path) -> None:
    second = {"id": V + 1, "content": "<mute>", "special": True, "lstrip": True, "normalized": True}
    known = {"id": 3, "content": "t3", "special": True}
    assert find(tmp_path, [second, known, NEW]) == (
        AddedToken(V, "<ticket>"),
        AddedToken(V + 1, "<mute>", is_special=True, lstrip=True, normalized=True),
    )


def test_a_tokenizer_that_transformers_saved_is_read(tmp_path: Path) -> None:
    tokenizer: PreTrainedTokenizerFast = byte_level_tokenizer()
    base = BaseTokens(tokenizer.get_vocab())
    tokenizer.add_tokens(["<ticket>", "köln 😀"])
    tokenizer.save_pretrained(tmp_path)
    size = len(base.ids)
    found = find_added_tokens(tmp_path, BoundAdapter(vocab_size=size + 2), SPEC, base)
    assert [(token.id, token.content) for token in found] == [(size, "<ticket>"), (size + 1, "köln 😀")]
    write_added_tokens(tmp_path, found)
    assert read_added_tokens(tmp_path) == found


def test_an_adapter_that_trained_no_new_rows_has_no_new_tokens(tmp_path: Path) -> None:
    assert find(tmp_path, "nonsense", BoundAdapter()) == ()
    assert find(tmp_path, "nonsense", BoundAdapter(tokens={"embed_tokens": BoundTokens("x", (3,))})) == ()


def test_rows_of_the_base_without_a_token_may_be_given_one(tmp_path: Path) -> None:
    """Many bases pad their vocabulary: new tokens then need no resizing."""
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{**NEW, "id": V - 2}]}))
    base = BaseTokens({f"t{number}": number for number in range(V - 2)})
    for bound in (
        BoundAdapter(tokens={"embed_tokens": BoundTokens("x", (V - 2,))}),
        BoundAdapter(parameters={"embed_tokens": {"weight": "x"}}),
    ):
        assert find_added_tokens(tmp_path, bound, SPEC, base) == (AddedToken(V - 2, "<ticket>"),)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ("nonsense", "is no list"),
        ([7], "must have an id and a content"),
        ([{"id": True, "content": "x"}], "must have an id and a content"),
        ([{"id": -1, "content": "x"}], "must have an id and a content"),
        ([{"id": V, "content": 3}], "must have an id and a content"),
        ([{"id": V, "content": ""}], "1 to 256 characters"),
        ([{"id": V, "content": "x" * 257}], "1 to 256 characters"),
        ([{"id": V, "content": "\ud800"}], "not valid JSON"),
        ([{**NEW, "special": 1}], "must be true or false"),
        ([{**NEW, "lstrip": "no"}], "must be true or false"),
        ([NEW, {"id": V, "content": "other"}], "occurs twice"),
        ([NEW, {**NEW, "id": V + 1}], "occurs twice"),
        ([{"id": 3, "content": "<ticket>"}], "only tokens may be added"),
        ([{"id": V, "content": "t3"}], "only tokens may be added"),
        ([{**NEW, "id": V + 1}], "without a gap"),
        ([{"id": V + i, "content": f"<{i}>"} for i in range(5)], "has the token id 36"),
        ([{"id": V + i, "content": f"<{i}>"} for i in range(4097)], "4096 are allowed"),
    ],
)
def test_hostile_tokens_are_refused_in_words(tmp_path: Path, entries: Any, reason: str) -> None:
    with pytest.raises(InvalidAdapterError, match=reason):
        find(tmp_path, entries)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "empty"),
        (b"[]", "not a JSON object"),
        (b'{"model": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"added_tokens": ' + b"[" * 30 + b"]" * 29, "not a JSON object"),
        (b'{"model": "no end', "not a JSON object"),
        (b'{"added_tokens": [{"id": NaN}]}', "not valid JSON"),
        (b'{"added_tokens": [{"id": 32, "id": 33, "content": "x"}]}', "occurs twice"),
        (b'{"added_tokens": ["\xff"]}', "not valid JSON"),
    ],
)
def test_broken_files_are_refused_in_words(tmp_path: Path, text: bytes, reason: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(InvalidAdapterError, match=reason):
        find_added_tokens(tmp_path, BOUND, SPEC, BASE)


def test_a_string_without_an_end_is_looked_through_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b'{"model": ["' + b'\\"' * 40_000)
    start = time.thread_time()
    with pytest.raises(InvalidAdapterError, match="not a JSON object"):
        find_added_tokens(tmp_path, BOUND, SPEC, BASE)
    assert time.thread_time() - start < 5  # half a minute, and a thousand times that at the largest size allowed


def test_a_file_or_a_list_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_tokens, "MAX_ADDED_TOKENS_BYTES", 50)
    with pytest.raises(InvalidAdapterError, match="take more than 50 bytes"):
        find(tmp_path, [{**NEW, "more": "x" * 60}])
    monkeypatch.setattr(own_tokens, "MAX_TOKENIZER_BYTES", 20)
    with pytest.raises(InvalidAdapterError, match="larger than 20 bytes"):
        find(tmp_path, [NEW])


def test_the_list_is_found_behind_any_other_value(tmp_path: Path) -> None:
    table = {"a": 'x{["\\', "b": [1, {"added_tokens": [5]}, "]"], "c": -1.5e3, "d": None, "added_tokens": [1], "e": 2}
    (tmp_path / "tokenizer.json").write_text(json.dumps(table, indent=1))
    assert json.loads(added_tokens_text(tmp_path / "tokenizer.json")) == [1]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert added_tokens_text(tmp_path / "tokenizer.json") == b"[]"


# -- a whole registration ----------------------------------------------------------------------------------------------


@pytest.fixture
def registry(config: AdapterConfig, catalog: Catalog) -> VerifyingRegistry:
    return VerifyingRegistry(config, SPEC, catalog, DiskStore(config.store), FakeVerifier(), BASE)


def make(folder: Path, rows: int = GROWN, tokens: Any = (NEW,), **tensors: torch.Tensor) -> Path:
    """An adapter of a resized model, as PEFT saves it, with its tokenizer beside it."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    settings["modules_to_save"] = ["embed_tokens", "lm_head"]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    shapes = {"q_proj.lora_A": (2, DIM), "q_proj.lora_B": (DIM, 2), "embed_tokens": (rows, DIM), "lm_head": (rows, DIM)}
    table = {f"base_model.model.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    found = {**table, **{f"base_model.model.{name}": tensor for name, tensor in tensors.items()}}
    save_file(found, folder / "adapter_model.safetensors")
    if tokens is not None:
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": list(tokens), "pre_tokenizer": {"x": 1}}))
    return folder


def test_a_registered_adapter_keeps_its_tokens_in_the_store_and_the_catalog(
    registry: VerifyingRegistry, config: AdapterConfig, catalog: Catalog
) -> None:
    ref = registry.register_folder("acme/a", make(config.adapter_root[0] / "a")).ref
    assert (ref.traits.vocab_size, ref.traits.added_tokens) == (GROWN, (AddedToken(V, "<ticket>"),))
    assert not ref.traits.is_additive
    catalog.close()
    again = open_catalog(config.store)
    assert again.resolve("acme/a").ref.traits == ref.traits
    again.close()
    with DiskStore(config.store).open(ref.digest) as blob:
        names = {path.name for path in blob.iterdir() if not is_record(path.name)}
        assert names == {"adapter_config.json", "adapter_model.safetensors", ADDED_TOKENS_NAME}
        assert adapter_digest(blob) == ref.digest


def test_other_tokens_are_other_content_and_the_rest_of_the_tokenizer_is_none(
    registry: VerifyingRegistry, config: AdapterConfig
) -> None:
    root = config.adapter_root[0]
    first = registry.register_folder("acme/a", make(root / "a")).ref
    bare = registry.register_folder("acme/a", make(root / "b", tokens=None)).ref
    other = registry.register_folder("acme/a", make(root / "c", tokens=[{**NEW, "content": "<other>"}])).ref
    assert len({first.digest, bare.digest, other.digest}) == 3
    (root / "a" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}, "added_tokens": [NEW]}))
    assert not registry.register_folder("acme/b", root / "b").ref.traits.added_tokens
    assert registry.register_folder("acme/a", root / "a").ref.digest == first.digest


def test_a_tokenizer_that_is_needed_must_be_sound_and_lie_in_the_folder(
    registry: VerifyingRegistry, config: AdapterConfig
) -> None:
    folder = make(config.adapter_root[0] / "a", rows=V)
    (folder / "tokenizer.json").write_text("nonsense")
    with pytest.raises(InvalidAdapterError, match="not a JSON object"):  # its embedding is its own
        registry.register_folder("acme/a", folder)
    outside = folder.parent.parent / "elsewhere.json"
    outside.write_text("{}")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(outside)
    with pytest.raises(InvalidAdapterError, match="empty"):
        registry.register_folder("acme/a", folder)


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_brings_the_tokenizer_beside_its_other_files_only(tmp_path: Path, kind: str) -> None:
    folder = make(tmp_path / "source" / "adapter")
    other = tmp_path / "source" / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text('{"added_tokens": [1]}')
    archive, target = tmp_path / "archive", tmp_path / "target"
    target.mkdir()
    if kind == "tar":
        with tarfile.open(archive, "w") as tar:
            tar.add(other, "other")
            tar.add(folder, "adapter")
    else:
        with zipfile.ZipFile(archive, "w") as packed:
            for path in [*other.iterdir(), *folder.iterdir()]:
                packed.write(path, path.relative_to(tmp_path / "source"))
    unpack(archive, target, 10**6)
    assert sorted(path.name for path in target.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (target / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


# -- what the tensors must be ------------------------------------------------------------------------------------------


def refused(registry: VerifyingRegistry, folder: Path) -> str:
    with pytest.raises(InvalidAdapterError) as caught:
        registry.register_folder("acme/a", folder)
    shutil.rmtree(folder)
    return str(caught.value)


def test_tables_that_do_not_fit_each_other_are_refused(registry: VerifyingRegistry, config: AdapterConfig) -> None:
    root = config.adapter_root[0]
    other = {"lm_head.weight": torch.zeros(GROWN + 1, DIM)}
    assert "embed_tokens.weight' has shape [36, 4]" in refused(registry, make(root / "a", **other))
    copy = {"embed_tokens.modules_to_save.weight": torch.zeros(GROWN, DIM)}
    assert "one and the same to PEFT, but they differ" in refused(registry, make(root / "b", **copy))
    assert "more than 65536 above" in refused(registry, make(root / "c", rows=V + 65537))


def test_new_tokens_without_rows_of_the_output_head_are_refused(
    registry: VerifyingRegistry, config: AdapterConfig
) -> None:
    folder = make(config.adapter_root[0] / "a")
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings |= {"modules_to_save": None, "trainable_token_indices": [V, V + 1]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    prefix = "base_model.model."
    low_rank = {
        f"{prefix}q_proj.lora_A.weight": torch.ones(2, DIM),
        f"{prefix}q_proj.lora_B.weight": torch.ones(DIM, 2),
    }
    rows = {f"{prefix}embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(2, DIM)}
    save_file(low_rank | rows, folder / "adapter_model.safetensors")
    assert "no row of lm_head for the new tokens 32 to 33" in refused(registry, folder)
