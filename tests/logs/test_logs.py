"""The log's two forms, what its lines carry, and what they never show."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from structlog.contextvars import bound_contextvars

from lora_serve.logs import drop_import_noise
from lora_serve.logs.pipeline import Redaction, line_formatter, passwords_in


def record_of(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    fields = {"name": "a.b", "levelname": "WARNING", "levelno": logging.WARNING, "msg": message, "args": arguments}
    return logging.makeLogRecord({**fields, **extra})


def failed(record: logging.LogRecord, error: Exception) -> logging.LogRecord:
    try:
        raise error
    except Exception:
        record.exc_info = sys.exc_info()
    return record


def as_json(record: logging.LogRecord, redaction: Redaction | None = None) -> dict[str, Any]:
    line = line_formatter("json", redaction or Redaction()).format(record)
    assert "\n" not in line
    return json.loads(line)


def as_text(record: logging.LogRecord, redaction: Redaction | None = None) -> str:
    return line_formatter("console", redaction or Redaction()).format(record)


def test_json_lines_carry_the_extra_fields_and_the_traceback() -> None:
    record = failed(record_of("%s left", "it", request_id="r1", prompt_tokens=3), ValueError("no"))
    entry = as_json(record)
    assert entry.items() >= {"level": "warning", "logger": "a.b", "message": "it left", "request_id": "r1"}.items()
    assert entry["prompt_tokens"] == 3
    assert "ValueError: no" in entry["exception"]
    assert list(entry)[:4] == ["time", "level", "logger", "message"]
    assert set(entry) == {"time", "level", "logger", "message", "request_id", "prompt_tokens", "exception"}


def test_time_is_the_events_own_in_utc() -> None:
    assert as_json(record_of("x", created=1_000_000_000.25))["time"] == "2001-09-09T01:46:40.250Z"


def test_console_lines_hold_the_same_fields_and_a_plain_traceback() -> None:
    secret_local = "a prompt in a local variable"
    text = as_text(failed(record_of("x left", tenant="acme", digest=None), ValueError(len(secret_local))))
    first, *rest = text.splitlines()
    assert "x left [a.b] tenant=acme" in first
    assert "digest" not in first
    assert rest[0] == "Traceback (most recent call last):"
    assert secret_local not in text


def test_lines_written_for_a_request_carry_what_is_known_of_it_by_then() -> None:
    known: dict[str, object] = {"request_id": "r1", "tenant": "-"}
    with bound_contextvars(log_fields=lambda: known):
        before = as_json(record_of("x"))
        known["tenant"] = "acme"
        after = as_json(record_of("x", tenant="its own"))
        then = as_json(record_of("x"))
    assert (before["request_id"], before["tenant"], then["tenant"]) == ("r1", "-", "acme")
    assert after["tenant"] == "its own"
    assert "request_id" not in as_json(record_of("x"))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ls-abcdefghijkl-" + "s3_-" * 10 + "abc", "ls-abcdefghijkl-***"),
        ("Authorization: Bearer s3cr3t.t0ken", "Authorization: Bearer ***"),
        ("{'Authorization': 'bearer s3cr3t'}", "{'Authorization': 'bearer ***'}"),
        ("redis://user:s3cr3t@host:6379/0 is away", "redis://***@host:6379/0 is away"),
        ("rediss://:s3cr3t@host", "rediss://***@host"),
        ("https://me:s3cr3t@example.org/x", "https://***@example.org/x"),
        ("token hf_" + "s3cr3t" * 4, "token hf_***"),
        ("redis://host:6379/0 and a bearer of news", "redis://host:6379/0 and a bearer *** news"),
        ("tools-abc and 12:30@noon stay", "tools-abc and 12:30@noon stay"),
    ],
)
def test_what_looks_like_a_secret_is_taken_out(text: str, shown: str) -> None:
    assert Redaction().text(text) == shown


@pytest.mark.parametrize("form", ["json", "console"])
def test_secrets_are_taken_out_of_messages_fields_and_tracebacks(form: str) -> None:
    redaction = Redaction(["the-admin-key", *passwords_in("redis://u:p%40ssword@h:1/0", None, "http://[broken")])
    record = failed(
        record_of("%s came", "the-admin-key", url="p@ssword", deep={"a": [("the-admin-key", 1)]}),
        ValueError("p%40ssword"),
    )
    line = line_formatter(form, redaction).format(record)
    assert "the-admin-key" not in line
    assert "ssword" not in line
    assert "***" in line


@pytest.mark.parametrize("start", ["a.a.a.a.a.a.a.a.a.a://", "a://", "bearer ", "ls-", "hf_"])
@pytest.mark.parametrize("fill", [":", "@:", "a", "a.", "bearer ", "://", " "])
def test_no_text_takes_long_to_clean(start: str, fill: str) -> None:
    """As a whole request line comes from anybody, and the event loop writes it to the log."""
    text = start + fill * (2**17 // len(fill))
    began = time.thread_time()
    Redaction().text(text)
    assert time.thread_time() - began < 1


def test_operator_reads_real_paths(tmp_path: Path) -> None:
    text = f"the admin key is in {tmp_path}/store/admin_key; model {Path.home()}/models/tiny"
    assert as_json(record_of(text))["message"] == text
    assert text in as_text(record_of(text))


def test_text_from_outside_begins_no_line_of_its_own_and_paints_no_terminal() -> None:
    text = as_text(record_of("a\n12:00:00 [info] forged \x1b[31m", name="acme\r\nevil"))
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text
    assert "a\\x0a12:00:00" in text


def test_every_librarys_lines_take_the_same_way() -> None:
    program = (
        "import logging, warnings; from lora_serve.logs import configure_logging; configure_logging('json')\n"
        "from transformers.utils import logging as t; t.get_logger('transformers.x').error('Bearer hush')\n"
        "logging.getLogger('aiohttp.server').error('e'); logging.getLogger('urllib3').info('chatter')\n"
        "warnings.warn('w')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    entries = [json.loads(line) for line in done.stderr.splitlines()]
    assert [entry["logger"] for entry in entries] == ["transformers.x", "aiohttp.server", "py.warnings"]
    assert entries[0]["message"] == "Bearer ***"


def test_torchaos_remarks_at_import_are_dropped_and_its_real_warnings_are_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torchao", "torch.utils._pytree"):
        monkeypatch.setattr(logging.getLogger(name), "filters", [])
        caplog.set_level(logging.WARNING, logger=name)  # the package benchmarks, if it was imported, raised it
    drop_import_noise()
    logging.getLogger("torchao").warning("Failed to load %s: it is for another GPU", "x.so")
    logging.getLogger("torchao").warning("int4: %s", "no kernel")
    logging.getLogger("torch.utils._pytree").warning("<enum 'K'> is an Enum subclass")
    logging.getLogger("torch.utils._pytree").warning("a node was registered twice")
    assert {"int4: no kernel"} <= set(caplog.messages) <= {"int4: no kernel", "a node was registered twice"}


@pytest.mark.nightly
def test_command_that_imports_torchao_says_nothing_of_it() -> None:
    program = (
        "from lora_serve.cli import main; main(['--version']); import torchao.prototype.safetensors.safetensors_utils"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == ""
