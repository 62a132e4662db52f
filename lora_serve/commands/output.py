"""Prints results to standard output, all else to standard error; exit codes; the question before a deletion."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

from rich.console import Console, OverflowMethod, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

WIDE = 1000  # columns when the output is no terminal, so that no line is folded


class ExitCode(enum.IntEnum):
    OK = 0
    REFUSED = 1
    WRONG_COMMAND_LINE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    UNAVAILABLE = 5
    INTERRUPTED = 130


class CommandError(Exception):
    """The command ends with `code`; `lines` are for people, on standard error."""

    def __init__(self, code: ExitCode, *lines: str, retry_after: float | None = None) -> None:
        """`retry_after`: seconds after which the call may be repeated; None: not at all."""
        super().__init__("\n".join(lines))
        self.code = code
        self.lines = lines
        self.retry_after = retry_after


def console_on(stream: TextIO) -> Console:
    """A console on `stream`, in plain text unless it is a terminal."""
    is_terminal = stream.isatty()
    width = None if is_terminal else WIDE
    return Console(
        file=stream, force_terminal=is_terminal, width=width, markup=False, emoji=False, highlight=False, soft_wrap=True
    )


@dataclass(frozen=True, slots=True)
class Output:
    """A command's output: tables and sentences, or the server's JSON with `as_json`."""

    as_json: bool = False
    results: Console = field(default_factory=lambda: console_on(sys.stdout))
    notes: Console = field(default_factory=lambda: console_on(sys.stderr))

    def show(self, document: dict[str, Any], *shown: RenderableType) -> None:
        """Prints the document as one line of JSON, or its rendering for people."""
        if self.as_json:
            self.results.file.write(json.dumps(document) + "\n")
            return
        for part in shown:
            if isinstance(part, str) or self.results.is_terminal:
                self.results.print(part, soft_wrap=isinstance(part, str))
                continue
            with self.results.capture() as captured:
                self.results.print(part)
            # The cells of a table's last column are filled up with blanks.
            self.results.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))

    def note(self, *lines: str) -> None:
        for line in lines:
            self.notes.print(plain(line), soft_wrap=True)

    def fail(self, error: CommandError) -> None:
        self.note(f"lora-serve: error: {error.lines[0]}", *error.lines[1:])

    def warn(self, warnings: Iterable[str]) -> None:
        self.note(*(f"warning: {warning}" for warning in warnings))

    def progress(self) -> AbstractContextManager[Progress]:
        """A progress bar of bytes on standard error; hidden with --json and where that is no terminal."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
        )
        is_off = self.as_json or not self.notes.is_terminal
        return Progress(*columns, TimeRemainingColumn(), console=self.notes, transient=True, disable=is_off)

    @contextmanager
    def progress_of(self, label: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar of one work; call the yielded function with the bytes that are done and those in all."""
        with self.progress() as progress:
            task = progress.add_task(plain(label), total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)


def confirm_deletion(is_sure: bool, what: str) -> None:
    """Asks whether `what` is to go, unless `is_sure` (--yes).

    Raises CommandError if the answer is not yes, and where input is no terminal.
    """
    if is_sure:
        return
    if not sys.stdin.isatty():
        raise CommandError(ExitCode.REFUSED, f"nothing was deleted: input is no terminal, so only --yes deletes {what}")
    sys.stderr.write(f"Delete {what}? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CommandError(ExitCode.REFUSED, "nothing was deleted")


Columns = Mapping[str, Callable[[Any], object]]  # title -> what a row has there


def table_of(
    rows: Iterable[Any], columns: Columns, right: Collection[str] = (), *, overflow: OverflowMethod = "ellipsis"
) -> Table:
    """A table with a line for each row. `right`: columns of numbers; `overflow`: where a terminal is too narrow."""
    table = Table(box=None, pad_edge=False)
    for title in columns:
        table.add_column(title, justify="right" if title in right else "left", overflow=overflow)
    for row in rows:
        table.add_row(*(plain(cell(row)) for cell in columns.values()))
    return table


def facts_table(facts: Iterable[tuple[str, object]]) -> Table:
    """A table of names and their values."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in facts:
        table.add_row(plain(name), plain(value))
    return table


def yes_or_no(value: object) -> str:
    return "yes" if value else "no"


def plain(value: object) -> str:
    """The value as text, with characters that do not print shown as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(value))


def csv_cell(value: object) -> str:
    """The value as text of a CSV file: a spreadsheet must not take a name for a formula."""
    text = plain(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def time_text(seconds: int | None) -> str:
    """Unix seconds as a UTC time; `-` for None."""
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def bytes_text(num_bytes: int) -> str:
    """1234567 -> 1.2 MiB, as the console shows it"""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """0.0123 -> 12 ms; 12.34 -> 12.3 s; 754 -> 12m 34s; 9000 -> 2h 30m"""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms" if seconds >= 0.001 or not seconds else "< 1 ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 100 else f"{minutes // 60:,}h {minutes % 60:02d}m"


def byte_seconds_text(byte_seconds: float) -> str:
    """490659000 -> 467.9 MiB·s; the bytes of adapters on the device, times the seconds that each was there"""
    return bytes_text(round(byte_seconds)) + "·s"
