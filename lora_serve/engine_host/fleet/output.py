"""Lines that the processes of replicas write, in the log of the server that started them.

A replica logs in JSON on its standard error (`--log-format json`); Ray collects such lines from every node. Here each
becomes a record of this server's log again, with the replica's process and node. Ray's and Serve's own lines become
records, too, without their dialect.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from lora_serve.core.errors import on_one_line

_NAME = "lora_serve"
_RAYS_OWN = "ray_print_logs"  # the handler that prints lines in Ray's form
_log = logging.getLogger(__name__)
_KNOWN = {"time", "level", "logger", "message", "exception"}
_SERVES_OWN = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d{4}-\S+ \S+ (?:\S+ )+?\d+ -- (.*)", re.DOTALL)
_FEWER = "the fleet has fewer replicas than it should have"  # Serve calls it an error, and starts others
_WORDS = (  # a sign of Ray's dialect -> ours
    (re.compile(r"(?:[Aa]ctor for )?(?:[Rr]eplica )?Replica\(id='([^']*)'[^)]*\)"), r"replica \1"),
    (re.compile(r"Deployment\(name='engine', app='([^']*)'\)"), r"fleet \1"),
    (re.compile(r"Deployment 'engine' in application '([^']*)'"), r"fleet \1"),
    (re.compile(r"The deployments \['engine'\] are UNHEALTHY\."), _FEWER),
    (
        re.compile(r"^.*?A worker died .*?IP address: (\S+) .*?Worker PID: (\d+).*", re.DOTALL),
        r"process \2 on \1 died: killed, short of memory, or a crash",
    ),
)


@contextmanager
def plain_records() -> Iterator[None]:
    """Takes back what an import of Ray in the block does to every log record of this process: a field of Ray's."""
    before = logging.getLogRecordFactory()
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)


def take_words_of(name: str) -> None:
    """Brings the warnings of one of Ray's libraries, which write for themselves, into this server's log."""
    logger = logging.getLogger(name)
    logger.handlers.clear()
    logger.setLevel(logging.WARNING)
    logger.propagate = True


def drop_bytes_of_grpc() -> None:
    """Keeps gRPC from logging an error whose words it cannot decode: as bytes, with what lies behind them in memory."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_decoded)


def _is_decoded(record: logging.LogRecord) -> bool:
    return "Invalid encoding" not in str(record.msg)


@contextmanager
def forward_replica_logs() -> Iterator[None]:
    """Takes the lines of workers from Ray, which has just been connected, as long as the block lasts; they come on a
    thread of Ray's. Raises ImportError or AttributeError for a Ray of another make.
    """
    importlib.import_module("ray.serve")  # comes with a handler of its own
    take_words_of("ray.serve")
    dispatcher = importlib.import_module("ray._private.ray_logging").global_worker_stdstream_dispatcher
    dispatcher.remove_handler(_RAYS_OWN)
    dispatcher.add_handler(_NAME, log_batch)
    worker: Any = importlib.import_module("ray._private.worker")
    printed, worker.print_to_stdstream = worker.print_to_stdstream, log_failure
    try:
        yield
    finally:
        worker.print_to_stdstream = printed
        dispatcher.remove_handler(_NAME)


def log_batch(batch: Mapping[str, Any]) -> None:
    """Logs lines of one process, as Ray's log monitor sends them. Plain lines in a row are one record."""
    if batch.get("pid") in ("autoscaler", "gcs_server", "raylet"):
        return
    fields = {"replica_pid": batch.get("pid"), "replica_node": batch.get("ip")}
    lines = [line for line in batch.get("lines", ()) if line.strip()]
    for is_plain, row in groupby(lines, _is_plain):
        for text in ["\n".join(row)] if is_plain else row:
            _log_line(text, fields)


def log_failure(batch: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """Logs an error that Ray tells this process; by itself it would print it past the log. See `print_to_stdstream`."""
    for line in batch["lines"]:
        _log.warning("%s", in_words(line))


def in_words(text: str) -> str:
    """Ray's or Serve's text on one line, with our words for what is known."""
    for sign, words in _WORDS:
        text = sign.sub(words, text)
    return on_one_line(text)


def _is_plain(line: str) -> bool:
    return _entry(line) is None and not _SERVES_OWN.match(line)


def _log_line(line: str, fields: Mapping[str, Any]) -> None:
    entry = _entry(line)
    if entry is None and (found := _SERVES_OWN.match(line)):
        words = in_words(found[2])
        _log.log(logging.WARNING if words == _FEWER else logging.getLevelNamesMapping()[found[1]], "%s", words)
        return
    if entry is None:
        _log.info("%s", line, extra=dict(fields))
        return
    level = logging.getLevelNamesMapping().get(str(entry.get("level", "")).upper(), logging.INFO)
    more = {name: value for name, value in entry.items() if name not in _KNOWN and name not in fields}
    message = str(entry["message"])
    if exception := entry.get("exception"):
        message = f"{message}\n{exception}"
    extra = {"replica_" + name if name in _RESERVED else name: value for name, value in more.items()}
    logging.getLogger(str(entry["logger"])).log(level, "%s", message, extra={**extra, **fields})


def _entry(line: str) -> dict[str, Any] | None:
    """A line in the form of `--log-format json`; None for any other text."""
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and "message" in entry and "logger" in entry else None


_RESERVED = set(vars(logging.makeLogRecord({}))) | {"message", "asctime"}  # names that a record has for itself
