"""--response-format: files and folders of schemas become the requests' formats, in turn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from lora_serve.commands.bench.flags import response_formats
from lora_serve.commands.bench.sending import request_body
from lora_serve.commands.bench.workload import PlannedRequest, Target

OBJECT = {"type": "object"}


def test_schemas_of_files_and_folders_go_out_in_turn(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(OBJECT))
    (tmp_path / "b.json").write_text(json.dumps([{"type": "array"}, {"type": "json_object"}]))
    formats = response_formats(str(tmp_path))
    assert formats == (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT}},
        {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "array"}}},
        {"type": "json_object"},
    )
    assert response_formats(str(tmp_path / "a.json")) == formats[:1]
    target = Target("http://127.0.0.1:1", "base", response_formats=formats)
    sent = [request_body(target, PlannedRequest((1,), None, 2), index)["response_format"] for index in range(4)]
    assert sent == [*formats, formats[0]]
    assert "response_format" not in request_body(Target("http://127.0.0.1:1", "base"), PlannedRequest((1,), None, 2))


def test_any_object_needs_no_file() -> None:
    assert response_formats("json_object") == ({"type": "json_object"},)


@pytest.mark.parametrize("content", [None, "{", "5", "[]"])
def test_what_is_no_schema_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(argparse.ArgumentTypeError):
        response_formats(str(file))
