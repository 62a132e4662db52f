"""docs/how-to/moving.md names flags, fields and defaults that are there."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "how-to" / "moving.md").read_text()
HTTP = (ROOT / "docs" / "reference" / "http.md").read_text()


def rows(table: str) -> Iterator[list[str]]:
    """The cells of a table's rows."""
    text = PAGE.partition(f"<!-- table: {table} -->\n\n")[2].partition("\n\n")[0]
    for line in text.splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


@pytest.mark.parametrize("peer", ["vllm", "lorax", "tgi"])
def test_flags_on_our_side_are_settings(peer: str) -> None:
    from lora_serve.core.settings import Settings

    known = {"--" + name.replace("_", "-") for name in Settings.model_fields}
    found = list(rows(f"{peer} flags"))
    assert len(found) > 15
    for cells in found:
        ours = set(re.findall(r"--[a-z][a-z-]+", cells[1]))
        assert ours <= known, cells
        assert ours or cells[1] == "none", cells


def test_flags_that_are_not_ours_are_refused() -> None:
    from lora_serve.core.errors import ConfigError
    from lora_serve.core.settings import Settings, load_settings

    known = {"--" + name.replace("_", "-") for name in Settings.model_fields}
    others = {
        flag
        for peer in ("lorax", "tgi")
        for theirs, ours, *_ in rows(f"{peer} flags")
        if ours == "none"
        for flag in re.findall(r"--[a-z][a-z-]+", theirs)
    }
    assert len(others) > 3
    assert not others & known
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text("{}")
        for flag in others:
            with pytest.raises(ConfigError):  # in words of its own where it is vLLM's flag too
                load_settings(["--model", folder, flag])


def test_numbers_on_our_side_are_the_defaults() -> None:
    from lora_serve.core.settings import Settings

    defaults = {name: Settings.model_fields[name].default for name in Settings.model_fields}
    assert defaults["max_loras"] == 16
    assert defaults["max_lora_rank"] == 512
    assert (defaults["max_num_seqs"], defaults["max_num_batched_tokens"]) == (64, 512)
    assert (defaults["max_stop"], defaults["max_prompts"]) == (16, 64)
    assert defaults["max_body_size"] == 16 * 2**20
    assert (defaults["host"], defaults["port"]) == ("127.0.0.1", 8000)


@pytest.mark.parametrize("peer", ["vllm", "lorax", "tgi"])
def test_fields_on_our_side_are_fields(peer: str) -> None:
    known = set(re.findall(r"^\| `(\w+)` \|", HTTP, re.M)) | set(re.findall(r"`(/[\w/]+)`", HTTP))
    for theirs, ours in rows(f"{peer} fields"):
        if ours.startswith("the same"):
            assert set(re.findall(r"`(\w+)`", theirs)) <= known, theirs
        elif not ours.startswith(("refused", "ignored", "none")):
            first = re.findall(r"`(\w+)`", ours)
            assert first, ours
            assert set(first[:1]) <= known, ours


def test_fields_that_are_refused_and_ignored_are() -> None:
    from lora_serve.server.schemas.inference import CompletionFields

    with pytest.raises(ValidationError, match="template"):
        CompletionFields.model_validate({"prompt": "x", "chat_template": "x"})
    with pytest.raises(ValidationError, match="beam search"):
        CompletionFields.model_validate({"prompt": "x", "use_beam_search": True})
    CompletionFields.model_validate({"prompt": "x", "length_penalty": 1.0})
