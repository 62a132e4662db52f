"""The log: one line per event on standard error, for people or as JSON; every library's lines take the same way."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lora_serve.logs.pipeline import Redaction

_log = logging.getLogger(__name__)
# Logged at every import of torchao: libraries of other GPUs that cannot load here, and a remark between versions.
# The weight-only products used here are torch's own.
_NOISE = {"torchao": ("Failed to load ",), "torch.utils._pytree": ("<enum ",)}


def configure_logging(
    form: str, level: int = logging.INFO, redaction: Redaction | None = None, handler: logging.Handler | None = None
) -> None:
    """`form` is "console" or "json". The libraries' own chatter starts at warnings.

    By default the thread that logs waits until the line is written; a server brings a `LogHandler`.
    """
    from lora_serve.logs.pipeline import Redaction, line_formatter

    handler = handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(line_formatter(form, redaction or Redaction(), colors=sys.stderr.isatty()))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("lora_serve").setLevel(level)
    logging.captureWarnings(True)
    warnings.filterwarnings("ignore", category=FutureWarning)
    _quieten_transformers()


def drop_import_noise() -> None:
    """Silences known messages of torchao's import; call it before torch is imported."""
    for name in _NOISE:
        logging.getLogger(name).addFilter(_is_not_noise)


def _is_not_noise(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOISE[record.name])


def _quieten_transformers() -> None:
    """Lets only transformers' errors through, and through the root logger's handlers."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Logs how long the block took, if it ended well."""
    start = time.perf_counter()
    yield
    _log.info("%s: %.2f s", what, time.perf_counter() - start)
