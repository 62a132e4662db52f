"""The end tokens beside an adapter: found, kept without the base's, and a part of the digest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_serve.adapters.checkpoint.content import adapter_digest, check_sizes, read_content
from lora_serve.adapters.checkpoint.own_tokens import (
    BaseTokens,
    EndTokens,
    find_end_tokens,
    read_end_tokens,
    write_end_tokens,
)
from lora_serve.core.adapter import AddedToken
from lora_serve.core.errors import InvalidAdapterError

BASE = BaseTokens({"a": 0, "</s>": 2, "<|end|>": 3, "<|im_end|>": 5}, ends=(3,))
ADDED = (AddedToken(6, "<new>"),)


def found_in(folder: Path, tokenizer: Any, generation: Any) -> EndTokens:
    folder.mkdir(exist_ok=True)
    for name, table in (("tokenizer_config.json", tokenizer), ("generation_config.json", generation)):
        if table is not None:
            (folder / name).write_text(table if isinstance(table, str) else json.dumps(table))
    return find_end_tokens(folder, ADDED, BASE, vocab_size=8, ends=(2,))


@pytest.mark.parametrize(
    ("tokenizer", "generation", "ids", "num_warnings"),
    [
        (None, None, (), 0),
        ({"eos_token": "<|im_end|>"}, None, (5,), 0),
        ({"eos_token": {"content": "<|im_end|>"}}, {"eos_token_id": 7}, (5, 7), 0),
        ({"eos_token": "</s>"}, {"eos_token_id": [2, 3]}, (), 0),  # the base's own
        ({"eos_token": "<new>"}, {"eos_token_id": None}, (6,), 0),
        ({"eos_token": "<|nope|>"}, None, (), 1),
        ({"eos_token": None}, {"eos_token_id": [5, 8, 9]}, (5,), 2),
        (None, {"eos_token_id": "5"}, (), 1),
        (None, {"eos_token_id": [True]}, (), 1),
        (None, {"eos_token_id": list(range(65))}, (0, 1, 4, 5, 6, 7), 4),
        (None, {"eos_token_id": [5, -1]}, (5,), 1),
        ("no JSON", "[1]", (), 1),
    ],
)
def test_end_tokens_are_found(
    tmp_path: Path, tokenizer: Any, generation: Any, ids: tuple[int, ...], num_warnings: int
) -> None:
    found = found_in(tmp_path, tokenizer, generation)
    assert (found.ids, len(found.warnings)) == (ids, num_warnings)
    assert all(text.endswith("ends no answer.") for text in found.warnings)


def test_only_own_end_tokens_change_the_digest(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text(name)
    write_end_tokens(tmp_path, found_in(tmp_path, {"eos_token": "</s>"}, None))
    plain = adapter_digest(tmp_path)
    found = found_in(tmp_path, {"eos_token": "<|im_end|>"}, None)
    assert adapter_digest(tmp_path) == plain
    write_end_tokens(tmp_path, found)
    assert (read_end_tokens(tmp_path), adapter_digest(tmp_path) == plain) == (found, False)
    assert read_content(tmp_path, adapter_digest(tmp_path)).added_tokens is None
    check_sizes(tmp_path)
    (tmp_path / "lora_serve_end_tokens.json").write_text('{"token_ids": [-1]}')
    with pytest.raises(InvalidAdapterError, match="must hold token ids"):
        read_end_tokens(tmp_path)
