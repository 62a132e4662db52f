"""Calls on other threads that end nobody but themselves: asyncio hands SystemExit on to its whole loop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from lora_serve.core.errors import InternalError

T = TypeVar("T")
_log = logging.getLogger(__name__)


def contained(call: Callable[[], T]) -> T:
    """What `call` gives or raises; InternalError in place of what would end a thread or the process."""
    try:
        return call()
    except Exception:
        raise
    except BaseException as error:
        _log.exception("an operation wanted to end its thread")
        raise InternalError("The operation failed; the server goes on.") from error
