"""From a record to a line in the queue: with what the caller knows, and what is said again and again counted."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
from structlog.contextvars import bound_contextvars

from lora_serve.logs.handler import BURST, MAX_KINDS, PERIOD, LogHandler, Repeats, kind_of
from lora_serve.logs.pipeline import Redaction, line_formatter
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
    with bound_contextvars(log_fields=lambda: known):
        log.logger.warning("the-secret is %s", "told")
        known["request_id"] = "r2"
    log.logger.info("outside")
    first, second = log.lines()
    assert (first["request_id"], first["message"]) == ("r1", "*** is told")
    assert "request_id" not in second


def test_sum_of_repeats_belongs_to_no_request(log: Log) -> None:
    with bound_contextvars(log_fields=lambda: {"request_id": "r1"}):
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
        "from lora_serve.logs.handler import LogHandler; from lora_serve.logs.writer import divert_streams\n"
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


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record_of(message: str, *arguments: object, name: str = "a", level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord(name, level, __file__, 1, message, arguments, None)


def failed(error: Exception) -> logging.LogRecord:
    record = record_of("request %s failed", "r")
    try:
        raise error
    except Exception:
        record.exc_info = sys.exc_info()
    return record


def shown(repeats: Repeats, *records: logging.LogRecord) -> list[str]:
    return [admitted.getMessage() for record in records for admitted in repeats.admitted(record)]


def test_a_few_are_shown_and_the_rest_summed_up_when_the_period_is_over() -> None:
    clock = Clock()
    repeats = Repeats(clock)
    said = shown(repeats, *(record_of("peer %d is away", number) for number in range(BURST + 240)))
    assert said == [f"peer {number} is away" for number in range(BURST)]
    assert list(repeats.overdue()) == []
    clock.now += PERIOD
    (total,) = repeats.overdue()
    assert total.getMessage() == f"peer {BURST + 239} is away (... 240 times more within 10 s)"
    assert (total.name, total.levelno) == ("a", logging.WARNING)
    assert list(repeats.overdue()) == []
    assert repeats.num_held == 240


def test_next_one_after_the_period_comes_behind_the_sum() -> None:
    clock = Clock()
    repeats = Repeats(clock)
    shown(repeats, *[record_of("x")] * (BURST + 1))
    clock.now += PERIOD + 5
    assert shown(repeats, record_of("x")) == ["x (... 1 times more within 15 s)", "x"]


def test_storm_without_end_is_a_handful_of_lines_a_period() -> None:
    clock = Clock()
    repeats = Repeats(clock)
    lines = 0
    for _ in range(10_000):
        clock.now += 0.01
        lines += len(shown(repeats, record_of("x")))
    assert lines <= (BURST + 1) * (100 / PERIOD + 1)


def test_loggers_levels_templates_and_origins_are_told_apart() -> None:
    repeats = Repeats(Clock(), burst=1)
    records = [
        record_of("x"),
        record_of("y"),
        record_of("x", name="b"),
        record_of("x", level=logging.ERROR),
        record_of("%s", "one"),
        record_of("%s", "two"),
        failed(ValueError()),
        failed(KeyError()),
    ]
    assert len(shown(repeats, *records)) == len(records)
    assert shown(repeats, *records[:-2]) == []


def test_numbers_and_addresses_make_no_difference() -> None:
    assert kind_of(record_of("Task 17 at 0x7f3a failed")) == kind_of(record_of("Task 4 at 0x11 failed"))


def test_lines_of_ordinary_work_are_never_held_back_but_for_clients_doings() -> None:
    repeats = Repeats(Clock())
    assert len(shown(repeats, *[record_of("x", level=logging.INFO)] * 100)) == 100
    noisy = record_of("broken HTTP", name="lora_serve.server.sockets.http_runner", level=logging.INFO)
    assert len(shown(repeats, *[noisy] * 100)) == BURST


def test_number_of_kinds_that_are_remembered_is_bounded_and_no_sum_is_lost() -> None:
    repeats = Repeats(Clock(), burst=1)
    shown(repeats, *[record_of("first")] * 3)
    said = shown(repeats, *(record_of("%s", f"kind {chr(97 + n % 26)}{'z' * (n // 26)}") for n in range(MAX_KINDS)))
    assert "first (... 2 times more within 0 s)" in said
    assert len(repeats._counts) <= MAX_KINDS


def test_at_the_end_everything_is_summed_up() -> None:
    repeats = Repeats(Clock(), burst=1)
    shown(repeats, *[record_of("x")] * 3, *[record_of("y")] * 2)
    assert [record.getMessage() for record in repeats.overdue(all_of_them=True)] == [
        "x (... 2 times more within 0 s)",
        "y (... 1 times more within 0 s)",
    ]
