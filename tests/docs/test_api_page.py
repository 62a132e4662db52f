"""The table of clients' fields: each of the installed openai package, and each of ours, has a row that is true."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from openai.types import completion_create_params as completions
from openai.types import embedding_create_params as embeddings
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from lora_serve.server.routes import TABLE
from lora_serve.server.schemas.fields import Refused, standing
from tests.docs.pages import ROOT

CLIENTS = yaml.safe_load((ROOT / "docs" / "reference" / "clients.yaml").read_text())
PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()
PATHS = list(dict.fromkeys(path for facts in CLIENTS.values() for path in facts["fields"]))
SCHEMAS = {route.path: route.schemas[0] for route in TABLE.routes if route.method == "POST" and route.schemas}


def rows(path: str) -> dict[str, list[str]]:
    """The cells of each field's row, without the field."""
    section = PAGE.partition(f"## POST {path}\n")[2].partition("\n## ")[0]
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in section.splitlines() if line.startswith("| `")]
    return {name.strip("`"): rest for name, *rest in cells}


@pytest.mark.parametrize(
    ("path", "types", "base"),
    [
        ("/v1/completions", completions, "CompletionCreateParams"),
        ("/v1/chat/completions", chat, "CompletionCreateParams"),
        ("/v1/responses", responses, "ResponseCreateParams"),
        ("/v1/embeddings", embeddings, "EmbeddingCreateParams"),
    ],
)
def test_openais_lists_are_those_of_the_installed_package(path: str, types: Any, base: str) -> None:
    endings = ("Base", "Streaming", "NonStreaming") if hasattr(types, f"{base}Base") else ("",)
    kinds = (getattr(types, f"{base}{ending}") for ending in endings)
    theirs = {name for kind in kinds for name in kind.__annotations__}
    assert theirs == set(CLIENTS["OpenAI"]["fields"][path])


@pytest.mark.parametrize("path", PATHS)
def test_every_field_of_a_client_and_of_ours_has_a_row(path: str) -> None:
    found = rows(path)
    for api, facts in CLIENTS.items():
        for name in facts["fields"].get(path, ()):
            assert api in found[name][0], (api, name)
    assert set(found) == set(SCHEMAS[path].model_fields)


@pytest.mark.parametrize("path", PATHS)
def test_row_says_what_the_schema_does(path: str) -> None:
    for name, (_, state, _) in rows(path).items():
        mark = standing(SCHEMAS[path].model_fields[name])
        assert state == ("works" if mark is None else "refused" if isinstance(mark, Refused) else "ignored"), name


def test_vllms_lists_are_long_and_without_doubles() -> None:
    for path, names in CLIENTS["vLLM"]["fields"].items():
        assert len(names) == len(set(names)) > (50 if "completions" in path else 9), path
