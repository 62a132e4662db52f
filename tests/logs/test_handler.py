"""From a record to a line in the queue: with what the caller knows, and repeats summed up."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from lora_serve.core.log_context import logged_with
from lora_serve.logs.handler import LogHandler
from lora_serve.logs.pipeline import line_formatter
from lora_serve.logs.redaction import Redaction
from lora_serve.logs.repeats import BURST, PERIOD
from lora_serve.logs.writer import LogWriter


class Log:
    """A logger whose lines go through a handler into a pipe."""

    def __init__(self) -> None:
        self.reader, self.end = os.pipe()
        self.now = 0.0
        self.handler = LogHandler(LogWriter(self.end), lambda: self.now)
        self.handler.setFormatter(line_formatter("json", Redaction(["the-secret"])))
        self.logger = logging.Logger("of.the.tests")  # noqa: LOG001
        self.logger.addHandler(self.handler)

    def lines(self) -> list[dict[str, Any]]:
        self.handler.flush()
        self.handler.writer.close()
        os.close(self.end)
        with os.fdopen(self.reader) as file:
            return [json.loads(line) for line in file]


@pytest.fixture
def log() -> Log:
    return Log()


def test_lines_carry_what_the_caller_knew_when_it_spoke(log: Log) -> None:
    known = {"request_id": "r1"}
    with logged_with(lambda: known):
        log.logger.warning("the-secret is %s", "told")
        known["request_id"] = "r2"
    log.logger.info("outside")
    first, second = log.lines()
    assert (first["request_id"], first["message"]) == ("r1", "*** is told")
    assert "request_id" not in second


def test_sum_of_repeats_belongs_to_no_request(log: Log) -> None:
    with logged_with(lambda: {"request_id": "r1"}):
        for _ in range(BURST + 3):
            log.logger.warning("again")
        log.now += PERIOD
        log.logger.warning("again")
    lines = log.lines()
    assert [line["message"] for line in lines[BURST:]] == ["again (... 3 times more within 10 s)", "again"]
    assert "request_id" not in lines[BURST]
    assert log.handler.num_held_back == 3


def test_notice_of_dropped_records_is_a_line_like_others(log: Log) -> None:
    log.handler.writer.add(log.handler.writer.notice(7))
    (line,) = log.lines()
    assert line["message"].startswith("7 records were dropped")
    assert line["level"] == "warning"


def test_last_words_come_out_and_an_absent_reader_holds_up_no_end() -> None:
    program = (
        "import logging, sys; from lora_serve.logs import configure_logging\n"
        "from lora_serve.logs.handler import LogHandler; from lora_serve.logs.streams import divert_streams\n"
        "configure_logging('json', handler=LogHandler(divert_streams()))\n"
        "for n in range(%d): logging.error('x' * 900 + chr(97 + n %% 26) + 'y' * (n // 26))\n"
        "logging.critical('the end'); print('printed'); raise ValueError('uncaught')\n"
    )
    command = [sys.executable, "-c"]
    done = subprocess.run([*command, program % 20], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert '"the end"' in done.stderr
    assert "printed" in done.stderr
    assert "ValueError: uncaught" in done.stderr
    unread = subprocess.Popen([*command, program % 2000], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert unread.wait(100) == 1
    for pipe in (unread.stdout, unread.stderr):
        assert pipe is not None
        pipe.close()
