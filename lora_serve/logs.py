"""The form of the log: one line per event on standard error, for people or as JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_FIELDS = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Said at every import of torchao: libraries of other GPUs that cannot load here, and a remark between two versions.
# Its weight-only products, the ones used here, are torch's own.
_NOISE = {"torchao": ("Failed to load ",), "torch.utils._pytree": ("<enum ",)}


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, the record's extra fields, the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(form: str, level: int = logging.INFO) -> None:
    """`form` is "console" or "json". The libraries' own chatter starts at warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_FIELDS, datefmt="%H:%M:%S"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("lora_serve").setLevel(level)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", category=FutureWarning)
    _quieten_transformers()


def drop_import_noise() -> None:
    """To be called before torch is imported: what torchao says at its import is said before a log is configured."""
    for name in _NOISE:
        logging.getLogger(name).addFilter(_is_not_noise)


def _is_not_noise(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOISE[record.name])


def _quieten_transformers() -> None:
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Logs how long the block took, if it ended well."""
    start = time.perf_counter()
    yield
    _log.info("%s: %.2f s", what, time.perf_counter() - start)
