"""The log's two forms."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from lora_serve.logs import JsonFormatter, drop_import_noise


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


def test_torchaos_remarks_at_import_are_dropped_and_its_real_warnings_are_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torchao", "torch.utils._pytree"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
    drop_import_noise()
    with caplog.at_level(logging.WARNING):
        logging.getLogger("torchao").warning("Failed to load %s: it is for another GPU", "x.so")
        logging.getLogger("torchao").warning("int4: %s", "no kernel")
        logging.getLogger("torch.utils._pytree").warning("<enum 'K'> is an Enum subclass")
        logging.getLogger("torch.utils._pytree").warning("a node was registered twice")
    assert {"int4: no kernel"} <= set(caplog.messages) <= {"int4: no kernel", "a node was registered twice"}


def test_command_that_imports_torchao_says_nothing_of_it() -> None:
    program = (
        "from lora_serve.cli import main; main(['--version']); import torchao.prototype.safetensors.safetensors_utils"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
