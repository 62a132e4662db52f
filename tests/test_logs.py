"""The log's two forms."""

from __future__ import annotations

import json
import logging

from lora_serve.logs import JsonFormatter


def test_json_lines_carry_the_extra_fields_and_the_traceback() -> None:
    record = logging.makeLogRecord({"name": "a.b", "levelname": "WARNING", "msg": "%s left", "args": ("it",)})
    record.request_id = "r1"
    record.prompt_tokens = 3
    try:
        raise ValueError("no")
    except ValueError as error:
        record.exc_info = (ValueError, error, error.__traceback__)
    entry = json.loads(JsonFormatter().format(record))
    assert entry.items() >= {"level": "warning", "logger": "a.b", "message": "it left", "request_id": "r1"}.items()
    assert entry["prompt_tokens"] == 3
    assert "ValueError: no" in entry["exception"]
    assert set(entry) == {"time", "level", "logger", "message", "request_id", "prompt_tokens", "exception"}
