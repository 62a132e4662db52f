"""What is said again and again is said a few times, then counted."""

from __future__ import annotations

import logging
import sys

from lora_serve.logs.repeats import BURST, MAX_KINDS, PERIOD, Repeats, kind_of


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
